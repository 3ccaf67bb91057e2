"""What the options share whose AdamW is torchao's, with averages in fewer bits than the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from framework import Problem, Requirements, RunPlan, hookimpl
from framework_plugins.optimizer.adamw import AdamW
from framework_plugins.optimizer.schedule import both_at_once, groups

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


@dataclass(kw_only=True, eq=False)
class FewerBits(AdamW):
    """AdamW by torchao over the parameters of this rank; subclasses say which."""

    word: ClassVar[str] = ""
    """Name of the option."""
    not_flat: ClassVar[str] = ""
    """Why its state can't be that of flat buffers of many parameters, which DeepSpeed hands an optimizer."""

    def kind(self) -> Any:
        """Return the optimizer's class; imports torchao."""
        raise NotImplementedError

    @hookimpl
    def requirements(self) -> Requirements:
        """Not under DeepSpeed."""
        why = f"DeepSpeed steps flat buffers, {self.not_flat}; type optimizer=adamw"
        return Requirements(excludes=frozenset({"strategy=deepspeed"}), why={"strategy=deepspeed": why})

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """The library must be there, and fp32 enough."""
        problems = self.schedule_problems(plan)
        if find_spec("torchao") is None:
            fix = 'pip install "lightning-framework[lowbit]"'
            problems.append(Problem(f"optimizer={self.word}", "the package torchao isn't installed", fix))
        if plan.chosen("precision") == "fp64":
            reason = "torchao computes the step in fp32, so the weights would be no better than that"
            problems.append(Problem(f"optimizer={self.word}", f"with precision=fp64 {reason}", "optimizer=adamw"))
        return problems

    @hookimpl
    def check_model(self, plan: RunPlan, model: Any) -> Sequence[Problem]:
        """The module must have no optimizer of its own."""
        return both_at_once(self.word, model)

    def make(self, module: LightningModule, plan: RunPlan) -> dict[str, Any]:
        """Return optimizer and schedule."""
        optimizer = self.kind()(
            groups(module, self.weight_decay), lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps
        )
        return self.scheduled(optimizer, plan)
