"""Callbacks with which training stops in good order: `SaveAndStop` when it is asked to, `TellLauncher` on an error."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from framework import preemption, worker
from framework.checkpoint_files import folder_of, step_name
from framework.plan import RunPlan


@runtime_checkable
class Saver(Protocol):
    """A checkpoint callback that can save on request."""

    def save(self, trainer: Trainer) -> str:
        """Save now, under the option's own rules for names and tidying; return the path. Collective."""
        ...


class SaveAndStop(Callback):
    """SIGTERM to any rank, or to the launcher: all ranks save once, at the same step, and stop (P37).

    In training the flag travels in the all-reduce of each micro-step; the stop comes at the end of the optimizer step,
    with manual optimization at that of the batch. In validation all ranks ask one another after each batch, as long as
    they have equally many: weights don't change there, so the checkpoint is that of the last step.

    Args:
        plan: of the run.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self._armed = False
        self._ask_in_validation = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From now on SIGTERM waits for the end of a step."""
        if not self._armed:
            preemption.arm()
            self._armed = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and stop, if all ranks know and an optimizer step is complete."""
        complete = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        if preemption.agreed() and (complete or not pl_module.automatic_optimization):
            self._stop(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out whether all ranks have equally many batches, so that they may ask one another after each."""
        if self._armed:
            count = torch.tensor([float(sum(trainer.num_val_batches))], dtype=torch.float64)
            most, least = count.clone(), count.clone()
            if dist.is_initialized():
                dist.all_reduce(most, dist.ReduceOp.MAX)
                dist.all_reduce(least, dist.ReduceOp.MIN)
            self._ask_in_validation = bool(most == least)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Save and stop in the middle of a validation."""
        if self._armed and self._ask_in_validation and not trainer.sanity_checking:
            preemption.agree(_any_rank(preemption.requested()))
            if preemption.agreed():
                self._stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The work is done: nothing is left to save."""
        self._disarm()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Nobody will save any more: SIGTERM ends the process. After a save it must not: all is well."""
        if not isinstance(exception, preemption.StopRequested):
            self._disarm()

    def _disarm(self) -> None:
        if self._armed:
            self._armed = False
            preemption.disarm()

    def _stop(self, trainer: Trainer) -> None:
        savers = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, Saver)]
        if savers:
            path = getattr(savers[0], "save_now", savers[0].save)(trainer)
        else:
            path = str(folder_of(self.plan.run_dir) / step_name(trainer.global_step))
            trainer.save_checkpoint(path)
        state = getattr(trainer.strategy, "state", None)
        if state is not None:
            state.wait()
        raise preemption.StopRequested(
            f"SIGTERM: all ranks saved {path} (step {trainer.global_step}) and stopped; the same command with "
            "ckpt_path=last goes on."
        )


class TellLauncher(Callback):
    """Reports an exception before the Trainer's teardown, which may wait for ranks that will never come."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report at once."""
        worker.report(exception, trainer.global_rank)


def _any_rank(flag: bool) -> bool:
    """Return whether the flag is set on any rank. Collective; on CPU tensors, so that no device is waited for."""
    if not dist.is_initialized():
        return flag
    number = torch.tensor([float(flag)])
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return bool(number.item())
