"""`optimizer=adamw_bf16`: AdamW whose averages are kept in bf16, two bytes an element instead of four."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from framework import Problem, RunPlan, hookimpl
from framework_plugins.optimizer.fewer_bits import FewerBits

FINEST = 2.0**-8
"""The smallest change of a number, relative to it, that bf16 never rounds away."""


@dataclass(kw_only=True, eq=False)
class AdamWBf16(FewerBits):
    """AdamW by torchao, over the parameters of this rank, with averages in bf16.

    The step computes in fp32 and rounds each average once, to the nearest. Elements don't meet, so a run goes on under
    any other mix with every average as it was.
    """

    word: ClassVar[str] = "adamw_bf16"
    not_flat: ClassVar[str] = "with which this state wasn't measured"

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """Averages must be able to move."""
        problems = list(super().check_plan(plan))
        if any(1 - beta < FINEST for beta in self.betas):
            asked = ",".join(str(beta) for beta in self.betas)
            reason = "an average that keeps more than 255/256 of itself a step doesn't fall in bf16: it is rounded back"
            problems.append(Problem(f"optimizer.betas=[{asked}]", reason, "optimizer.betas=[0.9,0.99]"))
        return problems

    def kind(self) -> Any:
        """Return the optimizer's class."""
        from framework_plugins.optimizer.sixteen_bits import AdamWBf16 as Made

        return Made
