"""`optimizer=adamw8bit`: AdamW whose averages take a byte an element instead of four (Dettmers et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from framework_plugins.optimizer.fewer_bits import FewerBits


@dataclass(kw_only=True, eq=False)
class AdamW8bit(FewerBits):
    """AdamW by torchao, over the parameters of this rank, with averages in blocks of 256 numbers of 8 bits and a scale.

    Pieces of fewer than 4,096 elements, or of a number that 256 doesn't divide, keep theirs whole. The step computes in
    fp32. Blocks are cut within a rank's piece, so another mix rounds otherwise: weights are near, not equal.
    """

    word: ClassVar[str] = "adamw8bit"
    not_flat: ClassVar[str] = "and couldn't save this state by parameter"

    def kind(self) -> Any:
        """Return the optimizer's class."""
        from framework_plugins.optimizer.eight_bits import AdamW8bit as Made

        return Made
