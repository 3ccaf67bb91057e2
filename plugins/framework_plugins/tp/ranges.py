"""How a dimension is cut over the ranks of an axis: as DTensor cuts it, larger pieces first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def piece(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the range [start, end) of `size` positions that `rank` of `ranks` holds; may be empty."""
    longest = -(-size // ranks)
    return min(rank * longest, size), min((rank + 1) * longest, size)


def own_range(size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Return the range of this rank on the 1-D `mesh`."""
    return piece(size, mesh.size(), mesh.get_local_rank())


def every_rank_has_some(size: int, ranks: int) -> bool:
    """Tell whether no rank's piece is empty."""
    start, end = piece(size, ranks, ranks - 1)
    return end > start
