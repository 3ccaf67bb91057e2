"""`ledger`: what always writing down which samples were trained costs an optimizer step.

Each function of the ledger that is on the step's path is timed inside of real runs of a small model: numbers taken off
a batch, noted, and every 256 steps hashed and written. What workers do (a number beside each sample) is timed as well
where there are none, since then it is on the path too. What timing itself takes, measured in the same steps by timing
nothing, is taken off. What comes with each batch is timed by a clock that needs no system call: one would cost as much
as it measures, and empties caches. Of what comes every 256 steps CPU is taken: waiting for other ranks is no work.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.telling import told
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

Clock = Callable[[], float]


class Steps(Callback):
    """Times nothing at each batch, and the timing of nothing; keeps batches, as else the ledger would free them."""

    def __init__(self) -> None:
        self.nothing: list[float] = []
        self.nested: list[float] = []
        self._kept: deque[Any] = deque(maxlen=3)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """See the class."""
        timing(self.nested, timing(self.nothing, lambda: None))()
        self._kept.append(batch)


def timing(spent: list[float], function: Callable[..., Any], clock: Clock = time.perf_counter) -> Callable[..., Any]:
    """Return a function whose seconds are noted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        try:
            return function(*args, **kwargs)
        finally:
            spent.append(clock() - start)

    return call


class Spent:
    """The seconds that each call of the ledger's functions takes; what they call of the user's isn't counted."""

    def __init__(self) -> None:
        self.batches: dict[str, list[float]] = {"claim": [], "begin": [], "collate": [], "user": []}
        self.ends: list[float] = []
        self.settled: list[float] = []

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Note them."""
        from framework.ledger.numbering import Collate, Tray
        from framework.ledger.writer import Ledger

        def collate(self_: Collate, rows: Any) -> Any:
            within = Collate(timing(self.batches["user"], self_.user), self_.stream, self_.alone)
            return timing(self.batches["collate"], collated)(within, rows)

        collated = Collate.__call__
        times = {
            (Tray, "claim"): timing(self.batches["claim"], Tray.claim),
            (Tray, "begin"): timing(self.batches["begin"], Tray.begin),
            (Collate, "__call__"): collate,
            (Ledger, "batch_end"): timing(self.ends, Ledger.batch_end),
            (Ledger, "settle"): timing(self.settled, Ledger.settle, time.thread_time),
        }
        with ExitStack() as stack:
            for (owner, name), function in times.items():
                stack.enter_context(patch.object(owner, name, function))
            yield

    def a_step(self, nothing: float, nested: float) -> dict[str, float]:
        """Return the seconds of an optimizer step; the arguments: what timing takes, and timing around a timing."""
        steps = len(self.ends)
        each = {name: typical(times) - nothing for name, times in self.batches.items()}
        a_batch = each["claim"] + each["begin"] + each["collate"] - (nested - nothing) - each["user"]
        batches = len(self.batches["begin"]) / steps * a_batch
        return {"batches": batches, "end": typical(self.ends) - nothing, "settling": sum(self.settled) / steps}


def typical(times: Sequence[float]) -> float:
    """Return the mean without warm-up and the slowest in a hundred, in which the process was put aside."""
    kept = sorted(times[WARMUP:])
    return mean(kept[: len(kept) - len(kept) // 100])


def run(plan: dict[str, Any]) -> dict[str, float]:
    """Train as one rank; return the ledger's seconds a step."""
    import framework
    from framework.objects import build
    from framework.trainer import build_model

    frozen = RunPlan.from_dict(plan)
    torch.set_num_threads(1)
    spent, steps = Spent(), Steps()
    with spent.timed():
        trainer = framework.Trainer(frozen, callbacks=[steps])
        trainer.fit(build_model(frozen), datamodule=build(frozen.components["data"]))
    return spent.a_step(typical(steps.nothing), typical(steps.nested))


def measure(steps: int, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return for each setting the milliseconds that the ledger takes of a step, of the rank where it takes most.

    `parts` of them, in seconds: what comes with each batch, with each step, and every 256 steps.
    """
    from framework.testing import WorkerPool

    report = {}
    for name in told(names or SETTINGS):
        with WorkerPool() as pool, tempfile.TemporaryDirectory() as folder:
            words = (
                f"{SETTINGS[name]} {COMMON} trainer.max_steps={steps + WARMUP} run_dir={os.path.join(folder, 'run')}"
            )
            plan = compose(words.split())
            ranks = pool.run(run, plan.world_size, plan.to_dict(), process_group=False, timeout=600.0)
        parts = max(ranks, key=lambda one: sum(one.values()))
        cost = 1000 * sum(parts.values())
        report[name] = {"ms": cost, "share": cost / STEP_MS, "within": cost / STEP_MS < BAR, "parts": parts}
    return report


def table(report: Mapping[str, Any]) -> Any:
    """Return the costs beside the bar."""
    from rich.table import Table

    shown = Table(title=f"What the ledger costs: below {100 * BAR:g} % of a step of {STEP_MS:g} ms")
    for name in ("setting", "with batches", "at its end", "settling", "us a step", "% of a step", ""):
        shown.add_column(name, justify="left" if name in ("setting", "") else "right")
    for name, figures in report.items():
        verdict = "within" if figures["within"] else "[red]above[/red]"
        parts = (f"{1e6 * seconds:.0f}" for seconds in figures["parts"].values())
        shown.add_row(name, *parts, f"{1000 * figures['ms']:.0f}", f"{100 * figures['share']:.2f}", verdict)
    return shown
