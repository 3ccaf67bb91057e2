"""One row of the parity table: the default GPT, shrunk, trained by `framework.Trainer` and by the reference."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from fitting import fit
from mixes import GLOBAL_BATCH, SEQUENCE, STEPS, Mix
from torch import Tensor
from torch.nn.functional import cross_entropy
from user_modules import Rows

from framework.plan import RunPlan
from framework.testing import WorkerPool, plan
from framework.verify.rank import LocalSGD
from framework.verify.reference import Result, disagreements, global_norm, train
from framework_plugins.model.gpt import GPT

VOCABULARY = 16
SHAPE = {"vocab_size": VOCABULARY, "layers": 4, "width": 16, "heads": 4, "hidden": 32, "context": SEQUENCE}
LR, MOMENTUM = 0.04, 0.9
DTYPES = {"fp64": torch.float64, "bf16-true": torch.bfloat16}
AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


class SmallGpt(GPT):
    """The default GPT with SGD, so that a wrong scale of the gradient shows, and weights that let every part learn."""

    def init_weights(self) -> None:
        for parameter in self.parameters():
            if parameter.ndim == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                torch.nn.init.normal_(parameter, std=0.12)

    def configure_optimizers(self) -> Any:
        return LocalSGD(self.parameters(), lr=LR, momentum=MOMENTUM)


def on_meta() -> SmallGpt:
    """Build the model as the framework does: without weights, which each rank then draws for its own pieces."""
    with torch.device("meta"):
        return SmallGpt(**SHAPE)


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
    seen = fit(plan, on_meta, samples())
    updates = {name: seen.final[name].double() - start.double() for name, start in seen.initial.items()}
    order = torch.inf if plan.trainer.get("gradient_clip_algorithm") == "inf_norm" else 2
    norms = [global_norm(step.values(), order) for step in seen.gradients]
    return Outcome(Result(seen.losses, norms, seen.gradients[0], updates), seen.initial, seen.grad_norm)


def plan_of(mix: Mix) -> RunPlan:
    """The plan of a row, composed from its words; nothing is written during it."""
    common = {
        "sampler.shuffle": "false",
        "trainer.max_steps": STEPS,
        "trainer.enable_progress_bar": "false",
        "threads": 1,
        "run_dir": tempfile.mkdtemp(prefix="parity-"),
        **{f"model.{name}": value for name, value in SHAPE.items()},
        **dict.fromkeys(("checkpoint", "logs", "recovery", "logger"), "none"),
    }
    return plan(*mix.overrides, *(f"{key}={value}" for key, value in common.items()))


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


def global_batches(pieces: int = 1) -> list[list[dict[str, Tensor]]]:
    """The batches of the optimizer steps, each cut into `pieces`."""
    rows = samples()
    result = []
    for at in range(0, len(rows), GLOBAL_BATCH):
        cut = [column[at : at + GLOBAL_BATCH].chunk(pieces) for column in rows.columns.values()]
        result.append([dict(zip(rows.columns, piece, strict=True)) for piece in zip(*cut, strict=True)])
    return result


@functools.cache
def _reference(pool: WorkerPool, precision: str, clip: float | None, algorithm: str) -> Result:
    initial = initial_of(pool, precision)
    model = SmallGpt(**SHAPE).to(DTYPES.get(precision, torch.float32))
    model.load_state_dict(initial)
    return train(
        model,
        global_batches(),
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
    logits = model(batch["inputs"], batch.get("positions"), batch.get("documents"))
    targets = batch["targets"]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=-100)
    return loss, int((targets != -100).sum())


def equal_to_reference(pool: WorkerPool, mix: Mix) -> tuple[Result, list[Outcome]]:
    """Fail unless each rank of a row gives the numbers of the reference, from one process's weights; return both."""
    want = reference_of(pool, mix)
    assert len(want.losses) == STEPS
    outcomes = outcomes_of(pool, mix)
    for rank, outcome in enumerate(outcomes):
        assert disagreements(outcome.result, want, mix.bounds) == [], f"rank {rank}"
    start = initial_of(pool, mix.settings["precision"])
    assert {name for name, tensor in outcomes[0].initial.items() if not torch.equal(tensor, start[name])} == set()
    assert set(outcomes[0].initial) == set(start)
    return want, outcomes
