"""`tp=megatron`: layers split over ranks; activations move by explicit operators, each written with its conjugate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from framework_plugins.tp.layers import LayerParallel

if TYPE_CHECKING:
    from framework_plugins.tp.styles import Axis


@dataclass(kw_only=True, eq=False)
class MegatronParallel(LayerParallel):
    """Layers split over ranks, communication as in Megatron-LM (Shoeybi et al., 2019; Korthikanti et al., 2022).

    Parameters are DTensors as under `tp=dtensor`, so that clipping, checkpoints, initial weights and data-parallel
    wraps know what is where; only what happens to activations differs.
    """

    option: ClassVar[str] = "megatron"

    def axis(self) -> type[Axis]:
        """Return the axis that calls the operators."""
        from framework_plugins.tp.operators import OperatorAxis

        return OperatorAxis
