"""`ledger`: what always writing down which samples were trained costs an optimizer step.

Each function of the ledger that is on the step's path is timed (CPU of its thread: waiting for other ranks is no work)
inside of real runs of a small model: numbers taken off
a batch, hashed, the line written. What workers do (a number beside each sample) is timed as well where there are none,
since then it is on the path too. What timing itself takes, measured in the same steps by timing nothing, is taken off.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from framework.compose import compose
from framework.plan import RunPlan

BAR = 0.005
"""Share of a step of `STEP_MS` that the ledger may cost."""
STEP_MS = 10.0
WARMUP = 20
COMMON = (
    "model.width=16 model.layers=1 model.heads=2 model.context=8 trainer.limit_val_batches=0 logger=none "
    "checkpoint=none trainer.enable_progress_bar=false threads=1 recovery=none logs=none"
)
SETTINGS = {
    "1 rank, 8 samples": "global_batch_size=8",
    "1 rank, 64 samples": "global_batch_size=64",
    "1 rank, 512 samples": "global_batch_size=512",
    "ddp 2, 64 samples": "strategy=ddp devices=2 global_batch_size=64",
    "ddp 2, 64 in 4 micro-steps": "strategy=ddp devices=2 global_batch_size=64 trainer.accumulate_grad_batches=4",
}
"""Name -> words that a user would type."""


class Steps(Callback):
    """Notes what the timed functions took in each step, how often something was timed, and what that takes."""

    def __init__(self, spent: list[float]) -> None:
        self.spent = spent
        self.steps: list[float] = []
        self.timings: list[int] = []
        self.nothing: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A new optimizer step begins with what its first batch took."""
        timing(self.nothing, lambda: None)()
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.steps.append(sum(self.spent))
            self.timings.append(len(self.spent))
            self.spent.clear()

    def seconds(self) -> float:
        """Return what a step took."""
        return mean(self.steps[WARMUP:]) - mean(self.timings[WARMUP:]) * mean(self.nothing)


def timing(spent: list[float], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose seconds are noted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent.append(time.thread_time() - start)

    return call


@contextmanager
def timed(spent: list[float]) -> Iterator[None]:
    """Add up the seconds that the ledger's own functions take; what they call of the user's isn't counted."""
    from framework.data import Loaders
    from framework.ledger.numbering import Collate
    from framework.ledger.writer import Ledger

    def collate(self: Collate, rows: Any) -> Any:
        users: list[float] = []
        result = timing(spent, collated)(Collate(timing(users, self.user), self.stream, self.alone), rows)
        spent.append(-sum(users))
        return result

    collated = Collate.__call__
    with ExitStack() as stack:
        for owner, name in ((Loaders, "claim"), (Loaders, "begin"), (Ledger, "batch_end")):
            stack.enter_context(patch.object(owner, name, timing(spent, getattr(owner, name))))
        stack.enter_context(patch.object(Collate, "__call__", collate))
        yield


def run(plan: dict[str, Any]) -> float:
    """Train as one rank; return the ledger's seconds a step."""
    import framework
    from framework.objects import build
    from framework.trainer import build_model

    frozen = RunPlan.from_dict(plan)
    torch.set_num_threads(1)
    spent: list[float] = []
    steps = Steps(spent)
    with timed(spent):
        trainer = framework.Trainer(frozen, callbacks=[steps])
        trainer.fit(build_model(frozen), datamodule=build(frozen.components["data"]))
    return steps.seconds()


def measure(steps: int, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return for each setting the milliseconds that the ledger takes of a step, of the rank where it takes most."""
    from framework.testing import WorkerPool

    report = {}
    for name in names or SETTINGS:
        with WorkerPool() as pool, tempfile.TemporaryDirectory() as folder:
            words = (
                f"{SETTINGS[name]} {COMMON} trainer.max_steps={steps + WARMUP} run_dir={os.path.join(folder, 'run')}"
            )
            plan = compose(words.split())
            ranks = pool.run(run, plan.world_size, plan.to_dict(), process_group=False, timeout=600.0)
        cost = 1000 * max(ranks)
        report[name] = {"ms": cost, "share": cost / STEP_MS, "within": cost / STEP_MS < BAR}
    return report


def table(report: Mapping[str, Any]) -> Any:
    """Return the costs beside the bar."""
    from rich.table import Table

    shown = Table(title=f"What the ledger costs: below {100 * BAR:g} % of a step of {STEP_MS:g} ms")
    for name in ("setting", "us a step", "% of a step", ""):
        shown.add_column(name, justify="left" if name in ("setting", "") else "right")
    for name, figures in report.items():
        verdict = "within" if figures["within"] else "[red]above[/red]"
        shown.add_row(name, f"{1000 * figures['ms']:.0f}", f"{100 * figures['share']:.2f}", verdict)
    return shown
