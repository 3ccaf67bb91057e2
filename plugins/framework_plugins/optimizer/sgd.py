"""`optimizer=sgd`: stochastic gradient descent, with momentum (Sutskever et al., 2013)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework import Problem, RunPlan, hookimpl
from framework_plugins.optimizer.schedule import Scheduled, alike, both_at_once, groups

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


@dataclass(kw_only=True, eq=False)
class SGD(Scheduled):
    """SGD over the parameters of this rank.

    Attributes:
        lr: full learning rate.
        momentum: decay of the running sum of gradients; 0 = none.
        nesterov: look ahead by one step.
        weight_decay: of matrices, added to the gradient; vectors and scalars (norms, biases) have none.
    """

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """The schedule needs an end."""
        return self.schedule_problems(plan)

    @hookimpl
    def check_model(self, plan: RunPlan, model: Any) -> Sequence[Problem]:
        """The module must have no optimizer of its own."""
        return both_at_once("sgd", model)

    @hookimpl
    def make_optimizer(self, module: LightningModule, plan: RunPlan) -> dict[str, Any] | None:
        """Return optimizer and schedule."""
        import torch

        chosen = groups(module, self.weight_decay)
        optimizer = torch.optim.SGD(
            chosen,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            foreach=alike(chosen),  # not fused: DTensor has no rule for that kernel
        )
        return self.scheduled(optimizer, plan)
