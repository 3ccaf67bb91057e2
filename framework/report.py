"""`Report`: the callback that measures a run on every rank, and keeps `worker_summary.json` for the launcher."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any, Protocol, runtime_checkable

import psutil
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from framework.clock import Clock, Clocked
from framework.curves import TRAIN_LOSS, VAL_LOSS, pick
from framework.ledger.numbering import Tray
from framework.loaders import Loader
from framework.plan import RunPlan
from framework.precision import local
from framework.summary import WORKER_SUMMARY, read_summary, write_summary

WRITE_EVERY_S = 5.0
"""A killed run loses at most this much of its summary."""


@runtime_checkable
class Counter(Protocol):
    """What `framework.window.Window` knows after each optimizer step, on the host and for all ranks alike."""

    counted: float
    weighted: bool
    loss: float | None


class Report(Callback):
    """Measures step times, rates, peak memory and losses; the Trainer adds it to every run.

    Costs a few microseconds a batch and no synchronisation with the device: the true loss and the number of tokens are
    known from the one all-reduce that ends each step. All ranks meet for one small object gather when training starts,
    after each validation and at the end. Under another Trainer than the framework's, and with manual optimization,
    the loss is what the module logged under one of `curves.TRAIN_LOSS`.

    Attributes:
        clock: where the run stands; given to every logger that has an attribute `clock`.
        loss: mean loss of the last optimizer step over all ranks, or None so far.
        val_loss: validation loss that the module logged last, under one of `curves.VAL_LOSS`.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.clock = Clock()
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.timeline = {"process": psutil.Process().create_time(), "trainer": time.time()}
        """Seconds since the epoch at which this attempt reached each phase (`tools/bench.py start`)."""
        self._first: tuple[int, float] | None = None
        self._times: deque[float] = deque(maxlen=4096)
        self._seconds = 0.0
        """Time in optimizer steps after this attempt's first one, without validation."""
        self._weights = 0.0
        """Weight of those steps over all ranks; stays 0 if the module returns none."""
        self._counted = 0.0
        self._marks: deque[tuple[float, float, int, float]] = deque([(0.0, 0.0, 0, 0.0)], maxlen=20)
        self._tray: Tray | None = None
        self._waited = 0.0
        """Seconds that batches were waited for before this attempt's first step was done."""
        self._window: Counter | None = None
        self._since: float | None = None
        self._paused = 0.0
        self._validating = 0.0
        self._written = 0.0
        self._ranks: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {}

    # -- steps ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hand the clock to the loggers."""
        self.timeline["setup"] = time.time()
        for logger in trainer.loggers:
            if isinstance(logger, Clocked):
                logger.clock = self.clock

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where this attempt begins, how many parameters there are, and what an earlier attempt measured."""
        self.timeline["train_start"] = time.time()
        window = getattr(trainer.strategy, "window", None)
        self._window = window if isinstance(window, Counter) else None  # asked once: each step it would cost 90 us
        tray = getattr(trainer.train_dataloader, "tray", None)
        self._tray = tray if isinstance(tray, Tray) else None
        self.clock.start_step = self.clock.step = trainer.global_step
        self.clock.count_samples = lambda: self._samples(trainer)
        old = read_summary(Path(self.plan.run_dir) / WORKER_SUMMARY) if trainer.is_global_zero else {}
        if old.get("loss_first") is not None and 0 < old.get("loss_first_step", 0) <= self.clock.start_step:
            self._first = (old["loss_first_step"], old["loss_first"])
        start = trainer.ckpt_path or self.plan.ckpt_path
        self._facts = {
            "start_step": self.clock.start_step,
            "resumed_from": str(start) if self.clock.start_step and start else None,
            "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        }
        entropy = (
            getattr(getattr(trainer, "datamodule", None), "bigram_entropy", None) if trainer.is_global_zero else None
        )
        self._facts |= {} if entropy is None else {"bigram_entropy": float(entropy)}
        self._gather(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock of this attempt's first step."""
        if self._since is None:
            self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the end of an optimizer step measure it."""
        step = trainer.global_step
        if step == self.clock.step or self._since is None:
            return
        now = time.perf_counter()
        seconds, self._since, self._paused = now - self._since - self._paused, now, 0.0
        warm = self.clock.step > self.clock.start_step
        self._times.append(seconds)
        self._seconds += seconds if warm else 0.0
        self.clock.step = step
        self._count(trainer, warm)
        if not warm:
            self.timeline["first_step"] = time.time()
        if self._first is None and self.loss is not None:
            self._first = (step, self.loss)
        waited = 0.0 if self._tray is None else self._tray.waited_s
        if not warm:
            self._waited = waited
        self._marks.append((self._seconds, self._weights, step - self.clock.start_step - 1, waited - self._waited))
        if trainer.is_global_zero and (not warm or now - self._written > WRITE_EVERY_S):
            self.write(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation isn't part of a training step's time."""
        self._validating = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the validation loss; all ranks exchange what they measured so far."""
        self._paused += time.perf_counter() - self._validating
        if trainer.sanity_checking:
            return
        value = pick(trainer.callback_metrics, VAL_LOSS)
        self.val_loss = self.val_loss if value is None else value
        self._gather(pl_module)
        if trainer.is_global_zero:
            self.write(trainer, finished=trainer.state.fn == "validate")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the final numbers."""
        self._gather(pl_module)
        if trainer.is_global_zero:
            self.write(trainer, finished=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep what was measured; other ranks may be gone, so nothing is gathered."""
        if trainer.is_global_zero and self._facts:
            self.write(trainer)

    # -- what was measured -----------------------------------------------------------------------------------------

    def rates(self) -> tuple[float, float | None]:
        """Return samples and tokens a second over all ranks in the last steps; tokens None without weights."""
        (since, weight, step, _), (now, weight_now, step_now, _) = self._marks[0], self._marks[-1]
        if now <= since:
            return 0.0, None
        samples = (step_now - step) * self.plan.batch.global_batch_size / (now - since)
        return samples, (weight_now - weight) / (now - since) if weight_now > weight else None

    def data_wait(self) -> float | None:
        """Return which share of the last steps' time was spent waiting for batches; None before the second step."""
        (since, _, _, before), (now, _, _, waited) = self._marks[0], self._marks[-1]
        return None if now <= since else min(1.0, (waited - before) / (now - since))

    def write(self, trainer: Trainer, finished: bool = False) -> None:
        """Write `worker_summary.json` at once (rank 0 only)."""
        self._written = time.perf_counter()
        folder = Path(self.plan.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_summary(folder / WORKER_SUMMARY, self.summary(trainer) | {"finished": finished})

    def summary(self, trainer: Trainer) -> dict[str, Any]:
        """Return all figures, with those of the other ranks as of the last gather."""
        ranks = [dict(rank) for rank in self._ranks]
        if ranks:
            ranks[trainer.global_rank] |= {"peak_rss_mb": peak_rss_mb(), "peak_device_mb": peak_device_mb()}
        steps = self.clock.step - self.clock.start_step
        samples = max(steps - 1, 0) * self.plan.batch.global_batch_size
        stages = {self.plan.mesh.coordinate(number)["pp"]: rank["owned"] for number, rank in enumerate(ranks)}
        times = list(self._times)[1:] or list(self._times)
        return {
            "steps": self.clock.step,
            "samples": self.clock.samples,
            "loss_first": self._first[1] if self._first else None,
            "loss_first_step": self._first[0] if self._first else None,
            "loss_last": self.loss,
            "val_loss": self.val_loss,
            "tokens_per_second": self._weights / self._seconds if self._seconds and self._weights else None,
            "samples_per_second": samples / self._seconds if self._seconds else None,
            "step_ms_p50": 1000 * median(times) if times else None,
            "data_wait": self._marks[-1][3] / self._seconds if self._seconds else None,
            "peak_rss_mb": [round(rank["peak_rss_mb"], 1) for rank in ranks],
            "peak_device_mb": [rank["peak_device_mb"] for rank in ranks] if peak_device_mb() is not None else None,
            "params": sum(stages.values()) or None,
            "params_per_rank": [rank["held"] for rank in ranks],
            "pids": [rank["pid"] for rank in ranks],
            "timeline": self.timeline,
            **self._facts,
        }

    def _count(self, trainer: Trainer, warm: bool) -> None:
        """Take over loss and weight of the optimizer step that just ended; without them, what the module logged."""
        window = self._window
        if window is not None and window.counted > 0:
            self.loss = window.loss if window.loss is not None else self.loss
            weight, self._counted = window.counted - self._counted, window.counted
            self._weights += weight if warm and window.weighted else 0.0
        elif not warm or self.clock.step % max(trainer.log_every_n_steps, 1) == 0:  # type: ignore[attr-defined]
            value = pick(trainer.callback_metrics, TRAIN_LOSS)
            self.loss = self.loss if value is None else value

    def _samples(self, trainer: Trainer) -> int:
        """Return samples consumed over all ranks since the beginning of the run, partial steps as what they were."""
        loader = trainer.train_dataloader
        if isinstance(loader, Loader):
            state = loader.state_dict()
            return int(state["epoch"]) * loader.batches.usable + int(state["consumed"])
        return self.clock.step * self.plan.batch.global_batch_size

    def _gather(self, pl_module: LightningModule) -> None:
        """Exchange every rank's figures; a collective."""
        own = [parameter for parameter in pl_module.parameters() if not parameter.is_meta]
        mine = {
            "pid": os.getpid(),
            "peak_rss_mb": peak_rss_mb(),
            "peak_device_mb": peak_device_mb(),
            "owned": sum(parameter.numel() for parameter in own),
            "held": sum(local(parameter).numel() for parameter in own),
        }
        self._ranks = [mine]
        if dist.is_available() and dist.is_initialized():
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, mine)
            self._ranks = ranks


def peak_rss_mb() -> float:
    """Return the largest resident set that this process had, MiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def peak_device_mb() -> float | None:
    """Return the most memory that tensors of this process took on its GPU, MiB; None without one."""
    return round(torch.cuda.max_memory_allocated() / 2**20, 1) if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
