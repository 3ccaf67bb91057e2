"""`optimizer=adamw`: Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from framework import Problem, RunPlan, hookimpl
from framework_plugins.optimizer.schedule import Scheduled, alike, both_at_once, groups

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


@dataclass(kw_only=True, eq=False)
class AdamW(Scheduled):
    """AdamW over the parameters of this rank.

    Attributes:
        betas: decay of the averages of gradient and squared gradient.
        eps: added to the root of the latter.
        weight_decay: of matrices; vectors and scalars (norms, biases) have none.
    """

    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas={list(self.betas)} must be two numbers from 0 to below 1.")

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """The schedule needs an end."""
        return self.schedule_problems(plan)

    @hookimpl
    def check_model(self, plan: RunPlan, model: Any) -> Sequence[Problem]:
        """The module must have no optimizer of its own."""
        return both_at_once("adamw", model)

    @hookimpl
    def make_optimizer(self, module: LightningModule, plan: RunPlan) -> dict[str, Any] | None:
        """Return optimizer and schedule."""
        return self.make(module, plan)

    def make(self, module: LightningModule, plan: RunPlan) -> dict[str, Any]:
        """Return optimizer and schedule."""
        import torch

        chosen = groups(module, self.weight_decay)
        one_kernel = alike(chosen)
        optimizer = torch.optim.AdamW(
            chosen,
            lr=self.lr,
            betas=(self.betas[0], self.betas[1]),
            eps=self.eps,
            fused=one_kernel,
            foreach=None if one_kernel else False,
        )
        return self.scheduled(optimizer, plan)
