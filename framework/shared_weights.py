"""Weights that several pipeline stages use (tied embeddings, a layer called twice): one weight, held several times.

Each stage that uses it holds a copy under the same name, equal from the start. Before an optimizer step the gradients
of the copies are added up, so that all make the same step; in the gradient's norm and in a checkpoint they count once.
The copies are laid out alike on every stage (data axes lie inside a stage), so pieces of one shape are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from framework.precision import local
from framework.state import parameter_names

if TYPE_CHECKING:
    from framework.mesh import Mesh
    from framework.parts import ModelPart


@dataclass(frozen=True)
class _Shared:
    parameter: nn.Parameter
    ranks: tuple[int, ...]
    """Of the pp group, ascending; this one among them."""


class SharedWeights:
    """The shared weights of this rank.

    Args:
        parts: this rank's stages, after all surgery.
        mesh: stages lie on axis `pp`.
        places: stage -> rank of the pp group.
    """

    def __init__(self, parts: Sequence[ModelPart], mesh: Mesh, places: Mapping[int, int]) -> None:
        self.group = mesh.group("pp")
        self.rank = mesh.rank("pp")
        held = {name: parameter for parameter, name in parameter_names(parts[0].root).items()}
        self._shared = []
        for name, stages in sorted({name: stages for part in parts for name, stages in part.shared.items()}.items()):
            ranks = tuple(sorted({places[stage] for stage in stages}))
            if name in held and len(ranks) > 1 and self.rank in ranks and held[name].requires_grad:
                self._shared.append(_Shared(held[name], ranks))

    @property
    def holders(self) -> dict[nn.Parameter, int]:
        """Parameter -> on how many stages' ranks it is; only those on several."""
        return {shared.parameter: len(shared.ranks) for shared in self._shared}

    @torch.no_grad()
    def add_up(self) -> None:
        """Add the gradients of all copies, in the order of the stages, so that all get the same bits; collective."""
        if not self._shared:
            return
        waiting: list[dist.P2POp] = []
        pieces: list[dict[int, Tensor]] = []
        for tag, shared in enumerate(self._shared):
            mine = _gradient(shared.parameter)
            arrived = {rank: mine if rank == self.rank else torch.empty_like(mine) for rank in shared.ranks}
            for rank in shared.ranks:
                if rank != self.rank:
                    waiting.append(dist.P2POp(dist.isend, mine, group=self.group, tag=tag, group_peer=rank))
                    waiting.append(dist.P2POp(dist.irecv, arrived[rank], group=self.group, tag=tag, group_peer=rank))
            pieces.append(arrived)
        for work in dist.batch_isend_irecv(waiting):
            work.wait()
        for shared, arrived in zip(self._shared, pieces, strict=True):
            total = torch.stack([arrived[rank] for rank in shared.ranks]).sum(0)
            assert shared.parameter.grad is not None
            local(shared.parameter.grad).copy_(total)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's piece of the gradient, laid out in order; zeros where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(gradient.device_mesh, parameter.placements)
    return local(parameter.grad).contiguous()
