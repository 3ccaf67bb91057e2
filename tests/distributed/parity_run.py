"""One row of the parity table, in a rank: the default GPT, shrunk, trained by `framework.Trainer`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from fitting import fit
from framework_plugins.model.gpt import GPT
from mixes import GLOBAL_BATCH, SEQUENCE, STEPS, Mix
from reference import Result, global_norm, train
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from user_modules import Rows

from framework.plan import RunPlan

VOCABULARY = 16
SHAPE = {"vocab_size": VOCABULARY, "layers": 4, "width": 16, "heads": 4, "sequence_length": SEQUENCE}
LR, MOMENTUM = 0.1, 0.9


class SmallGpt(GPT):
    """The default GPT with SGD, so that a wrong scale of the gradient shows."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)


def samples() -> Rows:
    """`STEPS` global batches; sample i has between 1 and `SEQUENCE` valid targets, so that a wrong weighting shows."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCABULARY, (STEPS * GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
    targets = ids[:, 1:].clone()
    for row, keep in enumerate(torch.randint(1, SEQUENCE + 1, (len(ids),), generator=generator)):
        targets[row, keep:] = -100
    return Rows(ids=ids[:, :-1], targets=targets)


@dataclass
class Outcome:
    """What rank 0 saw, and the losses of every rank."""

    result: Result
    initial: dict[str, Tensor]
    rank_losses: list[list[float]] = field(default_factory=list)
    grad_norm: float | None = None


def run(plan: RunPlan) -> Outcome:
    """Called on every rank."""
    probe = fit(plan, functools.partial(SmallGpt, **SHAPE), samples())
    updates = {name: probe.final[name] - start for name, start in probe.initial.items()}
    result = Result(
        losses=probe.losses,
        grad_norms=[],
        first_gradients=probe.gradients[0],
        updates=updates,
    )
    result.grad_norms = [global_norm(step.values()) for step in probe.gradients]
    return Outcome(result, probe.initial, grad_norm=probe.grad_norm)


def truth(mix: Mix, initial: dict[str, Tensor]) -> Result:
    """The reference of a row: one process, no framework, from the same initial weights."""
    raise NotImplementedError


_ = (cross_entropy, nn, train)
