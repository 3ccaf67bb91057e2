"""`pipelines`: speed of each schedule over GPipe's, measured in one run, and the share of time in which ranks wait.

Compute is emulated by sleeps in forward and backward, a time for each sample, so that many stages share few cores
without disturbing one another; what is left is the order of the work and the cost of communication.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import framework
from framework.compose import compose
from framework.plan import RunPlan

WIDTH = 16
SCHEDULES = {
    "gpipe": "pp.microbatches={micros}",
    "1f1b": "pp.microbatches={micros}",
    "interleaved_1f1b": "pp.microbatches={micros}",
    "pipedream": "pp.sync_every={every}",
    "pipedream_2bw": "pp.microbatches={micros} pp.sync_every={every}",
}
"""Schedule -> its words. The delayed ones agree at the end only: in an agreement ranks wait."""
FIRST = "gpipe"
"""What the others are compared with."""


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        rounds: how often each schedule runs.
        stages: ranks.
        micros: micro-batches of a batch, of one sample each.
        steps: optimizer steps that are measured; as many as stages go before them.
        forward_ms: time of one sample on one rank; its backward takes twice that.
    """

    rounds: int = 3
    stages: int = 4
    micros: int = 8
    steps: int = 12
    forward_ms: float = 10.0


class _Work(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Sleep `seconds` a sample."""
        ctx.seconds = seconds
        time.sleep(seconds * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Sleep twice that."""
        time.sleep(2 * ctx.seconds * len(gradients[0]))
        return gradients[0], None


class _Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(torch.tanh(self.linear(x)), self.seconds)  # type: ignore[no-any-return, no-untyped-call]


class Sleeper(LightningModule):
    """Two blocks a rank, so that schedules with one and with two stages a rank run the same work."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        seconds = settings.forward_ms / 1000 / 2
        self.layers = nn.ModuleList(_Block(seconds) for _ in range(2 * settings.stages))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Mean squared error."""
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Timer(Callback):
    """Wall seconds from the end of step `first` to the end of training, drained pipelines included."""

    def __init__(self, first: int) -> None:
        self.first, self.start, self.stop = first, 0.0, 0.0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Start once everything is set up and full."""
        if trainer.global_step == self.first:
            self.start = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop."""
        self.stop = time.perf_counter()


def plan(schedule: str, settings: Settings) -> RunPlan:
    """Return the plan of one schedule, as typed by a user."""
    every = settings.steps + settings.stages
    words = [
        f"pp={schedule}", f"pp.size={settings.stages}",
        *SCHEDULES[schedule].format(micros=settings.micros, every=every).split(),
        *(f"{slot}=none" for slot in ("checkpoint", "recovery", "logs", "logger")), "threads=1",
        f"global_batch_size={settings.micros}", f"trainer.max_steps={every}",
        "trainer.limit_val_batches=0", "trainer.enable_progress_bar=false",
    ]  # fmt: skip
    return compose(words, model=False)


def run_rounds(plans: Mapping[str, dict[str, Any]], settings: Settings) -> dict[str, list[float]]:
    """Run all schedules in turn, on each rank; return schedule -> seconds a step, one a round."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    samples = settings.micros * (settings.steps + settings.stages)
    data = TensorDataset(*torch.randn(2, samples, WIDTH, generator=torch.Generator().manual_seed(0)))
    result: dict[str, list[float]] = {schedule: [] for schedule in plans}
    names = list(plans)
    for number in range(settings.rounds):
        for schedule in names[number % len(names) :] + names[: number % len(names)]:
            timer = Timer(settings.stages)
            torch.manual_seed(0)
            trainer = framework.Trainer(RunPlan.from_dict(plans[schedule]), callbacks=[timer])
            trainer.fit(Sleeper(settings), DataLoader(data, batch_size=settings.micros))
            dist.barrier()
            result[schedule].append((timer.stop - timer.start) / settings.steps)
    return result


def measure(schedules: Iterable[str], settings: Settings) -> dict[str, Any]:
    """Measure; figures are medians over rounds, means over ranks."""
    from framework.testing import run_ranks

    plans = {schedule: plan(schedule, settings).to_dict() for schedule in dict.fromkeys([FIRST, *schedules])}
    limit = 120.0 + 10 * settings.rounds * len(plans) * settings.steps
    ranks = run_ranks(run_rounds, settings.stages, plans, settings, timeout=limit)
    work = 3 * settings.forward_ms / 1000 * settings.micros
    report: dict[str, Any] = {}
    for schedule in plans:
        seconds = mean(median(rank[schedule]) for rank in ranks)
        report[schedule] = {
            "ms_a_step": seconds * 1000,
            "waiting": 1 - work / seconds,
            "ms_rounds": [[1000 * one for one in rank[schedule]] for rank in ranks],
        }
    for figures in report.values():
        figures["speed_to_gpipe"] = report[FIRST]["ms_a_step"] / figures["ms_a_step"]
    return report


def table(report: Mapping[str, Any]) -> Any:
    """Return the figures as a table."""
    from rich.table import Table

    shown = Table(title="Pipelines: steps at emulated compute")
    for name in ("schedule", "ms a step", "speed / GPipe", "time that ranks wait"):
        shown.add_column(name, justify="left" if name == "schedule" else "right")
    for schedule, figures in report.items():
        shown.add_row(
            schedule,
            f"{figures['ms_a_step']:.0f}",
            f"{figures['speed_to_gpipe']:.2f}",
            f"{figures['waiting']:.0%}",
        )
    return shown
