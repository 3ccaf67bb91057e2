"""`Progress`: a bar with loss, rate and time left on a terminal; plain lines everywhere else."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from framework.plan import RunPlan
from framework.report import Report

LINE_EVERY_S = 5.0
REDRAW_EVERY_S = 0.1
SHOWN_WAIT = 0.05
"""Share of a step from which waiting for batches is shown: more workers would help."""


class Progress(ProgressBar):
    """The Trainer's progress bar (global rank 0 only).

    It counts optimizer steps and shows what `Report` read, so it adds no synchronisation with the device. On a
    terminal a bar is redrawn at most ten times a second; elsewhere a line without control characters is printed at the
    first step, then at most every five seconds, after each validation and at the end.

    Args:
        report: where the figures come from; it must stand before this callback in the Trainer's list.
        console: where to draw; None = standard output, with what rich finds out about it.
    """

    def __init__(self, report: Report, console: Console | None = None) -> None:
        super().__init__()
        self.report = report
        self.console = console
        self._enabled = True
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._total: int | None = None
        self._drawn = 0.0
        self._line = ""
        self._step = -1
        self._started = (0.0, 0)

    def enable(self) -> None:
        """Show progress."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing; Lightning calls it on all ranks but the first."""
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar; what `self.print` of a LightningModule calls."""
        if self._enabled:
            self._console.print(*args, markup=False, highlight=False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the empty bar."""
        if not self._enabled:
            return
        self._total = total_steps(trainer)
        self._step = trainer.global_step
        self._started = (time.monotonic(), trainer.global_step)
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.completed:,.0f}" + ("" if self._total is None else "/{task.total:,.0f}")),
                TextColumn("{task.fields[figures]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(compact=True),
                console=self._console,
                auto_refresh=False,
                expand=True,
            )
            self._task = self._bar.add_task("train", total=self._total, completed=trainer.global_step, figures="")
            self._bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Redraw if a step ended and enough time passed."""
        step = self.report.clock.step
        if not self._enabled or step == self._step:
            return
        self._step = step
        now = time.monotonic()
        if now - self._drawn >= (REDRAW_EVERY_S if self._bar else LINE_EVERY_S):
            self._drawn = now
            self._show()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what is happening now."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, description="validate", refresh=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the validation loss."""
        if self._enabled and not trainer.sanity_checking and trainer.state.fn == "fit":
            self._show()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the last step and leave the bar on the screen."""
        if self._enabled:
            self._show()
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the terminal back before the error is printed."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the terminal back."""
        self._stop()

    @property
    def _console(self) -> Console:
        if self.console is None:
            self.console = Console(file=sys.stdout)
        return self.console

    def _figures(self) -> list[str]:
        """Return what is known: losses and rate."""
        report = self.report
        samples, tokens = report.rates()
        wait = report.data_wait() or 0.0
        return [
            *([] if report.loss is None else [f"loss {report.loss:.4f}"]),
            *([] if report.val_loss is None else [f"val {report.val_loss:.4f}"]),
            *([f"{tokens:,.0f} tokens/s"] if tokens else [f"{samples:,.0f} samples/s"] if samples else []),
            *([f"data wait {wait:.0%}"] if wait >= SHOWN_WAIT else []),
        ]

    def _show(self) -> None:
        """Draw the bar, or print a line."""
        if self._bar and self._task is not None:
            self._bar.update(
                self._task,
                completed=self.report.clock.step,
                description="train",
                figures="  ".join(self._figures()),
                refresh=True,
            )
        elif self._bar is None:
            self._drawn = time.monotonic()
            total = "" if self._total is None else f"/{self._total}"
            line = "  ".join([f"step {self.report.clock.step}{total}", *self._figures(), *self._left()])
            if line != self._line:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            self._line = line

    def _left(self) -> list[str]:
        """Return the time left, from the mean pace since the start; empty if it can't be known."""
        since, first = self._started
        done = self.report.clock.step - first
        if self._total is None or done < 2:
            return []
        seconds = (time.monotonic() - since) / done * max(self._total - self.report.clock.step, 0)
        return [f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"]

    def _stop(self) -> None:
        if self._bar:
            self._bar.stop()
        self._bar = None


def watch(plan: RunPlan) -> list[Callback]:
    """Return the callbacks that every run gets: `Report`, and `Progress` unless `trainer.enable_progress_bar=false`."""
    report = Report(plan)
    return [report, Progress(report)] if plan.trainer.get("enable_progress_bar", True) else [report]


def total_steps(trainer: Trainer) -> int | None:
    """Return at how many optimizer steps training ends, or None if only time or a callback ends it."""
    limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
    batches = trainer.num_training_batches
    if trainer.max_epochs is not None and trainer.max_epochs >= 0 and math.isfinite(batches):
        limits.append(trainer.max_epochs * math.ceil(batches / trainer.accumulate_grad_batches))
    return min(limits) if limits else None
