"""`cp=allgather`: each rank gathers all keys and values, and attends with its own queries (as Llama 3, 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from framework_plugins.cp.option import BalancedContextParallel

if TYPE_CHECKING:
    from framework.mesh import Mesh
    from framework_plugins.cp.attention import Attend
    from framework_plugins.cp.sequences import Pieces


@dataclass(kw_only=True, eq=False)
class AllGather(BalancedContextParallel):
    """One gather a layer of keys and values, which are small where queries are grouped.

    Attributes:
        size: ranks that share each sequence; null = 2, or what `devices` leaves.
        balance: which pieces a rank has, see `BalancedContextParallel`.
        seq_dims: batch entry -> dim of its sequence; null = the model's `cp_plan`.
    """

    option: ClassVar[str] = "allgather"

    def attend(self, pieces: Pieces, mesh: Mesh) -> Attend:
        """Gather over axis cp."""
        from framework_plugins.cp.exchange import GatheredAttention

        return GatheredAttention(pieces, mesh.group("cp"))
