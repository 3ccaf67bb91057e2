"""What the optimizers share: learning-rate schedule, parameter groups, the checks that need plan and model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework import Problem, RunPlan

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

SCHEDULES = ("constant", "cosine", "linear")


class Factor:
    """Learning rate in optimizer step t (from 0) over its full value; an object, so that a scheduler's state holds it.

    Rises linearly over `warmup` steps, then stays, or falls along half a cosine (Loshchilov and Hutter, 2017) or a line
    to `floor` at step `end`.
    """

    def __init__(self, schedule: str, warmup: int, end: int, floor: float) -> None:
        self.schedule, self.warmup, self.end, self.floor = schedule, warmup, end, floor

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup) / max(1, self.end - self.warmup))
        fall = 0.5 * (1.0 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1.0 - done
        return self.floor + (1.0 - self.floor) * fall


@dataclass(kw_only=True, eq=False)
class Scheduled:
    """Fields of every optimizer that set its learning rate.

    Attributes:
        lr: full learning rate.
        schedule: `constant`, `cosine` or `linear`, after the warm-up.
        warmup_steps: optimizer steps over which the rate rises linearly.
        decay_steps: step at which `cosine` and `linear` reach their end; None = trainer.max_steps.
        min_lr_ratio: rate at the end over `lr`.
    """

    lr: float = 1e-3
    schedule: str = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    min_lr_ratio: float = 0.1

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"optimizer.schedule={self.schedule} is unknown; choose one of {', '.join(SCHEDULES)}.")
        for name in ("lr", "warmup_steps", "min_lr_ratio"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must not be negative.")

    def end(self, plan: RunPlan) -> int:
        """Return the step at which the schedule ends; -1 = nobody says."""
        return self.decay_steps or int(plan.trainer.get("max_steps") or -1)

    def schedule_problems(self, plan: RunPlan) -> list[Problem]:
        """A falling schedule needs an end, after the warm-up."""
        if self.schedule == "constant":
            return []
        end = self.end(plan)
        if end < 0:
            reason = (
                "it falls towards an end, and neither trainer.max_steps nor optimizer.decay_steps says where that is"
            )
            return [Problem(f"optimizer.schedule={self.schedule}", reason, "trainer.max_steps=<steps>")]
        if self.warmup_steps >= end:
            reason = f"the rate would still rise when the schedule ends at step {end}"
            return [
                Problem(f"optimizer.warmup_steps={self.warmup_steps}", reason, f"optimizer.warmup_steps={end // 10}")
            ]
        return []

    def scheduled(self, optimizer: Optimizer, plan: RunPlan) -> dict[str, Any]:
        """Return what `configure_optimizers` may return: the optimizer, with its schedule if there is one."""
        if self.schedule == "constant" and self.warmup_steps == 0:
            return {"optimizer": optimizer}
        from torch.optim.lr_scheduler import LambdaLR

        factor = Factor(self.schedule, self.warmup_steps, self.end(plan), self.min_lr_ratio)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}


def has_own(module: Any) -> bool:
    """Return whether the module's class says how it is optimised."""
    from lightning.pytorch import LightningModule

    return type(module).configure_optimizers is not LightningModule.configure_optimizers


def both_at_once(option: str, module: Any) -> list[Problem]:
    """An optimizer that was asked for by name while the module has one of its own."""
    if not has_own(module):
        return []
    name = type(module).__name__
    reason = f"{name} has an optimizer of its own (configure_optimizers): one of the two would do nothing."
    return [Problem(f"optimizer={option}", reason, "optimizer=auto")]


def groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups, in the order of names: matrices with weight decay, vectors and scalars without.

    Both exist on every pipeline stage, also empty, so that a checkpoint's groups mean the same under any mix.
    """
    trained = [parameter for _, parameter in sorted(module.named_parameters()) if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


def alike(parameter_groups: Sequence[dict[str, Any]]) -> bool:
    """Return whether one kernel can step all parameters: all are plain, or DTensors of one mesh, on CPU or CUDA.

    Neither the fused kernels nor the foreach ones take a mix of those, as FSDP or pipelines over TP leave it.
    """
    from torch.distributed.tensor import DTensor

    parameters = [parameter for group in parameter_groups for parameter in group["params"]]
    kinds = {
        (parameter.device_mesh if isinstance(parameter, DTensor) else None, parameter.device.type)
        for parameter in parameters
    }
    return len(kinds) == 1 and next(iter(kinds))[1] in ("cpu", "cuda")
