"""`optimizer=adamw8bit`: AdamW whose averages take a byte an element instead of four (Dettmers et al., 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from framework import Problem, Requirements, RunPlan, hookimpl
from framework_plugins.optimizer.adamw import AdamW
from framework_plugins.optimizer.schedule import both_at_once, groups

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


@dataclass(kw_only=True, eq=False)
class AdamW8bit(AdamW):
    """AdamW by torchao, over the parameters of this rank, with averages in blocks of 256 numbers of 8 bits and a scale.

    Pieces of fewer than 4,096 elements, or of a number that 256 doesn't divide, keep theirs whole. The step computes in
    fp32. Blocks are cut within a rank's piece, so another mix rounds otherwise: weights are near, not equal.
    """

    @hookimpl
    def requirements(self) -> Requirements:
        """DeepSpeed hands an optimizer flat buffers of many parameters, and knows its state by its own rules."""
        why = "DeepSpeed steps flat buffers, and couldn't save this state by parameter"
        return Requirements(
            excludes=frozenset({"strategy=deepspeed"}), why={"strategy=deepspeed": f"{why}; type optimizer=adamw"}
        )

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """The library must be there, and fp32 enough."""
        problems = self.schedule_problems(plan)
        if find_spec("torchao") is None:
            fix = 'pip install "lightning-framework[lowbit]"'
            problems.append(Problem("optimizer=adamw8bit", "the package torchao isn't installed", fix))
        if plan.chosen("precision") == "fp64":
            reason = "torchao computes the step in fp32, so the weights would be no better than that"
            problems.append(Problem("optimizer=adamw8bit", f"with precision=fp64 {reason}", "optimizer=adamw"))
        return problems

    @hookimpl
    def check_model(self, plan: RunPlan, model: Any) -> Sequence[Problem]:
        """The module must have no optimizer of its own."""
        return both_at_once("adamw8bit", model)

    def make(self, module: LightningModule, plan: RunPlan) -> dict[str, Any]:
        """Return optimizer and schedule."""
        from framework_plugins.optimizer import eight_bits

        optimizer = eight_bits.AdamW8bit(
            groups(module, self.weight_decay), lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps
        )
        return self.scheduled(optimizer, plan)
