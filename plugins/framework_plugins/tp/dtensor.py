"""`tp=dtensor`: layers split over ranks; activations move by DTensor placements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from framework_plugins.tp.layers import LayerParallel

if TYPE_CHECKING:
    from framework_plugins.tp.styles import Axis


@dataclass(kw_only=True, eq=False)
class DTensorParallel(LayerParallel):
    """Layers split over ranks, communication by DTensor."""

    option: ClassVar[str] = "dtensor"

    def axis(self) -> type[Axis]:
        """Return the axis that redistributes DTensors."""
        from framework_plugins.tp.styles import Axis

        return Axis
