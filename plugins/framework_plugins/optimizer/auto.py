"""`optimizer=auto`: the module's own optimizer; AdamW where it has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from framework import Problem, RunPlan, hookimpl
from framework_plugins.optimizer.adamw import AdamW
from framework_plugins.optimizer.schedule import has_own

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


@dataclass(kw_only=True, eq=False)
class Auto(AdamW):
    """The module's `configure_optimizers` if its class has one, else AdamW with these fields."""

    @hookimpl
    def check_model(self, plan: RunPlan, model: Any) -> Sequence[Problem]:
        """A field that was set while the module's own optimizer is used would do nothing."""
        if not has_own(model):
            return []
        name, default = type(model).__name__, AdamW()
        return [
            Problem(
                f"optimizer.{field.name}={getattr(self, field.name)}",
                f"{name} has an optimizer of its own (configure_optimizers), which doesn't read this: set it there, or "
                f"remove configure_optimizers from {name}.",
            )
            for field in fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        ]

    @hookimpl
    def make_optimizer(self, module: LightningModule, plan: RunPlan) -> dict[str, Any] | None:
        """Return AdamW; None = the module has its own."""
        return None if has_own(module) else self.make(module, plan)
