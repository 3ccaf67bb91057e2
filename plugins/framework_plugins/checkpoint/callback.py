"""`Checkpoints`: when to save, and which checkpoints to keep. Rank 0 decides, the others follow.

What is kept is read from the directories themselves (commit marks and score files), not from a memory that a crash
would lose: the newest `keep`, the best `save_top_k` by the monitored metric, and the one that the run started from.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from framework import checkpoint_files as files
from framework.adapters import lightning_private
from framework.agreement import ranks, together
from framework.checkpoint import schedule_changes
from framework.checkpoint_files import CheckpointError, Mark
from framework.encoding import encode
from framework.errors import UsageError
from framework_plugins.checkpoint.dcp import DCP

log = logging.getLogger(__name__)


class Checkpoints(Checkpoint):
    """Saves every `every_n_steps` optimizer steps, when the monitored metric is new, and at the end of training.

    A score belongs to the weights it was measured with: one that validation gives is added to the checkpoint of the
    same step (saved then, if there was none yet). What is due at the last batch of an epoch is saved when the epoch is
    over, so that its validation, and what schedules and early stopping made of it, are in the checkpoint.

    Args:
        settings: of the option.
        run_dir: folder of the run.
    """

    def __init__(self, settings: DCP, run_dir: str) -> None:
        super().__init__()
        self.settings = settings
        self.folder = files.folder_of(run_dir)
        self.best_model_path = ""
        """Path of the best checkpoint so far; the newest one without `monitor`. Lightning's `ckpt_path="best"`."""
        self.best_model_score: float | None = None
        self._saved_step = 0
        self._here = False
        self._source: str | None = None
        self._at_last_batch = False
        self._due = False
        self._measured: float | None = None

    @property
    def _on(self) -> bool:
        return self.settings.save_top_k != 0

    def save(self, trainer: Trainer) -> str:
        """Save now, unless this step is saved already; returns the path. Collective."""
        path = self.folder / files.step_name(trainer.global_step)
        if self._saved_step == trainer.global_step and self._here:
            return str(path)
        trainer.save_checkpoint(path)
        self._saved_step, self._here = trainer.global_step, True
        self._tidy(trainer, None)
        return str(path)

    # -- when ------------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the step that the run starts at as saved, if perhaps in another run's folder."""
        self._saved_step = trainer.global_step
        self._here = trainer.strategy.broadcast((self.folder / files.step_name(trainer.global_step)).is_dir())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save every `every_n_steps`."""
        self._at_last_batch = lightning_private.at_last_batch(trainer)
        every, step = self.settings.every_n_steps, trainer.global_step
        if not self._on or not every or step % every or step == self._saved_step:
            return
        self._save_when_over(trainer)
        self._score(trainer, "train")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score this step's weights with what validation measured."""
        if self._on and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._score(trainer, "validation")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score with a metric that is known once an epoch."""
        if not self._on:
            return
        self._score(trainer, "epoch")
        if self.settings.monitor and self._source is None and trainer.global_step > 0:
            raise UsageError(
                f"checkpoint.monitor={self.settings.monitor}: nothing of that name was logged in the first epoch; there"
                f" is {', '.join(sorted(trainer.callback_metrics)) or 'no metric at all'}"
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what was due at the end of the epoch before."""
        self._end_epoch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the final state, also when training was asked to stop."""
        self._end_epoch(trainer)
        if self._on and trainer.global_step != self._saved_step:
            self.save(trainer)

    def _save_when_over(self, trainer: Trainer, score: float | None = None) -> None:
        """Save this step now, or at the end of an epoch when that is over."""
        if self._at_last_batch:
            self._due = True
            self._measured = self._measured if score is None else score
            return
        self.save(trainer)
        if score is not None:
            self._tidy(trainer, score)

    def _end_epoch(self, trainer: Trainer) -> None:
        due, measured = self._due, self._measured
        self._at_last_batch, self._due, self._measured = False, False, None
        if due:
            self._save_when_over(trainer, measured)

    # -- which -----------------------------------------------------------------------------------------------------
    def _score(self, trainer: Trainer, moment: str) -> None:
        """Note the metric's value for this step's checkpoint.

        The first moment at which the metric is there tells where it comes from; at other moments its value is an old
        one.
        """
        monitor = self.settings.monitor
        if monitor is None or trainer.global_step == 0 or self._source not in (None, moment):
            return
        value = trainer.callback_metrics.get(monitor)
        if value is None:
            return
        self._source = moment
        self._save_when_over(trainer, float(value))

    def _tidy(self, trainer: Trainer, score: float | None) -> None:
        """Write the score and the link, delete what needn't be kept. Collective."""
        path = self.folder / files.step_name(trainer.global_step)
        start = Path(trainer.ckpt_path).resolve() if trainer.ckpt_path else None

        def act() -> tuple[str, float | None]:
            if ranks()[0] != 0:
                return "", None
            if score is not None:
                files.write_json(path / files.SCORE, {"monitor": self.settings.monitor, "value": repr(score)})
            if self.settings.save_last == "link":
                files.link_last(path)
            marks, damaged = files.marks(self.folder)
            for error in damaged:
                log.warning("Left alone: %s", error)
            best = self._best(marks)
            # A score of this step may be still to come: the newest are kept in any case.
            kept = {mark.path for mark in (*best, *marks[-self.settings.keep :])} | {path}
            if self.settings.save_top_k != -1:
                for mark in marks:
                    if mark.path not in kept and mark.path.resolve() != start:
                        files.remove(mark.path)
            if best:
                return str(best[0].path), best[0].score
            return str(path), None

        best = together(f"Tidying {self.folder}", act, CheckpointError)
        self.best_model_path, self.best_model_score = trainer.strategy.broadcast(best)

    def _best(self, marks: list[Mark]) -> list[Mark]:
        """Return the best `save_top_k` scored checkpoints, best first; of equal ones the older."""
        worst = math.inf if self.settings.mode == "min" else -math.inf
        sign = 1 if self.settings.mode == "min" else -1
        scored = [
            (sign * (worst if math.isnan(mark.score) else mark.score), mark) for mark in marks if mark.score is not None
        ]
        ordered = [mark for _, mark in sorted(scored, key=lambda pair: pair[0])]
        return ordered[: self.settings.save_top_k] if self.settings.save_top_k > 0 else ordered

    # -- what goes along -------------------------------------------------------------------------------------------
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse hyper-parameters that no checkpoint can hold now, and not at the first save."""
        for owner in (pl_module, getattr(trainer, "datamodule", None)):
            if owner is not None and self._on:
                encode(dict(owner.hparams), {}, "meta.hyper_parameters")

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Say how a changed schedule was resolved: the restore that follows takes the checkpoint's."""
        if ranks()[0] != 0:
            return
        saved = checkpoint.get("lr_schedulers", [])
        for number, (config, state) in enumerate(zip(trainer.lr_scheduler_configs, saved, strict=False)):
            now = config.scheduler.state_dict()
            for change in schedule_changes(state, now, f"{type(config.scheduler).__name__} {number}"):
                log.warning("The resumed schedule keeps its saved setting: %s", change)
