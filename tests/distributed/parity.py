"""One row of the parity table: the default GPT, shrunk, trained by `framework.Trainer` and by the reference."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from fitting import fit
from framework_plugins.model.gpt import GPT
from mixes import GLOBAL_BATCH, SEQUENCE, STEPS, Mix
from reference import Result, global_norm, train
from torch import Tensor
from torch.nn.functional import cross_entropy
from user_modules import Rows

from framework.plan import RunPlan
from framework.testing import WorkerPool, plan

VOCABULARY = 16
SHAPE = {"vocab_size": VOCABULARY, "layers": 4, "width": 16, "heads": 4, "sequence_length": SEQUENCE}
LR, MOMENTUM = 0.1, 0.9
DTYPES = {"fp64": torch.float64, "bf16-true": torch.bfloat16}
AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


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
    return Rows(inputs=ids[:, :-1].contiguous(), targets=targets)


@dataclass
class Outcome:
    """What one rank saw."""

    result: Result
    initial: dict[str, Tensor]
    grad_norm: float | None


def run(plan: RunPlan) -> Outcome:
    """Train; called on every rank."""
    probe = fit(plan, functools.partial(SmallGpt, **SHAPE), samples())
    updates = {name: probe.final[name].double() - start.double() for name, start in probe.initial.items()}
    order = torch.inf if plan.trainer.get("gradient_clip_algorithm") == "inf_norm" else 2
    norms = [global_norm(step.values(), order) for step in probe.gradients]
    return Outcome(Result(probe.losses, norms, probe.gradients[0], updates), probe.initial, probe.grad_norm)


def plan_of(mix: Mix) -> RunPlan:
    """The plan of a row, composed from its words."""
    words = [*mix.overrides, "sampler.shuffle=false", f"trainer.max_steps={STEPS}", "trainer.enable_progress_bar=false"]
    return plan(*words, run_dir=tempfile.mkdtemp(prefix="parity-"))


def outcomes_of(pool: WorkerPool, mix: Mix) -> list[Outcome]:
    """Run a row; what each rank saw."""
    return pool.run(run, mix.ranks, plan_of(mix), process_group=False, timeout=90)


def outcome_of(pool: WorkerPool, mix: Mix) -> Outcome:
    """Run a row; what rank 0 saw."""
    return outcomes_of(pool, mix)[0]


@functools.cache
def initial_of(pool: WorkerPool, precision: str) -> dict[str, Tensor]:
    """Initial weights as one process with no parallelism makes them: all mixes must make the same."""
    return outcome_of(pool, Mix("", 1, f"precision={precision}")).initial


@functools.cache
def _reference(pool: WorkerPool, precision: str, clip: float | None, algorithm: str) -> Result:
    initial = initial_of(pool, precision)
    model = SmallGpt(**SHAPE).to(DTYPES.get(precision, torch.float32))
    model.load_state_dict(initial)
    rows = samples()
    steps = [
        [{name: column[at : at + GLOBAL_BATCH] for name, column in rows.columns.items()}]
        for at in range(0, len(rows), GLOBAL_BATCH)
    ]
    return train(
        model,
        steps,
        mean_loss,
        lr=LR,
        momentum=MOMENTUM,
        clip=clip,
        clip_algorithm=algorithm,
        autocast=AUTOCAST.get(precision),
    )


def reference_of(pool: WorkerPool, mix: Mix) -> Result:
    """The truth of a row: one process, no framework, from the same initial weights."""
    return _reference(pool, mix.settings["precision"], *mix.clip)


def mean_loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    """Mean cross entropy over the valid tokens of a batch, and their number."""
    logits = model(batch["inputs"])
    targets = batch["targets"]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=-100)
    return loss, int((targets != -100).sum())
