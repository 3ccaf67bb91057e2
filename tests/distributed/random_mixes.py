"""Mixes drawn at random: axes, options, model shape, frozen parameters, schedule, a partial last step, all at once."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from fitting import fit
from mixes import ACC2, CLIP, CLIP_INF, CLIP_VALUE, FSDP, GLOBAL_BATCH, LP, SGO, SP, SP_LP, TP, Mix
from parity import LR, MOMENTUM, SHAPE, SmallGpt, mean_loss, samples
from user_modules import Rows, Seen

from framework.plan import RunPlan
from framework.testing import WorkerPool, plan
from framework.verify.reference import Bounds, Result, disagreements, global_norm, train

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipev")


@dataclass(frozen=True)
class Draw:
    """One random row.

    Attributes:
        mix: words and ranks.
        shape: of the model.
        frozen: which parameters don't learn: `first` (embedding and first block), `norms` or nothing.
        decay: whether the learning rate falls by 30 % a step.
        meta: built without weights, as the framework does; False: with weights, as a test of a user's may.
        rows: samples an epoch; the last step is smaller if they aren't a multiple of the global batch.
    """

    mix: Mix
    shape: dict[str, Any] = field(default_factory=dict)
    frozen: str = ""
    decay: bool = False
    meta: bool = True
    rows: int = 96

    def __str__(self) -> str:
        shape = {name: value for name, value in self.shape.items() if SHAPE.get(name) != value}
        how = [self.frozen and f"frozen {self.frozen}", self.decay and "decay", not self.meta and "real weights"]
        return f"{self.mix.ranks} ranks, {self.rows} rows, {shape}, {[word for word in how if word]}: {self.mix.words}"

    @property
    def used(self) -> int:
        """Samples that are trained on: a pipeline drops the ones that don't fill a step."""
        return self.rows - self.rows % GLOBAL_BATCH if "pp" in self.mix.settings else self.rows


def draw(chance: random.Random) -> Draw:
    """Draw a row; each one is legal."""
    pp = chance.choice(("", "", *SCHEDULES))
    tp = chance.choice(("", TP, SP, LP, SP_LP))
    strategy = chance.choice(("", "strategy=ddp", FSDP, SGO, f"{FSDP} strategy.cpu_offload=true"))
    microbatches = (4 if pp == "dualpipev" else chance.choice((2, 4))) if pp else 1
    accumulation = chance.choice(("", ACC2)) if microbatches * (2 if strategy else 1) < 8 else ""
    activation = chance.choice(("", "activation=full", "activation=selective"))
    clip = chance.choice(("", CLIP, CLIP_INF, CLIP_VALUE))
    pipeline = f"pp={pp} pp.microbatches={microbatches}" if pp else ""
    words = " ".join(word for word in (strategy, tp, pipeline, activation, accumulation, clip) if word)
    shape = dict(SHAPE)
    if chance.random() < 0.3:
        shape["kv_heads"] = 2
    if chance.random() < 0.3 and not pp:
        shape["tied"] = True
    if chance.random() < 0.3:
        shape["layers"] = chance.choice((5, 6))
    return Draw(
        mix=Mix("", (2 if pp else 1) * (2 if tp else 1) * (2 if strategy else 1), words),
        shape=shape,
        frozen=chance.choice(("", "", "first", "norms")),
        decay=chance.random() < 0.4,
        meta=chance.random() < 0.75,
        rows=chance.choice((96, 88) if pp else (96, 88, 90)),
    )


class RandomGpt(SmallGpt):
    """The model of a row."""

    def __init__(self, row: Draw) -> None:
        super().__init__(**row.shape)
        self.decay = row.decay
        for name, parameter in self.named_parameters():
            first = name.startswith(("tokens", "layers.0."))
            if (row.frozen == "first" and first) or (row.frozen == "norms" and "norm" in name):
                parameter.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        learning = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(learning, lr=LR, momentum=MOMENTUM)
        if not self.decay:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def rows_of(count: int) -> Rows:
    """The first samples of the parity data."""
    return Rows(**{name: column[:count] for name, column in samples().columns.items()})


def run_row(plan: RunPlan, row: Draw) -> Seen:
    """Train; called on every rank."""

    def module() -> RandomGpt:
        with torch.device("meta" if row.meta else "cpu"):
            return RandomGpt(row)

    return fit(plan, module, rows_of(row.rows))


def measure(pool: WorkerPool, row: Draw) -> list[str]:
    """Run a row and return how it differs from the reference, on any rank; empty = equal."""
    common = {
        "sampler.shuffle": "false",
        "sampler.drop_last": "null" if "pp" in row.mix.settings else "false",
        "trainer.max_epochs": 1,
        "trainer.enable_progress_bar": "false",
        "threads": 1,
        "run_dir": tempfile.mkdtemp(prefix="parity-"),
        **{f"model.{name}": value for name, value in row.shape.items()},
        **dict.fromkeys(("checkpoint", "logs", "recovery", "logger"), "none"),
    }
    run_plan = plan(*row.mix.overrides, *(f"{name}={value}" for name, value in common.items()))
    seen = pool.run(run_row, row.mix.ranks, run_plan, row, process_group=False, timeout=120)
    clip, algorithm = row.mix.clip
    model = RandomGpt(row).double()
    model.load_state_dict(seen[0].initial, strict="tied" not in row.shape)
    data = rows_of(row.used).columns
    steps = [
        [{name: column[at : at + GLOBAL_BATCH] for name, column in data.items()}]
        for at in range(0, row.used, GLOBAL_BATCH)
    ]
    want = train(
        model,
        steps,
        mean_loss,
        lr=LR,
        momentum=MOMENTUM,
        clip=clip,
        clip_algorithm=algorithm,
        schedule=(lambda step: 0.7**step) if row.decay else None,
    )
    lines = []
    for rank, one in enumerate(seen):
        updates = {name: one.final[name] - start for name, start in one.initial.items() if name in want.updates}
        norms = [global_norm(step.values(), torch.inf if algorithm == "inf_norm" else 2) for step in one.gradients]
        got = Result(one.losses, norms, one.gradients[0], updates)
        lines += [f"rank {rank}: {line}" for line in disagreements(got, want, Bounds())]
    return lines
