"""`StateKeeper`: what the strategy knows about state; from Lightning's checkpoint dict to the store and back."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from framework import versions
from framework.adapters import lightning_private
from framework.agreement import gather, ranks, together
from framework.checkpoint import (
    CHANGED,
    CheckpointStore,
    load_checkpoint,
    load_module_state,
    save_checkpoint,
)
from framework.checkpoint_files import CheckpointError, DamagedError, mark_damaged
from framework.going_on import Trained
from framework.plan import FILE, Checkpoint
from framework.state import module_state, optimizer_state

if TYPE_CHECKING:
    from framework.strategy import MeshStrategy

log = logging.getLogger(__name__)


class StateKeeper:
    """The part of the strategy that knows about state; one a process, made when the model has its final layout.

    Args:
        strategy: gives plan, hooks and optimizers.
        module: the user's, after surgery.
    """

    def __init__(self, strategy: MeshStrategy, module: LightningModule) -> None:
        self.strategy = strategy
        self.module = module
        self._store: CheckpointStore | None = None
        self._untold: tuple[str, int] | None = None
        self.trained: Trained | None = None
        """What of it was changed since the run began; None = nobody looks (an engine of its own)."""
        self._life = 0
        """Which life of the run this is; rank 0 knows it."""
        self._begun = module.trainer.state.fn != "fit" or strategy.plan.chosen("checkpoint") is None

    @property
    def store(self) -> CheckpointStore:
        """The chosen store; CheckpointError if `checkpoint=none`."""
        if self._store is None:
            self._store = self.strategy.manager.hook.make_checkpoint_io(plan=self.strategy.plan)
        if self._store is None:
            raise CheckpointError("Nothing can be saved or loaded with checkpoint=none: type checkpoint=dcp")
        return self._store

    def begin_life(self) -> None:
        """Note on disk which life of the run this is, if that isn't done: before any state carries it. Collective.

        Raises:
            CheckpointError: on all ranks, if it can't be written; the next call tries again.
        """
        if self._begun:
            return
        run_dir = self.strategy.plan.run_dir

        def begin() -> None:
            if ranks()[0] == 0:
                self._life = self._life or versions.next_life(run_dir)
                versions.begin(run_dir, self._life)

        together(f"Noting in {run_dir}/{versions.LIVES} that the run begins", begin, CheckpointError)
        self._begun = True

    def module_state(self) -> dict[str, Any]:
        """Lightning's `state_dict`: every name of this rank -> its tensor (nothing is copied)."""
        state = module_state(self.module)
        return {**state.detached(), **state.extra}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """One entry of Lightning's `optimizer_states`."""
        return optimizer_state(self.module, optimizer)

    def save(self, checkpoint: dict[str, Any], path: str | PathLike[str]) -> None:
        """Write a checkpoint and tell the plugins. Collective."""
        self.wait()
        self.begin_life()
        if self.trained is not None and checkpoint.get("optimizer_states"):
            checkpoint[CHANGED] = self.trained.changes()
        save_checkpoint(self.store, checkpoint, str(path), self.strategy.plan.mesh, self._life)
        self._untold = (str(path), int(checkpoint["global_step"]))
        if not getattr(self.store, "saving", False):
            self.wait()

    def load(self, path: str | PathLike[str]) -> dict[str, Any]:
        """Fill the module, and in `fit` the optimizers. Collective. Returns Lightning's dict.

        A damaged checkpoint that nobody asked for by its name is marked, and the newest before it taken.

        Raises:
            CheckpointError: it can't be loaded; or it is damaged, and so is every one before it.
        """
        self.wait()
        fitting = self.module.trainer.state.fn == "fit"
        if fitting:
            lightning_private.resume_cleanly(self.module.trainer)
        tried: set[Path] = set()
        while True:
            try:
                return self.read(str(path), fitting)
            except DamagedError as damage:
                tried.add(Path(path))
                if not self.strategy.plan.fall_back:
                    raise
                path = self._before(Path(path), damage)
                if Path(path) in tried:  # it couldn't be marked
                    raise
                lightning_private.resume_from(self.module.trainer, path)

    def read(self, path: str, fitting: bool) -> dict[str, Any]:
        """Fill the module, and if `fitting` the optimizers, from one checkpoint. Collective."""
        began = time.perf_counter()
        if fitting and self.trained is not None:
            meta = together(f"Loading {path}", lambda: self.store.read_meta(path), CheckpointError)
            names = [[group["names"] for group in optimizer["groups"]] for optimizer in meta["optimizers"]]
            self.trained.again(meta.get(CHANGED, {"requires_grad": {}, "added": []}), names)
        loaded = load_checkpoint(
            self.store,
            path,
            self.module,
            self.strategy.optimizers if fitting else None,
            mesh=self.strategy.plan.mesh,
            strict=self.module.strict_loading,
            averaging=bool(self.strategy.averages),
        )
        if ranks()[0] == 0:
            log.info("%s was loaded in %.2f s, every hash checked.", path, time.perf_counter() - began)
        return loaded

    def _before(self, path: Path, damage: DamagedError) -> str:
        """Mark a damaged checkpoint and return the newest one that is left. Collective.

        On each host one rank looks: in its memory there may be others than in that of its neighbour.
        """
        speaks = ranks()[0] % self.strategy.plan.local_world_size == 0

        def mark() -> None:
            if speaks:
                mark_damaged(path, str(damage))

        def choose() -> str:
            if not speaks:
                return ""
            plan, run = self.strategy.plan, path.resolve().parents[1]
            if (run / FILE).is_file():  # perhaps another run's
                plan = plan.with_(run_dir=str(run))
            left: Checkpoint | None = self.strategy.manager.hook.newest_complete(plan=plan)
            if left is None:
                raise CheckpointError(f"{damage}; there is no other checkpoint in {plan.run_dir}.")
            return left.path

        together(f"Loading {path}", mark, CheckpointError)  # all hosts have marked it before any looks
        found = {one for one in gather(together(f"Loading {path}", choose, CheckpointError)) if one}
        if len(found) > 1:
            raise CheckpointError(f"{damage}; hosts find different ones instead: {', '.join(sorted(found))}")
        (chosen,) = found
        if ranks()[0] == 0:
            log.warning("%s. Marked as damaged; this run goes on from %s instead.", damage, chosen)
        return str(chosen)

    def put_back(self, checkpoint: Mapping[str, Any]) -> None:
        """Take over tensors that the user's `on_load_checkpoint` put into the loaded `state_dict`."""
        load_module_state(self.module, checkpoint["state_dict"])

    def wait(self) -> None:
        """Return when everything saved is durable; tell the plugins what is complete now. Collective."""
        untold, self._untold = self._untold, None  # a save that failed is told to nobody
        wait = getattr(self._store, "wait", None)  # stores that are done when `save` returns need none
        if wait is not None:
            wait()
        if untold is not None and ranks()[0] == 0:
            self.strategy.manager.hook.on_checkpoint_saved(path=untold[0], step=untold[1])

    def remove(self, path: str | PathLike[str]) -> None:
        """Delete a checkpoint on rank 0; the others wait. What is to take its place is durable before."""
        self.wait()
        together(f"Removing {path}", lambda: self.store.remove(str(path)) if ranks()[0] == 0 else None, CheckpointError)
