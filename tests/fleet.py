"""Many ranks of a run in one process, without a model: loaders, agreement, ledger and checkpoints, and nothing else.

A schedule of kills and resizes takes milliseconds here. What ranks exchange (the sum of hashes) is exchanged by hand;
the rest is the framework's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.trainer.states import RunningStage
from plans import make_plan, option

from framework.data import Loaders
from framework.ledger.writer import Ledger
from framework.plugin_manager import manager_for


class FakeTrainer:
    """What the loaders ask of Lightning's Trainer."""

    def __init__(self, stage: RunningStage = RunningStage.TRAINING, buffers: int = 0) -> None:
        self.state = SimpleNamespace(stage=stage, fn="fit")
        self.global_step = 0
        self.ckpt_path: str | None = None
        self.limit_train_batches = 1.0
        module = torch.nn.Module()
        module.automatic_optimization = True  # type: ignore[assignment]
        for index in range(buffers):
            module.register_buffer(f"b{index}", torch.zeros(1))
        self.lightning_module = module
        progress = SimpleNamespace(ready=0, started=0, processed=0, completed=0)
        batch = SimpleNamespace(current=progress, total=SimpleNamespace(**vars(progress)), is_last_batch=False)
        self.fit_loop = SimpleNamespace(
            _combined_loader=None,
            epoch_progress=SimpleNamespace(current=SimpleNamespace(processed=0)),
            epoch_loop=SimpleNamespace(batch_progress=batch),
        )


@dataclass
class State:
    """A checkpoint: the state of the loader and of the ledger, and where Lightning's loops stood."""

    step: int
    epoch: int
    loader: dict[str, Any]
    ledger: str | None


class Rank:
    """One data rank."""

    def __init__(self, plan: Any, data_rank: int, loader: Any, state: State | None) -> None:
        self.trainer: Any = FakeTrainer()
        self.trainer.global_rank = data_rank
        self.loaders = Loaders(plan, manager_for(plan), data_rank)
        self.trainer.strategy = SimpleNamespace(loaders=self.loaders, reduce_boolean_decision=lambda have, all: have)
        self.loader = self.loaders.process(loader, self.trainer)
        self.ledger = Ledger(plan)
        self.ledger.settle = lambda: None  # type: ignore[method-assign]  # the fleet settles for all ranks at once
        if state is not None:
            self.trainer.global_step = state.step
            self.trainer.ckpt_path = "some/checkpoints/step"
            ended = state.loader.get("epoch_done", state.loader["consumed"] >= state.loader.get("size", 1e9))
            # Lightning ends a restored epoch that has no batches left before it makes a batch
            self.trainer.fit_loop.epoch_progress.current.processed = state.epoch + ended
            self.loader.load_state_dict(state.loader)
            self.ledger.chain = state.ledger
        self.begin()
        self.ledger.start(self.trainer)

    def begin(self) -> None:
        """Start an iteration; batches are numbered from the position, as Lightning numbers them."""
        self.rows = iter(self.loader)
        first = self.loader.batches.first() if hasattr(self.loader, "batches") else len(self.loader._real)
        self.numbers = count(first)
        self.ahead = next(self.rows, None)
        self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = self.ahead is None

    def fetch(self) -> Any:
        """Return the next batch, None after the last; one is fetched ahead, as Lightning does to know the last."""
        row, self.ahead = self.ahead, next(self.rows, None)
        self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = self.ahead is None
        return row


class Fleet:
    """An attempt of a run on some data ranks.

    Args:
        run_dir: of the run.
        make_loader: what the user's DataLoader is; called on each rank.
        ranks: data ranks.
        accumulation: micro-steps of an optimizer step.
        global_batch: samples of an optimizer step.
        state: to go on from.
        run_id: of this launch.
    """

    def __init__(
        self, run_dir: Path, make_loader: Callable[[], Any], ranks: int, accumulation: int = 1, global_batch: int = 8,
        state: State | None = None, run_id: str = "run",
    ) -> None:  # fmt: skip
        self.plan = make_plan(
            ranks, strategy="ddp" if ranks > 1 else None, accumulation=accumulation,
            micro_batch_size=global_batch // ranks // accumulation, run_dir=str(run_dir),
            components={"sampler": option("sampler", "consistent")},
        ).with_(run_id=run_id)  # fmt: skip
        self.ranks = [Rank(self.plan, rank, make_loader(), state) for rank in range(ranks)]

    def step(self, meddle: Callable[[list[Any]], list[Any]] = list) -> bool:
        """Make one optimizer step; False if the epoch is over, and the next one begins.

        Args:
            meddle: what becomes of the ranks' batches between loader and training.
        """
        for _ in range(self.plan.batch.accumulation):
            rows = [rank.fetch() for rank in self.ranks]
            if any(row is None for row in rows):
                break
            for rank, row in zip(self.ranks, meddle(rows), strict=True):
                rank.loaders.tray.claim(row)
                rank.loaders.tray.begin(next(rank.numbers))
        else:
            return self._end()
        if any(rank.loaders.tray._trained for rank in self.ranks):
            return self._end()  # the last step of an epoch, smaller than others
        for rank in self.ranks:
            rank.trainer.fit_loop.epoch_progress.current.processed += 1
            rank.begin()
        return False

    def _end(self) -> bool:
        for rank in self.ranks:
            rank.trainer.global_step += 1
            rank.ledger.batch_end(rank.trainer.global_step)
        return True

    def save(self) -> State:
        """Return a checkpoint."""
        first = self.ranks[0]
        self.settle()
        states = [(rank.loader.state_dict(), rank.ledger.chain) for rank in self.ranks]
        assert all(state == states[0] for state in states), "every rank has the same"
        epoch = first.trainer.fit_loop.epoch_progress.current.processed
        return State(first.trainer.global_step, epoch, *states[0])

    def settle(self) -> None:
        """What ranks do together every now and then."""
        sums = [sum(parts) for parts in zip(*(rank.ledger.shares() for rank in self.ranks), strict=True)]
        for rank in self.ranks:
            rank.ledger.close_steps(sums)

    def kill(self) -> None:
        """End the attempt at once: what isn't written is lost."""
        for rank in self.ranks:
            rank.ledger.close()
