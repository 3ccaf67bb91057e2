"""`activation=full`: blocks keep their inputs only; everything inside is computed again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from framework import Problem, RunPlan, hookimpl

if TYPE_CHECKING:
    from framework.parts import ModelPart


@dataclass(kw_only=True, eq=False)
class Full:
    """Full activation checkpointing of the model's repeated blocks (Chen et al., 2016).

    Attributes:
        every: of the blocks, counted over the whole model from 0, those that are recomputed: 1 = all, 2 = every second.
        preserve_rng_state: draw the same random numbers again; false saves time if nothing in a block is random.
    """

    option: ClassVar[str] = "full"

    every: int = 1
    preserve_rng_state: bool = True

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"activation.every={self.every} must be at least 1.")

    @hookimpl
    def check_model(self, plan: RunPlan, model: object) -> Sequence[Problem]:
        """A model without repeated blocks has nothing to recompute."""
        return missing_blocks(model, f"activation={self.option}")

    @hookimpl
    def apply_activation_checkpointing(self, part: ModelPart) -> None:
        """Wrap the `forward` of the part's blocks."""
        self.wrap(part)

    def wrap(self, part: ModelPart) -> None:
        """Let the chosen blocks be recomputed."""
        from framework_plugins.activation.recompute import every_nth, recompute_

        for block in every_nth(part.blocks, self.every):
            recompute_(block, masks=part.masks, preserve_rng_state=self.preserve_rng_state, **self.extra())

    def extra(self) -> dict[str, Any]:
        """More arguments for `recompute_`; nothing is kept here."""
        return {}


def missing_blocks(model: object, setting: str) -> list[Problem]:
    """Return a complaint if `model` has no repeated blocks."""
    from torch import nn

    from framework.parts import find_blocks

    if isinstance(model, nn.Module) and not find_blocks(model):
        reason = (
            f"{type(model).__name__} has no list of two or more blocks of one class, so there is nothing to recompute."
        )
        return [Problem(setting, reason, "activation=none, or keep the model's layers in a ModuleList")]
    return []
