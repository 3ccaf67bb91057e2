"""The loaders that stand in for a user's: the same data, this rank's batches, a position, random numbers by batch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer as LightningTrainer
from torch.utils.data import DataLoader, IterableDataset

from framework import counter
from framework.adapters import lightning_private
from framework.errors import UsageError
from framework.ledger.numbering import Blocks, Collate, NumberedSamples, NumberedStream, Packed, Tray
from framework.plan import RunPlan
from framework.randomness import random_numbers, seed, set_states, states

if TYPE_CHECKING:
    from framework.data import BatchPlan

_END = object()


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


class _Position:
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


class Loader(DataLoader[Any]):
    """The user's loader of a map-style dataset, with this data rank's batches.

    Args:
        user: what the user built; everything but sampler and batch size is taken over.
        batches: of this rank.
        where: in the run.
    """

    def __init__(self, user: DataLoader[Any], batches: BatchPlan, where: Where) -> None:
        super().__init__(batch_sampler=batches, **_settings(user))
        self.batches = batches
        self.numbered = where.train
        self.tray = Tray()
        self._where = where
        self.position = _Position(where)
        # what really reads: users look at `dataset` and `collate_fn` of this loader and find their own
        self._reader: DataLoader[Any] = self
        if where.train:
            packed: Any = Packed(batches)  # torch asks for lists of anything
            numbered = {"dataset": NumberedSamples(user.dataset), "collate_fn": Collate(user.collate_fn)}
            self._reader = DataLoader(batch_sampler=packed, **_settings(user) | numbered)

    def __iter__(self) -> Any:
        """Start at the position; random numbers of workers and of this process are seeded by it."""
        if self._where.train:
            self.batches.position = self.position.begin(self.batches.usable)
            lightning_private.expect_batches(self._where.trainer, len(self.batches))
        make = self._reader.__iter__ if self.numbered else super().__iter__
        rows = _iterate(self._reader, make, self._where, epoch=self.batches.position[0], first=self.batches.first())
        return self.tray.unpack(rows) if self.numbered else rows

    @property
    def begun(self) -> bool:
        """Whether it was iterated."""
        return self.position.begun

    def order(self) -> dict[str, Any]:
        """Return what the order of an epoch follows from."""
        batches = self.batches
        return {"order": batches.how, "seed": batches.seed, "size": batches.size, "usable": batches.usable}

    def began(self, step: int) -> tuple[int, int]:
        """Return the epoch of optimizer step `step`, the last one, and the samples of it consumed before."""
        base = self.position.base
        return base.epoch, self.batches.consumed(step - 1 - base.steps)

    def real(self, batch: int) -> int:
        """Return how many samples of batch number `batch` count."""
        return self.batches.real(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position; the same on all ranks. `batches` lie before it, as Lightning counts them."""
        base, steps = self.position.base, self.position.steps
        consumed = self.batches.consumed(steps)
        return {
            "epoch": base.epoch,
            "consumed": consumed,
            "seed": self.batches.seed,
            "size": self.batches.size,
            "order": self.batches.how,
            "global_batch_size": self._where.plan.batch.global_batch_size,
            "batches": _batches_before(self.batches, consumed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position, whatever mix saved it, and tell Lightning where in the epoch that is.

        Raises:
            UsageError: the dataset has another size, or the seed is another one: the order of samples would differ.
        """
        for key, now, fix in (
            ("size", self.batches.size, "use the same data"),
            ("seed", self.batches.seed, f"type seed={state['seed']}"),
            ("order", self.batches.how, "leave sampler.shuffle as it was"),
        ):
            if state[key] != now:
                raise UsageError(
                    f"The checkpoint was saved {state['consumed']} samples into epoch {state['epoch']} with {key} "
                    f"{state[key]}, but this run has {key} {now}, so that epoch can't be gone on with: {fix}."
                )
        self.position.restore(state["epoch"], state["consumed"])
        self.batches.position = (state["epoch"], state["consumed"])
        lightning_private.move_to_batch(
            self._where.trainer,
            saved=state["batches"],
            now=_batches_before(self.batches, state["consumed"]),
            length=len(self.batches),
        )


def _batches_before(batches: BatchPlan, consumed: int) -> int:
    """Return how many batches of this epoch lie before `consumed` samples."""
    if consumed >= batches.usable:
        return len(batches)
    position, batches.position = batches.position, (batches.position[0], consumed)
    try:
        return batches.first()
    finally:
        batches.position = position


class StreamLoader(DataLoader[Any]):
    """The user's loader of an iterable dataset, with this data rank's samples. Has no length.

    Ranks may have different numbers of batches; before each batch they agree whether to go on. Training ends an epoch
    when the first rank runs out: the others' rest is left out. Evaluation goes on until all have run out: a rank that
    has nothing left repeats its last batch as a filler.

    A resumed run reads and drops what was consumed: exact, but it takes the time of reading.

    Args:
        user: what the user built.
        dataset: its samples that this rank reads.
        batch_size: of one rank; None = the dataset yields batches.
        where: in the run.
        stream: what `dataset` is made of, if samples come with their numbers (`framework.ledger.numbering`).
    """

    def __init__(
        self,
        user: DataLoader[Any],
        dataset: IterableDataset[Any],
        batch_size: int | None,
        where: Where,
        stream: NumberedStream | None = None,
    ) -> None:
        settings = _settings(user)
        # a pipeline takes batches of one size only
        drop_last = batch_size is not None and where.plan.mesh.pp > 1
        super().__init__(batch_size=batch_size, drop_last=drop_last, **settings)
        if stream is not None and batch_size is not None:
            dataset = Blocks(dataset, batch_size)
            settings["collate_fn"] = Collate(user.collate_fn, stream.key)
        settings["dataset"] = dataset
        self._reader: DataLoader[Any] = DataLoader(batch_size=batch_size, drop_last=drop_last, **settings)
        self._stream = stream
        self.numbered = stream is not None and where.train
        self.tray = Tray()
        self._where = where
        self.position = _Position(where)
        self._real: list[bool] = []

    def __len__(self) -> int:
        """There is none (TypeError): what ranks agree on while reading decides."""
        raise TypeError("A stream has no length")

    def __iter__(self) -> Any:
        """Start at the position."""
        epoch, consumed = self.position.begin(float("inf")) if self._where.train else (0, 0)
        batch = self._where.plan.batch
        skip = consumed // (batch.local_batch_size * batch.data_ranks)
        self._real = [True] * skip
        reader = self._reader
        if self._stream is not None:
            self._stream.epoch.fill_(epoch)
        rows = _iterate(reader, reader.__iter__, self._where, epoch=epoch, first=0, shared=True)
        for _ in range(skip):
            next(rows, _END)
        rows = self._in_step(rows)
        if self._stream is None:
            return rows
        return self.tray.unpack(rows) if self.numbered else (row.batch for row in rows)

    def _in_step(self, rows: Iterator[Any]) -> Generator[Any, None, None]:
        agree = self._where.trainer.strategy.reduce_boolean_decision
        alone = self._where.plan.world_size == 1
        last: Any = _END
        while True:
            row = next(rows, _END)
            have = row is not _END
            if not (have if alone else agree(have, all=self._where.train)):
                return
            if not have and last is _END:
                raise UsageError(
                    "The iterable dataset has fewer batches than there are data ranks "
                    f"({self._where.plan.batch.data_ranks}): give it more samples, or use fewer ranks."
                )
            last = row if have else last
            self._real.append(have)
            yield last

    @property
    def begun(self) -> bool:
        """Whether it was iterated."""
        return self.position.begun

    def order(self) -> dict[str, Any]:
        """Return what the order of an epoch follows from."""
        return {"order": "stream", "seed": self._where.plan.seed, "size": None, "usable": None}

    def began(self, step: int) -> tuple[int, int]:
        """Return the epoch of optimizer step `step`, the last one, and the samples of it consumed before."""
        base = self.position.base
        return base.epoch, base.consumed + (step - 1 - base.steps) * self._where.plan.batch.global_batch_size

    def real(self, batch: int) -> int:
        """Return 1 if batch number `batch` counts, 0 if it is a filler."""
        return int(self._real[batch])

    def state_dict(self) -> dict[str, Any]:
        """Return the position; the same on all ranks."""
        plan = self._where.plan
        consumed = self.position.base.consumed + self.position.steps * plan.batch.global_batch_size
        return {
            "epoch": self.position.base.epoch,
            "consumed": consumed,
            "seed": plan.seed,
            "batches": consumed // (plan.batch.local_batch_size * plan.batch.data_ranks),
            "epoch_done": lightning_private.at_last_batch(self._where.trainer),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position, whatever mix saved it, and tell Lightning where in the epoch that is."""
        if state["epoch_done"]:
            self.position.restore(state["epoch"] + 1, 0)
            return
        self.position.restore(state["epoch"], state["consumed"])
        batch = self._where.plan.batch
        now = state["consumed"] // (batch.local_batch_size * batch.data_ranks)
        lightning_private.move_to_batch(self._where.trainer, saved=state["batches"], now=now, length=None)


def _settings(user: DataLoader[Any]) -> dict[str, Any]:
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


def _iterate(
    loader: DataLoader[Any],
    make: Callable[[], Iterator[Any]],
    where: Where,
    *,
    epoch: int,
    first: int,
    shared: bool = False,
) -> Iterator[Any]:
    """Make an iterator whose random numbers depend on (seed, epoch, data rank) and, without workers, on the batch.

    Args:
        loader: whose workers are to be seeded.
        make: its iterator.
        where: in the run.
        epoch: of training; evaluation always draws as in epoch 0.
        first: number of the first batch.
        shared: all data ranks draw the same (a stream that is shuffled must be shuffled alike before it is shared out).
    """
    key = (where.plan.seed, "train" if where.train else "evaluation", epoch, -1 if shared else where.data_rank)
    loader.generator = torch.Generator().manual_seed(counter.derive("workers", *key) >> 1)
    if loader.num_workers > 0:
        return make()
    if shared:
        return _continued(make, counter.derive("stream", *key))
    return _seeded(make(), key, first, seeded if where.train else random_numbers)


def _seeded(
    rows: Iterator[Any], key: tuple[int | str, ...], number: int, around: Callable[[int], AbstractContextManager[None]]
) -> Generator[Any, None, None]:
    """Yield batches of a map-style dataset, each read under random numbers of its own, in this process.

    Ranks of one data rank read the same batch, whatever else each of them has drawn (dropout, say).

    Args:
        rows: the batches.
        key: of the iteration.
        number: of the first batch.
        around: seeds the generators, and may put them back.
    """
    while True:
        with around(counter.derive("batch", *key, number)):
            row = next(rows, _END)
        if row is _END:
            return
        yield row
        number += 1


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
            row = next(rows, _END)
            kept = states()
        if row is _END:
            return
        yield row


def seeded(key: int) -> AbstractContextManager[None]:
    """Seed Python's, NumPy's and torch's CPU generators; enough in training, where each step seeds its own."""
    seed(key)
    return nullcontext()
