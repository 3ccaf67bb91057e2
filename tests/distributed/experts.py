"""Mixtures of experts under many mixes: a small model whose routing is as uneven as can be, its data, one run of it."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from fitting import fit
from mixes import GLOBAL_BATCH, SEQUENCE, Mix
from parity import VOCABULARY, Outcome
from torch import Tensor
from user_modules import Rows

from framework.plan import RunPlan
from framework.testing import WorkerPool, plan
from framework.verify.rank import LocalSGD
from framework.verify.reference import Result, global_norm, train
from framework_plugins.model.moe import MoE

STEPS = 4
SHAPE = {
    "vocab_size": VOCABULARY, "layers": 4, "width": 8, "heads": 2, "hidden": 8, "experts": 4, "context": SEQUENCE,
}  # fmt: skip
LR, MOMENTUM = 0.1, 0.9
BALANCE_WEIGHT = 0.1
SILENT = range(GLOBAL_BATCH + 4, GLOBAL_BATCH + 8)
"""Samples of step 1 in which no target counts: of 2 data ranks and 2 micro-steps, one micro-batch of one rank."""


class SmallMoE(MoE):
    """SGD, weights that let every part learn, and a router that sends nearly all tokens to few experts."""

    def init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                torch.nn.init.normal_(parameter, std=2.0 if "router" in name else 0.3)

    def configure_optimizers(self) -> Any:
        return LocalSGD(self.parameters(), lr=LR, momentum=MOMENTUM)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        result = super().training_step(batch, batch_idx)
        self.log("objective", result["loss"])
        return result


def on_meta(**shape: Any) -> SmallMoE:
    """Build the model as the framework does."""
    with torch.device("meta"):
        return SmallMoE(**{**SHAPE, "balance_weight": BALANCE_WEIGHT, **shape})


def samples() -> Rows:
    """`STEPS` global batches; sample i has between 1 and `SEQUENCE` valid targets, those of `SILENT` none."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCABULARY, (STEPS * GLOBAL_BATCH, SEQUENCE + 1), generator=generator)
    targets = ids[:, 1:].clone()
    for row, keep in enumerate(torch.randint(1, SEQUENCE + 1, (len(ids),), generator=generator)):
        targets[row, 0 if row in SILENT else int(keep) :] = -100
    return Rows(inputs=ids[:, :-1].contiguous(), targets=targets)


def plan_of(mix: Mix, shape: dict[str, Any], folder: Path | None = None, steps: int = STEPS) -> RunPlan:
    """The plan of a row, composed from its words; without a `folder` nothing is kept."""
    words = {
        "model": "moe",
        "sampler.shuffle": "false",
        "trainer.max_steps": steps,
        "trainer.enable_progress_bar": "false",
        "threads": 1,
        "run_dir": folder or tempfile.mkdtemp(prefix="experts-"),
        **{f"model.{name}": value for name, value in {**SHAPE, **shape}.items()},
        **dict.fromkeys(("checkpoint", "logs", "recovery", "logger"), "none"),
    }
    if folder is not None:
        words = {**words, "checkpoint": "dcp", "checkpoint.save_top_k": 0}
    return plan(*mix.overrides, *(f"{key}={value}" for key, value in words.items()))


def run(
    plan: RunPlan, shape: dict[str, Any], save_to: str | None = None, ckpt_path: str | None = None
) -> tuple[Outcome, dict[str, Tensor]]:
    """Train; called on every rank. Returns what it saw, and the weights at the end."""
    seen = fit(
        plan,
        functools.partial(on_meta, **shape),
        samples(),
        loss="objective",
        save_to=save_to,
        ckpt_path=ckpt_path,
    )
    updates = {name: seen.final[name] - start for name, start in seen.initial.items()}
    order = torch.inf if plan.trainer.get("gradient_clip_algorithm") == "inf_norm" else 2
    norms = [global_norm(step.values(), order) for step in seen.gradients]
    return Outcome(Result(seen.losses, norms, seen.gradients[0], updates), seen.initial, seen.grad_norm), seen.final


def outcomes_of(pool: WorkerPool, mix: Mix, **shape: Any) -> list[Outcome]:
    """Run a row; what each rank saw."""
    found = pool.run(run, mix.ranks, plan_of(mix, shape), shape, process_group=False, timeout=90)
    return [outcome for outcome, _ in found]


@functools.cache
def initial_of(pool: WorkerPool, experts: int) -> dict[str, Tensor]:
    """Initial weights as one process makes them: all mixes must make the same."""
    return outcomes_of(pool, Mix("", 1), experts=experts)[0].initial


def global_batches() -> list[dict[str, Tensor]]:
    """The batches of the optimizer steps."""
    columns = samples().columns
    return [
        {name: column[at : at + GLOBAL_BATCH] for name, column in columns.items()}
        for at in range(0, STEPS * GLOBAL_BATCH, GLOBAL_BATCH)
    ]


def objective(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, float]:
    """Mean over the valid tokens of a batch, and their number."""
    result = model.loss(batch)
    return result["loss"] + BALANCE_WEIGHT * result["balance"], int(result["weight"])


def real(pool: WorkerPool, **shape: Any) -> SmallMoE:
    """The model in this process, with the initial weights of all mixes."""
    model = SmallMoE(**{**SHAPE, "balance_weight": BALANCE_WEIGHT, **shape}).double()
    model.load_state_dict(initial_of(pool, shape.get("experts", SHAPE["experts"])))
    return model


def reference_of(pool: WorkerPool, mix: Mix, **shape: Any) -> Result:
    """The truth of a row: one process, no framework, from the same initial weights."""
    clip, algorithm = mix.clip
    batches = [[batch] for batch in global_batches()]
    model = real(pool, **shape)
    return train(model, batches, objective, lr=LR, momentum=MOMENTUM, clip=clip, clip_algorithm=algorithm)
