"""`Report`: the callback that measures a run on every rank, and keeps `worker_summary.json` for the launcher."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.tensor import DTensor

from framework.clock import Clock, Clocked
from framework.curves import TRAIN_LOSS, VAL_LOSS, pick
from framework.plan import RunPlan
from framework.summary import WORKER_SUMMARY, read_summary, write_summary

WRITE_EVERY_S = 5.0
"""A killed run loses at most this much of its summary."""


class Report(Callback):
    """Measures step times, rates, peak memory and losses; the Trainer adds it to every run.

    Costs a few microseconds a batch. Values are read from the device only at the steps at which Lightning logs
    (`log_every_n_steps`), the first and the last, so it adds no synchronisation of its own. All ranks meet for one
    small object gather after each validation and at the end.

    Attributes:
        clock: where the run stands; given to every logger that has an attribute `clock`.
        loss: the training loss that was logged last (true mean over all ranks), or None so far.
        val_loss: the same for validation.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.clock = Clock()
        self.loss: float | None = None
        self.val_loss: float | None = None
        self._first: tuple[int, float] | None = None
        self._times: deque[float] = deque(maxlen=4096)
        self._seconds = 0.0
        """Time in optimizer steps after this attempt's first one, without validation."""
        self._units: Any = 0.0
        """Sum of this rank's loss weights after the first step: a tensor as long as nobody asked."""
        self._counted: tuple[int, float, float] = (0, 0.0, 0.0)
        self._rates: tuple[float, float | None] = (0.0, None)
        self._mark: float | None = None
        self._paused = 0.0
        self._written = 0.0
        self._ranks: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {}

    # -- steps ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hand the clock to the loggers."""
        for logger in trainer.loggers:
            if isinstance(logger, Clocked):
                logger.clock = self.clock

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where this attempt begins, how many parameters there are, and what an earlier attempt measured."""
        self.clock.start_step = self.clock.step = trainer.global_step
        self.clock.samples = self._samples(trainer)
        old = read_summary(Path(self.plan.run_dir) / WORKER_SUMMARY) if trainer.is_global_zero else {}
        if old.get("loss_first") is not None and 0 < old.get("loss_first_step", 0) <= self.clock.start_step:
            self._first = (old["loss_first_step"], old["loss_first"])
        resumed_from = trainer.ckpt_path if self.clock.start_step else None
        self._facts = {
            "start_step": self.clock.start_step,
            "resumed_from": None if resumed_from is None else str(resumed_from),
            "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        }
        self._gather(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock of this attempt's first step."""
        if self._mark is None:
            self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch, and at the end of an optimizer step measure it."""
        step = trainer.global_step
        warm = self.clock.step > self.clock.start_step
        if warm and isinstance(outputs, Mapping) and (weight := outputs.get("weight")) is not None:
            self._units = self._units + (weight.detach() if isinstance(weight, torch.Tensor) else weight)
        if step == self.clock.step or self._mark is None:
            return
        now = time.perf_counter()
        seconds, self._mark, self._paused = now - self._mark - self._paused, now, 0.0
        self._times.append(seconds)
        self._seconds += seconds if warm else 0.0
        self.clock.step = step
        self.clock.samples = self._samples(trainer)
        if not warm or step % max(trainer.log_every_n_steps, 1) == 0:
            self._read(trainer, outputs)
        if trainer.is_global_zero and now - self._written > WRITE_EVERY_S:
            self.write(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation isn't part of a training step's time."""
        self._validating_since = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the validation loss; all ranks exchange what they measured so far."""
        self._paused += time.perf_counter() - self._validating_since
        if trainer.sanity_checking:
            return
        value = pick(trainer.callback_metrics, VAL_LOSS)
        self.val_loss = self.val_loss if value is None else value
        self._gather(pl_module)
        if trainer.is_global_zero:
            self.write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the final numbers."""
        value = pick(trainer.callback_metrics, TRAIN_LOSS)
        self.loss = self.loss if value is None else value
        self._gather(pl_module)
        if trainer.is_global_zero:
            self.write(trainer, finished=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Keep what was measured; other ranks may be gone, so nothing is gathered."""
        if trainer.is_global_zero and self._facts:
            self.write(trainer)

    # -- what was measured -----------------------------------------------------------------------------------------

    def rates(self) -> tuple[float, float | None]:
        """Return samples and tokens a second over all ranks between the last two reads; tokens None without weights.

        Rank 0 alone knows its own tokens only and takes the other data ranks to have as many: for the display.
        """
        return self._rates

    def write(self, trainer: Trainer, finished: bool = False) -> None:
        """Write `worker_summary.json` at once (rank 0 only)."""
        self._written = time.perf_counter()
        folder = Path(self.plan.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_summary(folder / WORKER_SUMMARY, self.summary(trainer) | {"finished": finished})

    def summary(self, trainer: Trainer) -> dict[str, Any]:
        """Return all figures, with those of the other ranks as of the last gather."""
        mesh = self.plan.mesh
        own = {"peak_rss_mb": peak_rss_mb(), "peak_device_mb": peak_device_mb(), "units": float(self._units)}
        ranks = [dict(rank) for rank in self._ranks]
        ranks[trainer.global_rank] |= own
        shares: dict[int, float] = {}
        for number, rank in enumerate(ranks):
            share = mesh.data_rank(number)
            shares[share] = max(shares.get(share, 0.0), rank["units"])
        tokens = sum(shares.values())
        steps = self.clock.step - self.clock.start_step
        samples = max(steps - 1, 0) * self.plan.batch.global_batch_size
        first_of_stage = {mesh.coordinate(number)["pp"]: rank for number, rank in reversed(list(enumerate(ranks)))}
        times = list(self._times)[1:] or list(self._times)
        return {
            "steps": self.clock.step,
            "samples": self.clock.samples,
            "loss_first": self._first[1] if self._first else None,
            "loss_first_step": self._first[0] if self._first else None,
            "loss_last": self.loss,
            "val_loss": self.val_loss,
            "tokens_per_second": tokens / self._seconds if self._seconds and tokens else None,
            "samples_per_second": samples / self._seconds if self._seconds else None,
            "step_ms_p50": 1000 * median(times) if times else None,
            "peak_rss_mb": [round(rank["peak_rss_mb"], 1) for rank in ranks],
            "peak_device_mb": [rank["peak_device_mb"] for rank in ranks] if peak_device_mb() is not None else None,
            "params": sum(rank["owned"] for rank in first_of_stage.values()),
            "params_per_rank": [rank["held"] for rank in ranks],
            **self._facts,
        }

    def _read(self, trainer: Trainer, outputs: Any) -> None:
        """Read loss and rates from the device."""
        value = pick(trainer.callback_metrics, TRAIN_LOSS)
        if value is None and (loss := _loss_of(outputs)) is not None:
            value = float(trainer.strategy.reduce(loss, reduce_op="mean"))
        if value is not None:
            self.loss = value
            self._first = self._first or (self.clock.step, value)
        step, seconds, units = self._counted
        self._counted = (self.clock.step, self._seconds, float(self._units))
        if self._seconds > seconds:
            passed, tokens = self._seconds - seconds, self._counted[2] - units
            batch = self.plan.batch
            samples = (self.clock.step - step) * batch.global_batch_size / passed
            self._rates = (samples, tokens * batch.data_ranks / passed if tokens else None)

    def _samples(self, trainer: Trainer) -> int:
        """Return samples consumed over all ranks since the beginning of the run."""
        sampler = getattr(trainer.train_dataloader, "batch_sampler", None)
        consumed = getattr(sampler, "consumed", None)
        return int(consumed) if consumed is not None else self.clock.step * self.plan.batch.global_batch_size

    def _gather(self, pl_module: LightningModule) -> None:
        """Exchange every rank's figures; a collective."""
        own = [parameter for parameter in pl_module.parameters() if not parameter.is_meta]
        mine = {
            "peak_rss_mb": peak_rss_mb(),
            "peak_device_mb": peak_device_mb(),
            "units": float(self._units),
            "owned": sum(parameter.numel() for parameter in own),
            "held": sum(local(parameter).numel() for parameter in own),
        }
        self._ranks = [mine]
        if dist.is_available() and dist.is_initialized():
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, mine)
            self._ranks = ranks


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def peak_rss_mb() -> float:
    """Return the largest resident set that this process had, MiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def peak_device_mb() -> float | None:
    """Return the most memory that tensors of this process took on its GPU, MiB; None without one."""
    return round(torch.cuda.max_memory_allocated() / 2**20, 1) if torch.cuda.is_initialized() else None


def _loss_of(outputs: Any) -> torch.Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach() if isinstance(loss, torch.Tensor) else None
