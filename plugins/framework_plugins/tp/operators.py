"""The communication operators of tensor parallelism, each written out with its conjugate.

What Shoeybi et al. (2019) call f and g, and what Korthikanti et al. (2022) put in their place for sequence parallelism:

| operator | forward | backward |
|---|---|---|
| `copy_to_region` (f) | nothing | all-reduce |
| `reduce_from_region` (g) | all-reduce | nothing |
| `gather_from_region` | all-gather, last dimension | own piece |
| `scatter_to_region` | own piece, last dimension | all-gather |
| `gather_sequence` | all-gather, sequence | reduce-scatter |
| `reduce_scatter_sequence` | reduce-scatter, sequence | all-gather |

Backward of an operator is its conjugate operator, so gradients of gradients are right too. The sequence is the last
dimension but one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from framework.adapters.torch_private import all_gather, all_reduce, reduce_scatter
from framework_plugins.tp.ranges import own_range, piece
from framework_plugins.tp.styles import Axis

SEQUENCE = -2


class OperatorAxis(Axis):
    """An axis whose activations move by the operators of this module, not by DTensor placements."""

    def added_up(self, tensor: Tensor) -> Tensor:
        """Identity whose gradient is added up over the axis."""
        return copy_to_region(tensor, self.mesh)

    def enter(self, x: Tensor) -> Tensor:
        """Bring the residual stream into a column-split layer: whole on every rank."""
        return gather_sequence(x, self.mesh) if self.sequence_parallel else copy_to_region(x, self.mesh)

    def leave(self, y: Tensor) -> Tensor:
        """Bring partial sums back into the residual stream: added up, and with sequence parallelism cut."""
        if not self.sequence_parallel:
            return reduce_from_region(y, self.mesh)
        self.check_length(y)
        return reduce_scatter_sequence(y, self.mesh)

    def joined(self, y: Tensor, size: int) -> Tensor:
        """Return [..., size] of this rank's columns."""
        return gather_from_region(y, size, self.mesh)


def copy_to_region(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return `x`, whole on every rank, for split computation; gradients of the ranks are added up."""
    return _Copy.apply(x, mesh)  # type: ignore[no-untyped-call, no-any-return]


def reduce_from_region(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of the ranks' `x`; each rank gets the gradient as it is."""
    return _Reduce.apply(x, mesh)  # type: ignore[no-untyped-call, no-any-return]


def gather_from_region(x: Tensor, size: int, mesh: DeviceMesh) -> Tensor:
    """Return [..., size] of pieces [..., columns of this rank]; pieces may differ in length, as DTensor cuts them."""
    return _Gather.apply(x, size, mesh)  # type: ignore[no-untyped-call, no-any-return]


def scatter_to_region(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's columns of `x`, which is whole and equal on all ranks."""
    return _Scatter.apply(x, mesh)  # type: ignore[no-untyped-call, no-any-return]


def gather_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return [..., s, width] of pieces [..., s/tp, width] for split computation; gradients are added up and cut."""
    return _GatherSequence.apply(x, mesh)  # type: ignore[no-untyped-call, no-any-return]


def reduce_scatter_sequence(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's piece [..., s/tp, width] of the sum of the ranks' `x` [..., s, width]; tp divides s."""
    return _ReduceScatterSequence.apply(x, mesh)  # type: ignore[no-untyped-call, no-any-return]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_from_region(gradient, ctx.mesh), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return all_reduce(x, mesh.get_group())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return copy_to_region(gradient, ctx.mesh), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        ranks = mesh.size()
        longest = piece(size, ranks, 0)[1]
        padded = F.pad(x, (0, longest - x.shape[-1]))  # a collective needs equal pieces
        # what was padded lies behind the last column: shorter pieces come after the full ones
        return all_gather(padded, -1, mesh.get_group())[..., :size].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return scatter_to_region(gradient, ctx.mesh), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh, ctx.size = mesh, x.shape[-1]
        start, end = own_range(ctx.size, mesh)
        return x[..., start:end].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gather_from_region(gradient, ctx.size, ctx.mesh), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return all_gather(x, SEQUENCE, mesh.get_group())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_sequence(gradient, ctx.mesh), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return reduce_scatter(x, SEQUENCE, mesh.get_group())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gather_sequence(gradient, ctx.mesh), None
