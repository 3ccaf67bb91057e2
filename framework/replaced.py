"""Methods of the user's module that are replaced on its instance for the length of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from framework.precision import Precision

REPLACED = ("lr_scheduler_step", "on_validation_model_eval")


def hold_schedule_on_skipped_steps(module: LightningModule, trainer: Trainer, precision: Precision) -> None:
    """A step that was skipped must not move a per-step learning-rate schedule (P33)."""
    original = module.lr_scheduler_step

    def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
        per_step = any(c.scheduler is scheduler and c.interval == "step" for c in trainer.lr_scheduler_configs)
        if not (per_step and precision.last_step_skipped):
            original(scheduler, metric)

    module.lr_scheduler_step = lr_scheduler_step  # type: ignore[method-assign]


def drain_before_validation(module: LightningModule, drain: Callable[[], None]) -> None:
    """Drain while modules still are in training mode: validation measures weights that learned from every batch."""
    original = module.on_validation_model_eval

    def on_validation_model_eval() -> None:
        drain()
        original()

    module.on_validation_model_eval = on_validation_model_eval  # type: ignore[method-assign]
