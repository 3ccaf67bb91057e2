"""Mixes drawn at random: axes, options, data, model shape, frozen parameters, schedule, a partial last step at once."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from fitting import fit
from mixes import (
    ACC2,
    CLIP,
    CLIP_INF,
    CLIP_VALUE,
    FSDP,
    GLOBAL_BATCH,
    LP,
    OFFLOAD,
    SEQUENCE,
    SGO,
    SP,
    SP_LP,
    TP,
    Mix,
)  # fmt: skip
from parity import LR, MOMENTUM, SHAPE, VOCABULARY, SmallGpt, mean_loss, samples
from torch import Tensor
from torch.utils.data import DataLoader
from user_modules import Rows, Seen, loader

from framework.plan import RunPlan
from framework.testing import WorkerPool, plan
from framework.verify.reference import Bounds, Result, disagreements, global_norm, train
from framework_plugins.data import mixture, packed, windows

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
        data: `rows`, `packed` (documents in windows) or `mixture` (of the first and the second half of the rows).
    """

    mix: Mix
    shape: dict[str, Any] = field(default_factory=dict)
    frozen: str = ""
    decay: bool = False
    meta: bool = True
    rows: int = 96
    data: str = "rows"

    def __str__(self) -> str:
        shape = {name: value for name, value in self.shape.items() if SHAPE.get(name) != value}
        how = [self.frozen and f"frozen {self.frozen}", self.decay and "decay", not self.meta and "real weights"]
        what = f"{self.mix.ranks} ranks, {self.rows} {self.data}, {shape}, {[word for word in how if word]}"
        return f"{what}: {self.mix.words}"

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
    budget = f"activation=selective activation.budget={chance.choice((0.0, 0.2, 0.5, 0.8))}"
    activation = chance.choice(("", "activation=full", "activation=selective", budget, OFFLOAD))
    if activation and chance.random() < 0.3:
        activation += " activation.every=2"
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
        data=chance.choice(("rows", "packed", "mixture")),
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


def row_of_documents(count: int) -> tuple[np.ndarray, list[int]]:
    """Tokens that fill `count` windows, and where the documents end that they are of; 1 to 12 tokens each."""
    generator = np.random.default_rng(7)
    tokens = generator.integers(0, VOCABULARY, count * SEQUENCE + 1)
    ends = [0]
    while ends[-1] < len(tokens):
        ends.append(min(len(tokens), ends[-1] + int(generator.integers(1, 13))))
    return tokens, ends[1:]


def mixed(count: int) -> mixture.Mix:
    """`count` draws of two sources, three of one for each of the other."""
    columns = samples().columns
    halves = [{name: column[part] for name, column in columns.items()} for part in (slice(0, 48), slice(48, 96))]
    return mixture.Mix({"a": Rows(**halves[0]), "b": Rows(**halves[1])}, {"a": 3, "b": 1}, seed=7, samples=count)


def loader_of(row: Draw, batch_size: int) -> DataLoader:
    """What the framework reads."""
    if row.data == "packed":
        tokens, ends = row_of_documents(row.rows)
        windows_ = packed.Packs(tokens, SEQUENCE, np.asarray(ends), confined=True)
        return DataLoader(windows_, batch_size, collate_fn=windows.as_it_is)
    if row.data == "mixture":
        draws = mixed(row.rows)
        return DataLoader(draws, batch_size, sampler=mixture.Draws(len(draws)))
    return loader(Rows(**{name: column[: row.rows] for name, column in samples().columns.items()}), batch_size)


def columns_of(row: Draw) -> dict[str, Tensor]:
    """What the reference reads: all samples, side by side."""
    if row.data == "rows":
        return {name: column[: row.rows] for name, column in samples().columns.items()}
    if row.data == "mixture":
        every = [mixed(row.rows)[number] for number in range(row.rows)]
        return {name: torch.stack([sample[name] for sample in every]) for name in every[0]}
    tokens, ends = row_of_documents(row.rows)
    document = [sum(end <= at for end in ends) for at in range(len(tokens))]  # of each token, one by one
    columns: dict[str, list[list[int]]] = {"inputs": [], "targets": [], "documents": [], "positions": []}
    for start in range(0, row.rows * SEQUENCE, SEQUENCE):
        places = range(start, start + SEQUENCE)
        columns["inputs"].append([int(tokens[at]) for at in places])
        columns["targets"].append([
            int(tokens[at + 1]) if document[at] == document[at + 1] else -100 for at in places
        ])  # fmt: skip
        columns["documents"].append([document[at] for at in places])
        columns["positions"].append([sum(document[seen] == document[at] for seen in range(start, at)) for at in places])
    return {name: torch.tensor(column) for name, column in columns.items()}


def run_row(plan: RunPlan, row: Draw) -> Seen:
    """Train; called on every rank."""

    def module() -> RandomGpt:
        with torch.device("meta" if row.meta else "cpu"):
            return RandomGpt(row)

    return fit(plan, module, loader_of(row, plan.batch.local_batch_size))


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
    data = columns_of(row)
    steps = [
        [{name: column[at : min(at + GLOBAL_BATCH, row.used)] for name, column in data.items()}]
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
