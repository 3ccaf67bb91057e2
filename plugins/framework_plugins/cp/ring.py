"""`cp=ring`: keys and values travel round the ranks, and each rank merges what it sees (Liu et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from framework_plugins.cp.option import BalancedContextParallel

if TYPE_CHECKING:
    from framework.mesh import Mesh
    from framework_plugins.cp.attention import Attend
    from framework_plugins.cp.sequences import Pieces


@dataclass(kw_only=True, eq=False)
class Ring(BalancedContextParallel):
    """Ring attention: memory for keys and values of two pieces, whatever the number of ranks.

    Attributes:
        size: ranks that share each sequence; null = 2, or what `devices` leaves.
        balance: which pieces a rank has, see `BalancedContextParallel`.
        seq_dims: batch entry -> dim of its sequence; null = the model's `cp_plan`.
    """

    option: ClassVar[str] = "ring"

    def attend(self, pieces: Pieces, mesh: Mesh) -> Attend:
        """Pass keys and values on to the next rank of axis cp."""
        from framework_plugins.cp.ring_attention import RingAttention

        return RingAttention(pieces, mesh.group("cp"))
