"""`Checkpoints`: when to save, whether to wait for it, and which checkpoints to keep. Rank 0 decides, others follow.

What is kept is read from the directories themselves (commit marks and score files), not from a memory that a crash
would lose: the newest `keep`, the best `save_top_k` by the monitored metric, and the one that the run started from.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from framework import checkpoint_files as files
from framework.adapters import lightning_private
from framework.agreement import gather, ranks, together
from framework.checkpoint_files import CheckpointError, Mark
from framework.encoding import encode
from framework.errors import UsageError
from framework.plan import RunPlan
from framework.schedule_changes import schedule_changes
from framework_plugins.checkpoint import memory, remote
from framework_plugins.checkpoint.copier import Remote
from framework_plugins.checkpoint.dcp import DCP
from framework_plugins.checkpoint.pace import Pace
from framework_plugins.checkpoint.peers import Peers
from framework_plugins.checkpoint.store import ShardedStore

log = logging.getLogger(__name__)


POLL_S = 0.2
"""How often the ranks ask rank 0 whether it has copied all, at the end."""


class Checkpoints(Checkpoint):
    """Saves every `every_n_steps` optimizer steps, when the monitored metric is new, and at the end of training.

    A score belongs to the weights it was measured with: one that validation gives is added to the checkpoint of the
    same step (saved then, if there was none yet). What is due at the last batch of an epoch is saved when the epoch is
    over, so that its validation, and what schedules and early stopping made of it, are in the checkpoint.

    Args:
        settings: of the option.
        plan: of the run.

    Attributes:
        store: the strategy's, that saves; there from `on_fit_start` on.
    """

    store: ShardedStore

    def __init__(self, settings: DCP, plan: RunPlan) -> None:
        super().__init__()
        self.settings = settings
        self.folder = files.folder_of(plan.run_dir)
        self._plan = plan
        self._run_dir = plan.run_dir
        self._peers: Peers | None = None
        self._whole = Path()
        """The last checkpoint in memory that is whole with the peers; it is kept until a newer one is."""
        self._remote: Remote | None = None
        self._fetched: set[Path] = set()
        """Copies from far away that were there when training began: nobody loads them any more."""
        self._memory: Path | None = None
        """Folder of the checkpoints in memory, while there are to be any."""
        self._remembered_step = 0
        self.best_model_path = ""
        """Path of the best checkpoint so far; the newest one without `monitor`. Lightning's `ckpt_path="best"`."""
        self.best_model_score: float | None = None
        self._paces = (Pace(), Pace())
        """Of saves on disk and of those in memory, copies to peers included."""
        self._flying = self._paces[0]
        self._saved_step = self._begun_step = 0
        self._here = False
        self._source: str | None = None
        self._old: Any = None
        """The metric as the run found it in its checkpoint: it says nothing of these weights."""
        self._at_last_batch = False
        self._due = False
        self._measured: float | None = None
        self._start: Path | None = None
        self._scores: dict[Path, float | None] = {}
        """Checkpoints of this callback's own on their way, with their scores as far as they are known."""
        self._last = False
        self._best_now: tuple[str, float | None] = ("", None)

    @property
    def _on(self) -> bool:
        return self.settings.save_top_k != 0

    def save(self, trainer: Trainer, score: float | None = None) -> str:
        """Save now, unless this step is saved already; returns the path, complete after `store.wait()`. Collective.

        Args:
            trainer: that runs.
            score: value of the monitored metric for this step's weights; None = not known (yet).
        """
        path = self.folder / files.step_name(trainer.global_step)
        if self._saved_step == trainer.global_step and self._here:
            if score is None:
                return str(path)
            self.settle(trainer)  # the score is known later than the checkpoint
            if self._here:
                together(f"Tidying {self.folder}", lambda: self._tidy(path, score), CheckpointError)
                return str(path)
        self.settle(trainer)  # what it says of the save before mustn't be taken for this one's
        self._scores[path] = score
        self._saved_step, self._here = trainer.global_step, True
        self._save(trainer, path)
        return str(path)

    def save_now(self, trainer: Trainer) -> str:
        """Save this step and wait for it: what is called when a run is to stop. Collective.

        Raises:
            CheckpointError: it can't be saved, whatever `on_failure` says: nothing comes after it.
        """
        self.settle(trainer)
        self._last = True
        path = self.save(trainer)
        self.settle(trainer)
        return path

    def _pace_of(self, path: Path) -> Pace:
        return self._paces[path.parent == self._memory]

    def _save(self, trainer: Trainer, path: Path) -> None:
        """Save to `path`, or go on without if that is asked for; nothing is in flight. Collective."""
        if self.settings.mode == "auto":
            self.store.background = trainer.strategy.broadcast(self._pace_of(path).background)
        self._flying = self._pace_of(path)
        for pace in self._paces:
            pace.begin()
        self.store.holds = trainer.lightning_module.automatic_optimization  # else users step when they like
        try:
            trainer.save_checkpoint(path)
        except CheckpointError as error:
            self._failed(error)
            return
        finally:
            self.store.holds = False
        if not self.store.background:
            self.settle(trainer)

    def settle(self, trainer: Trainer) -> None:
        """Wait until all is saved, and learn from rank 0 which is best. Collective.

        Raises:
            CheckpointError: on all ranks, if the save in flight failed, unless `on_failure` says to go on.
        """
        strategy: Any = trainer.strategy
        try:
            strategy.state.wait()
        except CheckpointError as error:
            self._failed(error)
        if self.store.last is not None:
            self._pace_of(self.store.last.path).end(self.store.last, self.store.background)
        self.best_model_path, self.best_model_score = trainer.strategy.broadcast(self._best_now)

    def _failed(self, error: CheckpointError) -> None:
        if self.settings.on_failure == "end" or self._last:
            raise error
        self._here = False  # the next one is tried, at the same step too
        if ranks()[0] == 0:
            log.warning("%s Training goes on, as checkpoint.on_failure=go_on.", error)

    # -- when ------------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the step that the run starts at as saved, if perhaps in another run's folder."""
        self._old = trainer.callback_metrics.get(self.settings.monitor or "")
        self._saved_step = self._begun_step = trainer.global_step
        self._here = trainer.strategy.broadcast((self.folder / files.step_name(trainer.global_step)).is_dir())
        self._start = Path(trainer.ckpt_path).resolve() if trainer.ckpt_path else None
        self._fetched = remote.copies(self._run_dir) if ranks()[0] == 0 else set()
        if self.settings.memory_every_n_steps:
            made = together("Making room in memory", self._make_memory, CheckpointError)
            name, stale = trainer.strategy.broadcast(made)
            root = Path(name)
            together("Making room in memory", lambda: self._make_room(root, stale), CheckpointError)
            self.store.apart = self._memory = files.folder_of(root)
            if self.settings.peers:
                self._find_peers(root)
        if self.settings.remote is not None:
            try:
                self._remote = together("Opening checkpoint.remote", self._open_remote, CheckpointError)
            except CheckpointError as error:
                self._failed(error)
        self.store.on_commit = self._committed

    def _find_peers(self, root: Path) -> None:
        name, host = root.name.removeprefix("framework-"), ranks()[0] // self._plan.local_world_size
        found = together(
            "Looking for peers",
            lambda: Peers(self.settings.peers, name, self.settings.memory_dir, host),
            CheckpointError,
        )
        self._peers = found
        alone = gather(not found.others)
        if any(alone):
            raise CheckpointError(
                f"checkpoint.peers={self.settings.peers} has no keeper on another host than that of rank"
                f" {alone.index(True)}: a copy there would be gone with the host"
            )
        self.store.copy = self._copy

    def _copy(self, path: Path, group: Any) -> None:
        if path.parent != self._memory or self._peers is None:
            return
        if self._peers.send(path, group):
            self._whole = path
        if ranks()[0] % self._plan.local_world_size == 0:
            self._keep_in_memory({path, self._whole})

    def _open_remote(self) -> Remote | None:
        of = self.settings
        if ranks()[0] != 0 or of.remote is None:
            return None
        return Remote(of.remote, of.remote_keep, self._plan, of.save_top_k, of.monitor_mode)

    def _make_memory(self) -> tuple[str, bool]:
        """Return, on rank 0, the folder in memory, and whether it is older than where this attempt begins."""
        if ranks()[0] != 0:
            return "", False
        root = memory.make(self._run_dir, self.settings.memory_dir)
        return str(root), self._start is None or root.resolve() not in self._start.parents

    def _make_room(self, root: Path, stale: bool) -> None:
        if ranks()[0] % self._plan.local_world_size == 0:
            if stale:
                memory.forget(root)
            memory.make_room(root)

    def _committed(self, path: Path) -> None:
        if path in self._scores:
            self._tidy(path, self._scores.pop(path))
            if self._remote is not None:
                self._remote.send(path)
            remote.forget(self._fetched)  # this run has one of its own now
            self._fetched = set()
        elif path.parent == self._memory and self._peers is None:  # and not another callback's
            self._keep_in_memory({path})

    def _keep_in_memory(self, kept: set[Path]) -> None:
        assert self._memory is not None
        for other in self._memory.glob("step-*"):  # whole or not: each host has its own part
            if other not in kept:
                files.remove(other)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save every `every_n_steps`."""
        self._at_last_batch = lightning_private.at_last_batch(trainer)
        saving = self.store.saving
        for pace in self._paces:
            if saving and pace is not self._flying:
                pace.begin()  # such a step is neither alone nor beside a save of this pace
            else:
                pace.step(saving)
        every, step = self.settings.every_n_steps, trainer.global_step
        if not self._on or step == self._saved_step:
            return
        if not every or step % every:
            often = self.settings.memory_every_n_steps
            last = step == trainer.max_steps or self._at_last_batch  # that one is saved on disk
            if often and self._memory is not None and not step % often and step != self._remembered_step and not last:
                self._remembered_step = step
                self.settle(trainer)
                self._save(trainer, self._memory / files.step_name(step))
            return
        self._save_when_over(trainer, self._value(trainer, "train"))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Hold the step until what it changes is copied."""
        self.store.hold()

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
        self.settle(trainer)
        step = trainer.global_step
        if self._on and (step != self._saved_step or (not self._here and step != self._begun_step)):
            self.save_now(trainer)
        self._finish_remote()
        if self._memory is not None:  # what is on disk is newer
            memory.forget(self._memory.parent)
        if ranks()[0] == 0:
            if self._peers is not None:
                self._peers.drop()
            memory.clear(self._run_dir, self.settings.memory_dir)

    def _finish_remote(self) -> None:
        """Wait until all is copied; no rank waits in a collective, which would have a time limit, for that."""
        if self.settings.remote is None:
            return
        while not all(gather(self._remote is None or self._remote.idle)):
            time.sleep(POLL_S)
        if self._remote is not None:
            self._remote.close()

    def _save_when_over(self, trainer: Trainer, score: float | None = None) -> None:
        """Save this step now, or at the end of an epoch when that is over."""
        if self._at_last_batch:
            self._due = True
            self._measured = self._measured if score is None else score
            return
        self.save(trainer, score)

    def _end_epoch(self, trainer: Trainer) -> None:
        due, measured = self._due, self._measured
        self._at_last_batch, self._due, self._measured = False, False, None
        if due:
            self._save_when_over(trainer, measured)

    # -- which -----------------------------------------------------------------------------------------------------
    def _score(self, trainer: Trainer, moment: str) -> None:
        """Note the metric's value for this step's checkpoint."""
        value = self._value(trainer, moment)
        if value is not None:
            self._save_when_over(trainer, value)

    def _value(self, trainer: Trainer, moment: str) -> float | None:
        """Return the monitored metric's value for this step's weights, None if this isn't when it is known.

        The first moment at which the metric is there tells where it comes from; at other moments its value is an old
        one.
        """
        monitor = self.settings.monitor
        if monitor is None or trainer.global_step == 0 or self._source not in (None, moment):
            return None
        value = trainer.callback_metrics.get(monitor)
        if value is None or (self._source is None and value is self._old):
            return None
        self._source = moment
        return float(value)

    def _tidy(self, path: Path, score: float | None) -> None:
        """On rank 0 write the score and the link, and delete what needn't be kept; `path` is complete."""
        if ranks()[0] != 0:
            return
        if score is not None:
            files.write_score(path, self.settings.monitor, self.settings.monitor_mode, score)
        if self.settings.save_last == "link":
            files.link_last(path)
        marks, damaged = files.marks(self.folder)
        for error in damaged:
            log.warning("Left alone: %s", error)
        best = self._best(marks)
        # A score of this step may be still to come: the newest are kept in any case.
        kept = {mark.path for mark in (*best, *marks[-self.settings.keep :])} | {path}
        if self._remote is not None:
            self._remote.scores([mark for mark in marks if mark.path in kept and mark.score is not None])
            kept |= self._remote.needed
        if self.settings.save_top_k != -1:
            for mark in marks:
                if mark.path not in kept and mark.path.resolve() != self._start:
                    files.remove(mark.path)
        self._best_now = (str(best[0].path), best[0].score) if best else (str(path), None)

    def _best(self, marks: list[Mark]) -> list[Mark]:
        """Return the best `save_top_k` scored checkpoints, best first; of equal ones the older."""
        ordered = files.by_score(marks, self.settings.monitor_mode)
        return ordered[: self.settings.save_top_k] if self.settings.save_top_k > 0 else ordered

    # -- what goes along -------------------------------------------------------------------------------------------
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the store; refuse before the first save what no checkpoint can hold, and a folder that takes none."""
        strategy: Any = trainer.strategy
        self.store = strategy.state.store
        try:
            strategy.state.begin_life()
        except CheckpointError as error:
            self._failed(error)
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
