"""The loaders that stand in for a user's: the same data, this rank's batches, a position, random numbers by batch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer as LightningTrainer
from torch.utils.data import DataLoader, IterableDataset, Sampler

from framework import counter
from framework.adapters import lightning_private
from framework.errors import UsageError
from framework.ledger.numbering import Asked, Blocks, Collate, NumberedSamples, NumberedStream, Tray
from framework.plan import RunPlan
from framework.randomness import random_numbers, set_states, states
from framework.window import batch_size

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
        numbered = {"dataset": NumberedSamples(user.dataset), "collate_fn": Collate(user.collate_fn)}
        self._reader: Any = DataLoader(batch_sampler=_Asking(batches, where), **_settings(user) | numbered)

    def __iter__(self) -> Any:
        """Start at the position; random numbers of workers and of this process are seeded by it."""
        if self._where.train:
            self.batches.position = self.position.begin(self.batches.usable)
            lightning_private.expect_batches(self._where.trainer, len(self.batches))
        _same_on_all_ranks(self.batches)
        rows = _iterate(self._reader, self._where, self.batches.position[0])
        return self.tray.unpack(rows) if self.numbered else (row.batch for row in rows)

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
            "fingerprint": self.batches.fingerprint(),
            "global_batch_size": self._where.plan.batch.global_batch_size,
            "batches": _batches_before(self.batches, consumed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position, whatever mix saved it, and tell Lightning where in the epoch that is.

        Raises:
            UsageError: the dataset has another size, or the seed is another one: the order of samples would differ.
        """
        _check(state, "order", self.batches.how, "leave loader and sampler.shuffle as they were")
        _check(state, "size", self.batches.size, "use the same data")
        _check(state, "seed", self.batches.seed, f"type seed={state['seed']}")
        self.position.restore(state["epoch"], state["consumed"])
        self.batches.position = (state["epoch"], state["consumed"])
        if state.get("fingerprint", now := self.batches.fingerprint()) != now:
            raise UsageError(
                f"The loader's sampler gives another order for epoch {state['epoch']} than in the run that saved, "
                f"{state['consumed']} samples into it: use the same sampler with the same settings, and let it draw "
                "with torch's, NumPy's or Python's random numbers, which follow from seed and epoch, or by set_epoch."
            )
        lightning_private.move_to_batch(
            self._where.trainer,
            saved=state["batches"],
            now=_batches_before(self.batches, state["consumed"]),
            length=len(self.batches),
        )


def _check(state: Mapping[str, Any], key: str, now: Any, fix: str) -> None:
    """UsageError if a saved position belongs to another order of samples; `fix` says what to type."""
    if state[key] != now:
        raise UsageError(
            f"The checkpoint was saved {state['consumed']} samples into epoch {state['epoch']} with {key} "
            f"{state[key]}, but this run has {key} {now}, so that epoch can't be gone on with: {fix}."
        )


class _Asking(Sampler[Any]):
    """The batches of a `BatchPlan`, with what the random numbers of their samples follow from."""

    def __init__(self, batches: BatchPlan, where: Where) -> None:
        self.batches = batches
        self._key = ("sample", where.plan.seed, "train" if where.train else "evaluation")

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        batches, key = self.batches, counter.derive(*self._key, self.batches.position[0])
        numbers = range(batches.first(), len(batches))  # the position is read now
        return (Asked(key, batches.origin(number), batches.packed(number)) for number in numbers)


def _same_on_all_ranks(batches: BatchPlan) -> None:
    """UsageError on all ranks if their datasets have different sizes, or a user's sampler different orders."""
    mine = (f"{batches.size} samples", batches.how, batches.fingerprint())
    for rank, theirs in enumerate(everyones := _gathered(mine)):
        if theirs != everyones[0]:
            what = f"{theirs[0]}, and {everyones[0][0]} on rank 0" if theirs[0] != everyones[0][0] else "another order"
            raise UsageError(
                f"The data of rank {rank} has {what}: give all ranks the same dataset and sampler, which the framework "
                "shares out; what a sampler draws with torch's, NumPy's or Python's random numbers is alike."
            )


def _gathered(mine: Any) -> list[Any]:
    """Return what each rank has; collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


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

    Ranks may have different numbers of batches; before each batch they agree whether to go on. An epoch ends when the
    last rank has run out, so that the same samples are read under every mix: a rank that has nothing left runs a
    filler, which doesn't count. With a pipeline, which takes batches of one size only, it ends when the first rank has
    no whole batch left, and with sampler.drop_last=true when no whole optimizer step is left.

    A resumed run reads and drops what was consumed: exact, but it takes the time of reading.

    Args:
        user: what the user built.
        dataset: its samples that this rank reads.
        batch_size: of one rank; None = the dataset yields batches, and one of these is what is counted.
        where: in the run.
        stream: what `dataset` is made of.
    """

    def __init__(
        self,
        user: DataLoader[Any],
        dataset: IterableDataset[Any],
        batch_size: int | None,
        where: Where,
        stream: NumberedStream,
    ) -> None:
        settings, batch = _settings(user), where.plan.batch
        whole_steps = where.train and getattr(dataset, "whole_steps", False)
        self._drop = where.train and (whole_steps or where.plan.mesh.pp > 1)
        self._ahead = batch.accumulation if whole_steps else 1
        drop_last = batch_size is not None and (self._drop or where.plan.mesh.pp > 1)
        super().__init__(batch_size=batch_size, drop_last=drop_last, **settings)
        settings["collate_fn"] = Collate(user.collate_fn, stream, batch_size is None)
        settings["dataset"] = Blocks(dataset, batch_size or 1)
        self._reader: DataLoader[Any] = DataLoader(batch_size=batch_size, drop_last=drop_last, **settings)
        self._stream = stream
        self.own_batches = batch_size is None
        self.numbered = where.train
        self.tray = Tray()
        self._where = where
        self.position = _Position(where)
        self._real: list[int] = []
        self._step = batch.accumulation * batch.data_ranks * (1 if self.own_batches else batch.local_batch_size)

    def __len__(self) -> int:
        """There is none (TypeError): what ranks agree on while reading decides."""
        raise TypeError("A stream has no length")

    def __iter__(self) -> Any:
        """Start at the position."""
        epoch, consumed = self.position.begin(float("inf")) if self._where.train else (0, 0)
        self._real = [1] * self._batches(consumed)
        self._stream.begin(epoch, consumed)
        rows = self._in_step(_iterate(self._reader, self._where, epoch, shared=True), consumed)
        return self.tray.unpack(rows) if self.numbered else (row.batch for row in rows)

    def _batches(self, consumed: int) -> int:
        """Return how many batches of a rank lie before a position; one inside of a step counts as the step's start."""
        return consumed // self._step * self._where.plan.batch.accumulation

    def _in_step(self, rows: Iterator[Any], consumed: int) -> Generator[Any, None, None]:
        several = self._where.plan.world_size > 1
        agree: Callable[..., bool] = self._where.trainer.strategy.reduce_boolean_decision if several else _alone
        last: Any = None
        first = True
        while True:
            ready = list(islice(rows, self._ahead))
            have = len(ready) == self._ahead
            if first:
                self._check_first(ready[0] if ready else None)
            if not agree(have, all=True):
                if self._drop or not agree(have, all=False):
                    break
                if agree(not ready and last is None, all=False):  # a rank has had nothing yet that it could run
                    last = next(row for row in _gathered(ready[0] if ready else last) if row is not None)
            for row in ready or [last]:
                last = row
                self._real.append(0 if not ready else 1 if self.own_batches else len(row.numbers) // 8)
                yield row
            first = False
        if first and not consumed and self._where.train:
            plan = self._where.plan
            raise UsageError(
                f"The training stream has too few samples for an optimizer step of {plan.world_size} ranks "
                f"({plan.batch.data_ranks} data ranks) at global_batch_size={plan.batch.global_batch_size}."
            )

    def _check_first(self, row: Any) -> None:
        """All ranks read the same stream, and it makes batches of the plan's size."""
        firsts = _gathered(int(self._stream.first))
        if other := next((rank for rank, first in enumerate(firsts) if first != firsts[0]), None):
            raise UsageError(
                f"The stream begins with another sample on rank {other} than on rank 0, but the framework shares it "
                "out: let every rank yield all of it, in the same order (random numbers of torch, NumPy and Python are "
                "alike on all ranks)."
            )
        plan, size = self._where.plan, 0 if row is None or not self.own_batches else batch_size(row.batch, 0)
        if self._where.train and size not in (0, plan.batch.local_batch_size):
            raise UsageError(
                f"The training stream yields batches of {size} samples, but global_batch_size="
                f"{plan.batch.global_batch_size} over {plan.batch.data_ranks} data ranks and {plan.batch.accumulation} "
                f"batches an optimizer step makes them {plan.batch.local_batch_size}: type global_batch_size="
                f"{size * plan.batch.data_ranks * plan.batch.accumulation}."
            )

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
        return base.epoch, base.consumed + (step - 1 - base.steps) * self._step

    def real(self, batch: int) -> int:
        """Return how many samples of batch number `batch` count, 1 if nobody knows; 0 = it is a filler."""
        return self._real[batch]

    def state_dict(self) -> dict[str, Any]:
        """Return the position; the same on all ranks."""
        consumed = self.position.base.consumed + self.position.steps * self._step
        return {
            "epoch": self.position.base.epoch,
            "consumed": consumed,
            "seed": self._where.plan.seed,
            "order": self._how,
            "batches": self._batches(consumed),
            "epoch_done": lightning_private.at_last_batch(self._where.trainer),
        }

    @property
    def _how(self) -> str:
        return "stream of batches" if self.own_batches else "stream"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position, whatever mix saved it, and tell Lightning where in the epoch that is.

        Raises:
            UsageError: it was no stream, or was read under another seed.
        """
        _check({"order": "stream", **state}, "order", self._how, "use the same kind of loader")
        _check(state, "seed", self._where.plan.seed, f"type seed={state['seed']}")
        if state["epoch_done"]:
            self.position.restore(state["epoch"] + 1, 0)
            return
        self.position.restore(state["epoch"], state["consumed"])
        now = self._batches(state["consumed"])
        lightning_private.move_to_batch(self._where.trainer, saved=state["batches"], now=now, length=None)


def _alone(decision: bool, all: bool) -> bool:
    """What one rank agrees on with itself."""
    return decision


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


def _iterate(loader: DataLoader[Any], where: Where, epoch: int, *, shared: bool = False) -> Iterator[Any]:
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
            row = next(rows, _END)
        finally:
            set_states(kept)
        if row is _END:
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
            row = next(rows, _END)
            kept = states()
        if row is _END:
            return
        yield row
