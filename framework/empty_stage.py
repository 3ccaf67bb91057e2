"""A pipeline stage without anything to train (frozen, or no parameters at all) still builds the user's optimizer.

All ranks count optimizer steps, schedules and checkpoints alike, so each needs one; but torch refuses an optimizer
over an empty list, which is what `Adam(p for p in self.parameters() if p.requires_grad)` gives on such a stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer

NAME = "nothing_to_train"


@contextmanager
def placeholder(module: LightningModule) -> Iterator[nn.Parameter | None]:
    """Inside, a module without trainable parameters has one of size 1; yields it, or None if it wasn't needed."""
    if any(parameter.requires_grad for parameter in module.parameters()):
        yield None
        return
    parameter = nn.Parameter(torch.zeros(1))
    module.register_parameter(NAME, parameter)
    try:
        yield parameter
    finally:
        del module._parameters[NAME]


def forget(parameter: nn.Parameter | None, optimizers: Sequence[Optimizer]) -> None:
    """Take the placeholder out of the groups that were built; they stay, with their settings, so schedules work."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [other for other in group["params"] if other is not parameter]
