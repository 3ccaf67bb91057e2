"""`Pipeline`: runs a batch through all stages of this rank, forward and backward, on torch.distributed.pipelining.

Lightning wants a loss from `training_step` and calls `zero_grad` and `backward` afterwards, but a schedule runs both
passes at once. So `training_step` sets the fresh gradients aside, and `merge_gradients`, called in place of backward,
adds them to what was accumulated: `zero_grad` in between erases nothing that is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from framework import preemption
from framework.adapters import torch_private
from framework.adapters.torch_private import tree_leaves, tree_map
from framework.errors import UsageError
from framework.evaluation import Piece
from framework.mesh import Mesh
from framework.metrics import Entry, Scalar
from framework.parts import ModelPart
from framework.plan import RunPlan
from framework.stages import Caller, Stage
from framework.window import batch_size, micro_slices, read_output

if TYPE_CHECKING:
    from framework.precision import Precision
    from framework.window import Window

ScheduleMaker = Callable[[list[PipelineStage], int, Callable[[Tensor, Tensor], Tensor]], Any]
"""(stages of this rank, micro-batches, loss function) -> a schedule of torch.distributed.pipelining."""


def split(batch: Any, pieces: int) -> list[Any]:
    """Cut a batch into `pieces` along dim 0 of its tensors and along its lists.

    Tensors of 0 dims and other objects go to every micro-batch.

    Raises:
        UsageError: a tensor's dim 0 isn't the batch size, so that it can't be cut.
    """
    size = batch_size(batch)
    places = micro_slices(size, pieces)

    def cut(leaf: Any, index: int) -> Any:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            return leaf
        if leaf.size(0) != size:
            raise UsageError(
                f"A tensor of shape {tuple(leaf.shape)} in the batch can't be cut into micro-batches: its dim 0 isn't "
                f"the batch size {size}; return it from the dataset a sample, or type pp=none."
            )
        return leaf[places[index]]

    return [tree_map(lambda leaf, i=index: cut(leaf, i), batch) for index in range(pieces)]


def shape_key(batch: Any) -> tuple[Any, ...]:
    """Shapes and dtypes of a batch's tensors."""
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


@dataclass
class _Result:
    """What the last stage found for one micro-batch."""

    loss: Tensor
    weight: Scalar
    weighted: bool
    entries: Mapping[str, Entry]


class Pipeline:
    """This rank's stages and their schedules, one for each shape of batch.

    Args:
        parts: this rank's stages, ascending; their modules are `Stage`s.
        mesh: stages communicate over axis `pp`.
        plan: micro-batches and accumulation.
        make: builds the schedule.
        device: of this rank.
    """

    delayed = False
    """Whether gradients are applied in later steps than their batch's; such a pipeline weighs its batches itself."""

    def __init__(
        self, parts: Sequence[ModelPart], mesh: Mesh, plan: RunPlan, make: ScheduleMaker, device: torch.device
    ) -> None:
        self.parts = list(parts)
        self.root = parts[0].root
        self.mesh = mesh
        self.plan = plan
        self.make = make
        self.device = device
        self.has_last = parts[-1].index == parts[-1].stages - 1
        for part in self.parts:
            self._stage(part).masks = part.masks
            self._stage(part).watch()
        self._schedules: dict[Any, Any] = {}
        self._parameters = list(self.root.parameters())
        self._fresh: list[Tensor | None] = []
        self._factors: dict[int, Callable[[Tensor], Tensor]] = {}
        self._places: dict[int, int] = {}
        self._metas: dict[Any, list[tuple[torch.Size, torch.dtype]]] = {}

    @staticmethod
    def _stage(part: ModelPart) -> Stage:
        assert isinstance(part.module, Stage)
        return part.module

    # -- training --------------------------------------------------------------------------------------------------
    def training_step(self, window: Window, precision: Precision, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """Run forward and backward of a whole batch; gradients wait for `merge_gradients`.

        Returns:
            `{"loss": ...}`, the true global loss, the same on all ranks.
        """
        count = self.plan.batch.microbatches
        masks = self.parts[0].masks
        micros = self.micro_batches(batch)
        reference = self._reference(window, micros[0])
        results: dict[int, _Result] = {}
        accumulated = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

        with ExitStack() as guards:

            def run(index: int, call: Caller) -> Tensor:
                if masks is not None:
                    masks.micro_batch(index, count)
                with window.recorder.recording() as entries:
                    output = call(lambda: self.root.training_step(micros[index], *rest, **kwargs))
                loss, weight, weighted = read_output(output, micros[index])
                if loss is None:
                    raise UsageError(
                        "training_step returned None, which a pipeline can't skip; return a loss, or type pp=none."
                    )
                results[index] = _Result(loss.detach(), weight, weighted, entries)
                unit = reference if weighted else float(self.plan.batch.micro_batch_size)
                pieces = count * self.plan.batch.accumulation
                factor = torch.as_tensor(weight / unit / pieces)
                self._factors[index] = lambda value: precision.scale_loss(value * factor.to(value))
                if float(weight) == 0.0:
                    guards.enter_context(torch_private.zero_leaf_gradients(loss))
                return loss

            self._learn("training_step", micros, *rest, **kwargs)
            self._run_schedule(run, count, shape_key(batch))
        self._fresh = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, accumulated, strict=True):
            parameter.grad = gradient
        return self._close(window, results, reference)

    def micro_batches(self, batch: Any) -> list[Any]:
        """Cut a batch; UsageError if it has fewer samples than there are micro-batches."""
        count = self.plan.batch.microbatches
        if batch_size(batch) < count:
            raise UsageError(
                f"A batch of {batch_size(batch)} samples can't be cut into pp.microbatches={count}; "
                f"type pp.microbatches={batch_size(batch)} or a larger batch."
            )
        return split(batch, count)

    def _reference(self, window: Window, micro: Any) -> float:
        """Weight of a micro-batch that counts as 1 if the module returns weights: the size of its first tensor.

        Only its order of magnitude matters (the window corrects it exactly), but it must be the same on all ranks.
        """
        if window.token_reference is None:
            first = next(leaf for leaf in tree_leaves(micro) if isinstance(leaf, Tensor))
            size = torch.tensor(float(first.numel()), dtype=torch.float64, device=self.device)
            dist.all_reduce(size, dist.ReduceOp.MAX)
            window.token_reference = float(size)
        return window.token_reference

    def _learn(self, method: str, micros: Sequence[Any], *rest: Any, **kwargs: Any) -> None:
        """Tell the stages what comes."""
        for index, micro in enumerate(micros):
            for part in self.parts:
                self._stage(part).learn(index, method, shape_key(micro), (micro, *rest), kwargs)

    def _run_schedule(self, run: Callable[[int, Caller], Any], count: int, key: Any) -> None:
        if key not in self._schedules:
            stages = [
                PipelineStage(part.module, part.index, part.stages, self.device, group=self.mesh.group("pp"))
                for part in self.parts
            ]
            for part in self.parts:
                self._stage(part).rehearsing = True
            self._schedules[key] = self.make(stages, count, lambda loss, micro: self._factors[int(micro)](loss))
        numbers = torch.arange(count)
        for part in self.parts:
            self._stage(part).run = run
        try:
            self._schedules[key].step(micro=numbers, target=numbers, return_outputs=False)
        finally:
            for part in self.parts:
                self._stage(part).run = Stage._not_running

    def _close(self, window: Window, results: Mapping[int, _Result], reference: float) -> Any:
        loss, weight, weighted = 0.0, 0.0, False
        if self.has_last:
            found = [results[index] for index in sorted(results)]
            for result in found:
                window.totals.add(result.entries, result.weight)
            read = window.totals.settle(*(result.weight for result in found), *(result.loss for result in found))
            weights, losses = read[: len(found)], read[len(found) :]
            weight = sum(weights)
            loss = sum(one * w for one, w in zip(losses, weights, strict=True) if w > 0) / weight if weight else 0.0
            weighted = any(result.weighted for result in found)
        step = window.agree(loss, weight, weighted, stop=preemption.requested())
        window.reference = reference if step.weighted else float(self.plan.batch.micro_batch_size)
        value = step.loss / step.weight if step.weight else 0.0
        return {"loss": torch.tensor(value, device=self.device, dtype=torch.float64, requires_grad=True)}

    def merge_gradients(self) -> None:
        """Add the gradients of the last `training_step` to the accumulated ones."""
        for parameter, fresh in zip(self._parameters, self._fresh, strict=True):
            if fresh is not None:
                parameter.grad = fresh if parameter.grad is None else parameter.grad + fresh
        self._fresh = []

    @property
    def in_flight(self) -> bool:
        """Whether batches were trained whose gradients no optimizer step has applied; never after a whole schedule."""
        return False

    def drain(self, step: Callable[[Callable[[], None]], None]) -> None:
        """Finish what is in flight; `step(gradients)` makes an optimizer step with what `gradients()` leaves."""

    # -- evaluation ------------------------------------------------------------------------------------------------
    def evaluation_step(self, method: str, batch: Any, *rest: Any, **kwargs: Any) -> list[Piece]:
        """Run a step method forward only; any batch size.

        Returns:
            On the ranks of the last stage output, logged entries and batch of each micro-batch; elsewhere nothing.
        """
        micros = split(batch, min(self.plan.batch.microbatches, batch_size(batch)))
        recorder_pieces: list[Piece] = []
        held: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        sent: list[Any] = []
        key = shape_key(batch)

        def run(index: int, call: Caller) -> Any:
            with self.recording() as entries:
                output = call(lambda: getattr(self.root, method)(micros[index], *rest, **kwargs))
            recorder_pieces.append((output, entries, micros[index]))
            return output

        self._learn(method, micros, *rest, **kwargs)
        for part in self.parts:
            stage = self._stage(part)
            stage.run = run
            for index in range(len(micros)):
                received = () if part.index == 0 else self._receive(part.index, index, held, key)
                result = stage(*received, micro=torch.tensor([index]))
                if part.index < part.stages - 1:
                    tensors = result if isinstance(result, tuple) else (result,)
                    self._send(part.index, index, tensors, held, sent, key)
            stage.run = Stage._not_running
        for work, _ in sent:
            work.wait()
        return recorder_pieces

    recording: Callable[[], Any]
    """Set by the strategy: records `self.log` of one micro-batch."""

    def places(self) -> dict[int, int]:
        """Return which rank of the pp group runs each stage; exchanged once."""
        if not self._places:
            mine = [part.index for part in self.parts]
            everyone: list[list[int]] = [[]] * self.mesh.size("pp")
            dist.all_gather_object(everyone, mine, group=self.mesh.group("pp"))
            self._places = {index: rank for rank, held in enumerate(everyone) for index in held}
        return self._places

    def _send(
        self, stage: int, micro: int, tensors: tuple[Tensor, ...], held: dict[Any, Any], sent: list[Any], key: Any
    ) -> None:
        group, to = self.mesh.group("pp"), self.places()[stage + 1]
        if to == dist.get_rank(group):
            held[stage + 1, micro] = tensors
            return
        if (stage, micro, key) not in self._metas:
            metas = [(tensor.shape, tensor.dtype) for tensor in tensors]
            dist.send_object_list([metas], group=group, group_dst=to, device=self.device)
            self._metas[stage, micro, key] = metas
        for tensor in tensors:
            piece = tensor.detach().contiguous()
            sent.append((dist.isend(piece, group=group, group_dst=to), piece))

    def _receive(self, stage: int, micro: int, held: dict[Any, Any], key: Any) -> tuple[Tensor, ...]:
        if (stage, micro) in held:
            arrived: tuple[Tensor, ...] = held.pop((stage, micro))
            return arrived
        group, source = self.mesh.group("pp"), self.places()[stage - 1]
        if (stage - 1, micro, key) not in self._metas:
            box: list[Any] = [None]
            dist.recv_object_list(box, group=group, group_src=source, device=self.device)
            self._metas[stage - 1, micro, key] = box[0]
        tensors = []
        for shape, dtype in self._metas[stage - 1, micro, key]:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            dist.recv(tensor, group=group, group_src=source)
            tensors.append(tensor)
        return tuple(tensors)
