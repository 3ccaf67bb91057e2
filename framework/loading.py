"""What loaders of all kinds share: where in the run they are, their position, and random numbers while they read."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer as LightningTrainer
from torch.utils.data import DataLoader

from framework import counter
from framework.adapters import lightning_private
from framework.errors import UsageError
from framework.plan import RunPlan
from framework.randomness import random_numbers, set_states, states

END = object()
"""What `next` returns at the end."""


@dataclass(frozen=True)
class Where:
    """What a loader needs to know of the run."""

    trainer: LightningTrainer
    plan: RunPlan
    data_rank: int
    train: bool


@dataclass
class _Base:
    """Where the running iteration began: its position, and the counts of the trainer then."""

    epoch: int
    consumed: int
    steps: int


class Position:
    """The position of a training loader, as a state machine that Lightning's order of calls can't confuse.

    Lightning makes the first iterator before it tells the epoch, sometimes makes it twice, and restores loaders only in
    some cases; so the position is worked out when an iterator is made, from what was restored and from the trainer.
    """

    def __init__(self, where: Where) -> None:
        self.where = where
        self.before_begin: Callable[[], None] | None = None
        """Called before an iterator is made: the counts of the one before are still those."""
        self.restored: tuple[int, int] | None = None
        self.base = _Base(0, 0, 0)
        self.begun = False

    def begin(self, usable: float) -> tuple[int, int]:
        """An iterator is being made: return the epoch and the samples consumed where it starts."""
        if self.before_begin is not None:
            self.before_begin()
        trainer = self.where.trainer
        done, epoch = lightning_private.completed_steps(trainer), lightning_private.finished_epochs(trainer)
        if self.restored is not None and done != self.base.steps:
            self.restored = None  # a step was made since: the restored position is history
        position = (epoch, 0) if self.restored is None else self.restored
        if position[1] >= usable:
            position = (position[0] + 1, 0)
        self.base = _Base(*position, done)
        self.begun = True
        return position

    def restore(self, epoch: int, consumed: int) -> None:
        """Start the next iterator here."""
        self.restored = (epoch, consumed)
        self.base = _Base(epoch, consumed, lightning_private.completed_steps(self.where.trainer))

    @property
    def steps(self) -> int:
        """Optimizer steps since the iterator was made."""
        return lightning_private.completed_steps(self.where.trainer) - self.base.steps


def check(state: Mapping[str, Any], key: str, now: Any, fix: str) -> None:
    """UsageError if a saved position belongs to another order of samples; `fix` says what to type."""
    if state[key] != now:
        raise UsageError(
            f"The checkpoint was saved {state['consumed']} samples into epoch {state['epoch']} with {key} "
            f"{state[key]}, but this run has {key} {now}, so that epoch can't be gone on with: {fix}."
        )


def settings_of(user: DataLoader[Any]) -> dict[str, Any]:
    """Return what a rebuilt loader takes over."""
    return {
        "dataset": user.dataset,
        "num_workers": user.num_workers,
        "collate_fn": user.collate_fn,
        "pin_memory": user.pin_memory,
        "pin_memory_device": user.pin_memory_device,
        "timeout": user.timeout,
        "worker_init_fn": _WorkerInit(user.worker_init_fn),
        "multiprocessing_context": user.multiprocessing_context,
        "prefetch_factor": user.prefetch_factor,
        "persistent_workers": user.persistent_workers,
        "in_order": user.in_order,
    }


class _WorkerInit:
    """The user's `worker_init_fn`. Torch seeds workers from the loader's generator, which `_iterate` sets.

    Where a loader has none, Lightning puts in its own, which seeds by global rank: ranks that differ only on tp or pp
    would then change the same sample in different ways.
    """

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self.user = user

    def __call__(self, worker: int) -> None:
        if self.user is not None:
            self.user(worker)


def iterate(loader: DataLoader[Any], where: Where, epoch: int, *, shared: bool = False) -> Iterator[Any]:
    """Make an iterator whose random numbers don't depend on what else the process has drawn.

    Args:
        loader: whose workers are to be seeded.
        where: in the run.
        epoch: of training; evaluation always draws as in epoch 0.
        shared: all data ranks draw the same (a stream that is shuffled must be shuffled alike before it is shared out).
    """
    key = (where.plan.seed, "train" if where.train else "evaluation", epoch, -1 if shared else where.data_rank)
    loader.generator = torch.Generator().manual_seed(counter.derive("workers", *key) >> 1)
    if loader.num_workers > 0:
        return iter(loader)
    if shared:
        return _continued(loader.__iter__, counter.derive("stream", *key))
    return iter(loader) if where.train else _aside(iter(loader))  # each training step seeds its own


def _aside(rows: Iterator[Any]) -> Generator[Any, None, None]:
    """Yield batches that are read in this process, and leave its random numbers as they are."""
    while True:
        kept = states()
        try:
            row = next(rows, END)
        finally:
            set_states(kept)
        if row is END:
            return
        yield row


def _continued(make: Callable[[], Iterator[Any]], key: int) -> Generator[Any, None, None]:
    """Yield batches of a stream, read under random numbers that go on from batch to batch.

    A stream that shuffles itself draws in the order of its samples; where a batch ends differs from rank to rank.
    """
    with random_numbers(key):
        rows = make()
        kept = states()
    while True:
        with random_numbers(key):
            set_states(kept)
            row = next(rows, END)
            kept = states()
        if row is END:
            return
        yield row
