"""The layers of a tensor-parallel model (Shoeybi et al., 2019; sequence parallel: Korthikanti et al., 2022).

Parameters are DTensors on the tp axis, so that data-parallel wraps, clipping and checkpoints know what is where.
`forward` computes on the local pieces, and an `Axis` moves activations where a layer's input or output has another
layout than its neighbour's. torch's own styles (`ColwiseParallel`, ...) compute on DTensors throughout; that
costs a dispatch an operator, and leaves gradients in placements other than their parameter's (measured, torch 2.13: a
row-split embedding's gradient whole on every rank, a replicated norm's as `Partial`), which an optimizer without a
data-parallel wrap would take over into its state. Here every gradient has its parameter's placements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from framework.adapters.torch_private import swapped_parameters
from framework.dropout import FEATURES, SEQUENCE
from framework.errors import UsageError
from framework_plugins.tp.gradient_shapes import watch_
from framework_plugins.tp.ranges import own_range
from framework_plugins.tp.streams import Streams


@dataclass(eq=False)
class Axis:
    """What all layers of one part share.

    This one moves activations by DTensor placements, `framework_plugins.tp.operators.OperatorAxis` by operators.

    Attributes:
        mesh: the 1-D mesh of axis tp.
        streams: random streams of this rank.
        sequence_parallel: between blocks each rank holds a piece of the sequence (the last dimension but one).
        loss_parallel: the head leaves its outputs split.
        check_shapes: every gradient is held against the shape that its piece must have.
        replaced: original parameter -> its DTensor, so that tied parameters stay one.
    """

    mesh: DeviceMesh
    streams: Streams
    sequence_parallel: bool = False
    loss_parallel: bool = False
    check_shapes: bool = False
    replaced: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)

    def distribute(self, module: nn.Module, name: str, placement: Placement) -> None:
        """Replace one parameter by a DTensor; rank 0 of the axis says what its values are."""
        parameter = getattr(module, name)
        if parameter is None:
            return
        if parameter not in self.replaced:
            tensor = distribute_tensor(parameter.detach(), self.mesh, [placement])
            self.replaced[parameter] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        module.register_parameter(name, self.replaced[parameter])

    def added_up(self, tensor: Tensor) -> Tensor:
        """Identity whose gradient is added up over the axis: where a whole value enters split computation (`f`)."""
        whole = DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])

    def enter(self, x: Tensor) -> Tensor:
        """Bring the residual stream into a column-split layer: whole on every rank."""
        if not self.sequence_parallel:
            return self.added_up(x)
        piece = DTensor.from_local(x, self.mesh, [Shard(x.ndim - 2)], run_check=False)
        return piece.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def leave(self, y: Tensor) -> Tensor:
        """Bring partial sums back into the residual stream: added up, and with sequence parallelism cut."""
        placement: Placement = Replicate()
        if self.sequence_parallel:
            placement = Shard(y.ndim - 2)
            self.check_length(y)
        return DTensor.from_local(y, self.mesh, [Partial()], run_check=False).redistribute(
            placements=[placement]
        ).to_local()  # fmt: skip

    def joined(self, y: Tensor, size: int) -> Tensor:
        """Return [..., size] of this rank's columns."""
        return self.marked(y, size).redistribute(placements=[Replicate()]).to_local()

    def marked(self, y: Tensor, size: int) -> DTensor:
        """Say of this rank's columns that they are a piece of [..., size]; nothing is moved."""
        shape = torch.Size((*y.shape[:-1], size))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(y, self.mesh, [Shard(y.ndim - 1)], run_check=False, shape=shape, stride=stride)

    def check_length(self, y: Tensor) -> None:
        """Refuse a sequence that can't be cut evenly.

        Raises:
            UsageError: tp doesn't divide the number of positions.
        """
        if y.shape[-2] % self.mesh.size():
            raise UsageError(
                f"tp.sequence_parallel=true cuts sequences into {self.mesh.size()} pieces (tp.size), but this "
                f"batch has {y.shape[-2]} positions; type tp.sequence_parallel=false, or use a length that "
                f"{self.mesh.size()} divides."
            )

    def piece(self, module: nn.Module, name: str) -> Tensor | None:
        """Return this rank's piece of a parameter; its gradient has the parameter's placements."""
        parameter = getattr(module, name)
        tensor: Tensor | None = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if self.check_shapes and tensor is not None and tensor.requires_grad:
            watch_(tensor, module, name)
        return tensor


@dataclass(eq=False)
class Siblings:
    """The column-split layers of one parent: an input that several take (queries, keys, values) is brought in once."""

    axis: Axis
    _given: Tensor | None = None
    _whole: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """Return `axis.enter(x)`, from the layer before if `x` is the same tensor."""
        if self._given is not x or self._whole is None or self._whole.requires_grad != _records(x):
            self._given, self._whole = x, self.axis.enter(x)
        return self._whole

    def forget(self) -> None:
        """Let go of the tensors."""
        self._given = self._whole = None


def _records(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


class _Layer(ParallelStyle):
    """Replaces `forward` of a module's instance by its own `run`; a deep copy of the module is bound to itself."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute what `module.forward` computes, on this rank's pieces."""
        raise NotImplementedError

    def _distribute(self, module: nn.Module) -> None:
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._distribute(module)
        module.forward = MethodType(self.run, module)
        return module


class Colwise(_Layer):
    """Linear, weight [out/tp, in]: each rank computes its own outputs."""

    def __init__(self, axis: Axis, siblings: Siblings) -> None:
        super().__init__(axis)
        self.siblings = siblings

    def _distribute(self, module: nn.Module) -> None:
        self.axis.distribute(module, "weight", Shard(0))
        self.axis.distribute(module, "bias", Shard(0))

    def run(self, module: Any, x: Tensor) -> Tensor:
        """Return [..., out/tp] of x [..., in] (with sequence parallelism of this rank's tokens: [..., s/tp, in])."""
        y = F.linear(self.siblings.enter(x), self.axis.piece(module, "weight"), self.axis.piece(module, "bias"))  # type: ignore[arg-type]
        if module.training:
            self.axis.streams.to_own(FEATURES)
        return y


class Rowwise(_Layer):
    """Linear, weight [out, in/tp]: the ranks' outputs are added up; the bias comes after, once."""

    def __init__(self, axis: Axis, siblings: Siblings) -> None:
        super().__init__(axis)
        self.siblings = siblings

    def _distribute(self, module: nn.Module) -> None:
        self.axis.distribute(module, "weight", Shard(1))
        self.axis.distribute(module, "bias", Replicate())

    def run(self, module: Any, x: Tensor) -> Tensor:
        """Return [..., out] of x [..., in/tp] (with sequence parallelism this rank's tokens: [..., s/tp, out])."""
        self.siblings.forget()
        if not self.axis.sequence_parallel:
            self.axis.streams.to_main()
        y = self.axis.leave(F.linear(x, self.axis.piece(module, "weight")))  # type: ignore[arg-type]
        if self.axis.sequence_parallel and module.training:
            self.axis.streams.to_own(SEQUENCE)
        if module.bias is None:
            return y
        bias = self.axis.piece(module, "bias")
        assert bias is not None
        return y + (self.axis.added_up(bias) if self.axis.sequence_parallel else bias).to(y.dtype)


class Embedding(_Layer):
    """Embedding, weight [rows/tp, width]: each rank looks up the ids in its range."""

    def _distribute(self, module: nn.Module) -> None:
        self.axis.distribute(module, "weight", Shard(0))

    def run(self, module: Any, ids: Tensor) -> Tensor:
        """Return [..., s, width] of ids [..., s] (with sequence parallelism this rank's tokens: [..., s/tp, width])."""
        rows = module.num_embeddings
        if ids.device.type == "cpu" and bool(((ids < 0) | (ids >= rows)).any()):
            wrong = ids[(ids < 0) | (ids >= rows)][0]
            raise IndexError(f"Id {int(wrong)} is out of bounds: the embedding has {rows} rows (0 to {rows - 1})")
        start, end = own_range(rows, self.axis.mesh)
        mine = (ids >= start) & (ids < end)
        # no id at all: leave an index that the device refuses, instead of a zero vector
        row = torch.where(mine, ids - start, torch.where((ids >= 0) & (ids < rows), 0, end - start))
        padding = module.padding_idx
        padding = padding - start if padding is not None and start <= padding < end else None
        found = F.embedding(row, self.axis.piece(module, "weight"), padding)  # type: ignore[arg-type]
        y = self.axis.leave(torch.where(mine.unsqueeze(-1), found, 0.0))
        if self.axis.sequence_parallel and module.training:
            self.axis.streams.to_own(SEQUENCE)  # dropout of embeddings: each rank has its own tokens
        return y


class Head(_Layer):
    """Linear to the vocabulary, weight [out/tp, in]; outputs joined, or left split for `vocab_loss`."""

    def _distribute(self, module: nn.Module) -> None:
        self.axis.distribute(module, "weight", Shard(0))
        self.axis.distribute(module, "bias", Shard(0))

    def run(self, module: Any, x: Tensor) -> Tensor:
        """Return [..., out] of x [..., in]: a whole plain tensor, or with loss parallelism a DTensor."""
        self.axis.streams.to_main()
        y = F.linear(self.axis.enter(x), self.axis.piece(module, "weight"), self.axis.piece(module, "bias"))  # type: ignore[arg-type]
        if self.axis.loss_parallel:
            return self.axis.marked(y, module.out_features)
        return self.axis.joined(y, module.out_features)


class Replicated(_Layer):
    """Any layer whose parameters all ranks hold.

    Args:
        axis: of the part.
        summed: the layer works on this rank's piece of the activations, so its gradients are added up over the axis.
    """

    def __init__(self, axis: Axis, summed: bool) -> None:
        super().__init__(axis)
        self.summed = summed

    def _distribute(self, module: nn.Module) -> None:
        for name, _ in list(module.named_parameters(recurse=False)):
            self.axis.distribute(module, name, Replicate())

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own `forward` with local parameters."""
        tensors = {}
        for name, _ in module.named_parameters(recurse=False):
            value = self.axis.piece(module, name)
            assert value is not None
            tensors[name] = self.axis.added_up(value) if self.summed else value
        with swapped_parameters(module, tensors):
            return type(module).forward(module, *args, **kwargs)


def enclose_(block: nn.Module, axis: Axis, siblings: list[Siblings]) -> None:
    """Put the random streams and kept inputs of one block in order at its start and its end, whatever happens inside.

    It goes around `forward`, inside what activation checkpointing will put there: a recomputation that stops early
    unwinds through here. Blocks start and end on the main stream, so checkpointing stores and restores that one.
    """
    inner = block.forward
    run: Callable[..., Any] = inner.__func__ if isinstance(inner, MethodType) else type(block).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if axis.sequence_parallel and self.training:
            axis.streams.to_own(SEQUENCE)
        try:
            return run(self, *args, **kwargs)
        finally:
            axis.streams.to_main()
            for one in siblings:
                one.forget()

    block.forward = MethodType(forward, block)
    if axis.sequence_parallel:
        block.register_forward_pre_hook(lambda *_: axis.streams.to_main())
        block.register_forward_hook(lambda module, *_: axis.streams.to_own(SEQUENCE) if module.training else None)


def broadcast_(module: nn.Module, axis: Axis) -> None:
    """Make plain parameters and buffers of `module` itself equal over the axis: rank 0's values."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            dist.broadcast(tensor.detach(), group=axis.mesh.get_group(), group_src=0)
