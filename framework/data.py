"""Which rank reads which samples, and where a resumed run goes on: loaders between the user's and Lightning.

A user writes a plain `DataLoader`; here it is rebuilt with the batches of this data rank. How an epoch is cut is said
by a `BatchPlan` (hook `make_sampler`); this module holds what is common to all of them: the position.

The position of a run is `(epoch, consumed)`: samples of that epoch that *completed optimizer steps* have used, over all
ranks. It doesn't count what was fetched ahead, is the same on all ranks, and has a meaning under any other mix.
It travels in the checkpoint through Lightning's own protocol for stateful loaders.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from framework import counter
from framework.adapters import lightning_private
from framework.errors import UsageError
from framework.plan import RunPlan

if TYPE_CHECKING:
    from pluggy import PluginManager

_END = object()

Order = Callable[[int], Sequence[int]]
"""Epoch -> indices of the dataset in the order in which all ranks together read them."""


class BatchPlan(Sampler[list[int]]):
    """One data rank's batches of a map-style dataset: what the hook `make_sampler` returns.

    All methods but `indices` and `real` give the same on every rank. Batches of an epoch are numbered from 0; Lightning
    counts them like that too, also after a resume.

    Attributes:
        how: the order in words; a run can go on only under the same.
        seed: of the order.
        size: samples an epoch reads from, over all ranks.
        usable: samples an epoch uses; less than `size` where the last, partial step is dropped.
    """

    how: str
    seed: int
    size: int
    usable: int

    def __init__(self) -> None:
        self.position = (0, 0)
        """Epoch and samples consumed where the next iteration starts; set by the loader."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches of this epoch, those before the position included."""

    @abstractmethod
    def first(self) -> int:
        """Return the number of the batch at which an iteration starts: how many batches lie before the position."""

    @abstractmethod
    def indices(self, batch: int) -> list[int]:
        """Return which samples batch number `batch` of this rank holds; never empty."""

    @abstractmethod
    def real(self, batch: int) -> int:
        """Return how many samples of the batch count; 0 = a filler, there to take part in collectives."""

    @abstractmethod
    def consumed(self, steps: int) -> int:
        """Return how many samples of this epoch are consumed `steps` completed optimizer steps after the position."""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches from the position on; the position is read now, not at the first batch."""
        return map(self.indices, range(self.first(), len(self)))


# -- loaders -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Where:
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

    def __init__(self, where: _Where) -> None:
        self.where = where
        self.restored: tuple[int, int] | None = None
        self.base = _Base(0, 0, 0)
        self.begun = False

    def begin(self, usable: float) -> tuple[int, int]:
        """An iterator is being made: return the epoch and the samples consumed where it starts."""
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

    def __init__(self, user: DataLoader[Any], batches: BatchPlan, where: _Where) -> None:
        super().__init__(batch_sampler=batches, **_settings(user))
        self.batches = batches
        self._where = where
        self._position = _Position(where)

    def __iter__(self) -> Any:
        """Start at the position; random numbers of workers and of this process are seeded by it."""
        if self._where.train:
            self.batches.position = self._position.begin(self.batches.usable)
        epoch = self.batches.position[0]
        return _iterate(self, super().__iter__, self._where, epoch=epoch, first=self.batches.first())

    @property
    def begun(self) -> bool:
        """Whether it was iterated."""
        return self._position.begun

    def real(self, batch: int) -> int:
        """Return how many samples of batch number `batch` count."""
        return self.batches.real(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position; the same on all ranks. `batches` lie before it, as Lightning counts them."""
        base, steps = self._position.base, self._position.steps
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
        self._position.restore(state["epoch"], state["consumed"])
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
    """

    def __init__(
        self, user: DataLoader[Any], dataset: IterableDataset[Any], batch_size: int | None, where: _Where
    ) -> None:
        settings = _settings(user) | {"dataset": dataset}
        # a pipeline takes batches of one size only
        super().__init__(batch_size=batch_size, drop_last=batch_size is not None and where.plan.mesh.pp > 1, **settings)
        self._where = where
        self._position = _Position(where)
        self._real: list[bool] = []

    def __len__(self) -> int:
        """There is none (TypeError): what ranks agree on while reading decides."""
        raise TypeError("A stream has no length")

    def __iter__(self) -> Any:
        """Start at the position."""
        epoch, consumed = self._position.begin(float("inf")) if self._where.train else (0, 0)
        batch = self._where.plan.batch
        skip = consumed // (batch.local_batch_size * batch.data_ranks)
        self._real = [True] * skip
        rows = _iterate(self, super().__iter__, self._where, epoch=epoch, first=0, shared=True)
        for _ in range(skip):
            next(rows, _END)
        return self._in_step(rows)

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
        return self._position.begun

    def real(self, batch: int) -> int:
        """Return 1 if batch number `batch` counts, 0 if it is a filler."""
        return int(self._real[batch])

    def state_dict(self) -> dict[str, Any]:
        """Return the position; the same on all ranks."""
        plan = self._where.plan
        consumed = self._position.base.consumed + self._position.steps * plan.batch.global_batch_size
        return {
            "epoch": self._position.base.epoch,
            "consumed": consumed,
            "seed": plan.seed,
            "batches": consumed // (plan.batch.local_batch_size * plan.batch.data_ranks),
            "epoch_done": lightning_private.at_last_batch(self._where.trainer),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position, whatever mix saved it, and tell Lightning where in the epoch that is."""
        if state["epoch_done"]:
            self._position.restore(state["epoch"] + 1, 0)
            return
        self._position.restore(state["epoch"], state["consumed"])
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
    where: _Where,
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
    return _seeded(make(), key, first)


def _seeded(rows: Iterator[Any], key: tuple[int | str, ...], number: int) -> Generator[Any, None, None]:
    """Yield batches that are read under random numbers of their own, in this process.

    Ranks of one data rank read the same batch, whatever else each of them has drawn (dropout, say).
    """
    while True:
        with _random_numbers(counter.derive("batch", *key, number)):
            row = next(rows, _END)
        if row is _END:
            return
        yield row
        number += 1


@contextmanager
def _random_numbers(key: int) -> Generator[None, None, None]:
    """Seed Python's, NumPy's and torch's CPU generators inside, and put them back as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key >> 1)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


# -- from the user's loader to ours ------------------------------------------------------------------------------------
class Loaders:
    """Makes the loaders of a run; one object a rank.

    Args:
        plan: of the run.
        manager: with the sampler's hooks.
        data_rank: which share of each batch this rank reads.
    """

    def __init__(self, plan: RunPlan, manager: PluginManager, data_rank: int) -> None:
        self.plan = plan
        self.manager = manager
        self.data_rank = data_rank
        self.training: Loader | StreamLoader | None = None

    def process(self, loader: object, trainer: LightningTrainer) -> object:
        """Return `loader` with the batches of this data rank; called by Lightning for each loader of each stage.

        Raises:
            UsageError: the loader can't be shared out, or contradicts the plan.
        """
        stage = trainer.state.stage
        if stage == RunningStage.PREDICTING or isinstance(loader, (Loader, StreamLoader)):
            return loader
        where = _Where(trainer, self.plan, self.data_rank, stage == RunningStage.TRAINING)
        kind = "training" if where.train else "validation" if stage != RunningStage.TESTING else "test"
        if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
            if self.plan.mesh.data_ranks == 1:
                return loader
            raise UsageError(
                f"The {kind} loader is a {type(loader).__name__}, which can't be shared out over "
                f"{self.plan.mesh.data_ranks} data ranks: return a torch.utils.data.DataLoader."
            )
        stream = isinstance(loader.dataset, IterableDataset)
        ours = self._stream(loader, where, kind) if stream else self._map(loader, where, kind)
        if where.train and isinstance(ours, (Loader, StreamLoader)):
            if self.training is not None and not self.training.begun:
                raise UsageError(
                    "There are several training loaders, but an optimizer step is made of the samples of one: join the "
                    "datasets (torch.utils.data.ConcatDataset, StackDataset)."
                )
            self.training = ours
        return ours

    def _map(self, user: DataLoader[Any], where: _Where, kind: str) -> DataLoader[Any]:
        order, shuffle = _order_of(user, self.plan.seed, kind)
        batch_size = self._batch_size(user, where, kind)
        balanced = where.train or self._collective_forward(where.trainer)
        batches = self.manager.hook.make_sampler(
            dataset=user.dataset,
            plan=self.plan,
            data_rank=self.data_rank,
            shuffle=shuffle,
            train=where.train,
            batch_size=batch_size,
            balanced=balanced,
            order=order,
        )
        if batches is not None:
            return Loader(user, batches, where)
        if self.plan.mesh.data_ranks > 1:
            raise UsageError(
                f"Nobody shares the {kind} data out over {self.plan.mesh.data_ranks} data ranks: "
                "type sampler=consistent."
            )
        if user.batch_size != batch_size:
            raise UsageError(
                f"Without a sampler the {kind} loader is used as it is, and its batch_size is {user.batch_size}, not "
                f"the {batch_size} samples that {_arithmetic(self.plan)} gives: type sampler=consistent."
            )
        return user

    def _stream(self, user: DataLoader[Any], where: _Where, kind: str) -> StreamLoader:
        dataset: Any = user.dataset
        if self.plan.mesh.data_ranks > 1:
            dataset = self.manager.hook.shard_iterable(dataset=dataset, plan=self.plan, data_rank=self.data_rank)
            if dataset is None:
                raise UsageError(
                    f"Nobody shares the {kind} stream out over {self.plan.mesh.data_ranks} data ranks: type "
                    "sampler=consistent."
                )
        # None: the dataset itself yields batches
        batch_size = None if user.batch_size is None else self._batch_size(user, where, kind)
        return StreamLoader(user, dataset, batch_size, where)

    def _batch_size(self, user: DataLoader[Any], where: _Where, kind: str) -> int:
        """Return the samples of one batch of one rank."""
        ours, theirs = self.plan.batch.local_batch_size, user.batch_size
        if theirs is None:
            if user.batch_sampler is None:
                raise UsageError(
                    f"The {kind} loader has batch_size=None, so its samples aren't put together: leave batch_size out."
                )
            raise UsageError(
                f"The {kind} loader has a batch_sampler of its own ({type(user.batch_sampler).__name__}), but which "
                "samples make a batch follows from global_batch_size: pass shuffle=True or a sampler instead."
            )
        if theirs in (1, ours):
            return ours
        if not where.train:
            return theirs  # it changes no result
        raise UsageError(
            f"The {kind} loader has batch_size={theirs}, but {_arithmetic(self.plan)} gives each rank batches of "
            f"{ours}: leave batch_size out, or type global_batch_size={self._global_batch(theirs)}."
        )

    def _global_batch(self, local: int) -> int:
        batch = self.plan.batch
        return local * batch.data_ranks * batch.accumulation

    def _collective_forward(self, trainer: LightningTrainer) -> bool:
        """Whether a forward in evaluation waits for other data ranks, so that all need the same number of batches."""
        if self.plan.mesh.data_ranks == 1:
            return False
        words = [words for words in self.manager.hook.requirements() if "shards_parameters" in words.gives]
        return bool(words) or any(True for _ in trainer.lightning_module.buffers())  # DDP sends buffers round

    def is_real(self, trainer: LightningTrainer, batch: int, loader: int = 0) -> bool:
        """Whether batch number `batch` of the running stage counts; False: a filler, only there for its collectives."""
        if trainer.state.stage == RunningStage.TRAINING:
            return self.training is None or self.training.real(batch) > 0
        source = trainer.test_dataloaders if trainer.state.stage == RunningStage.TESTING else trainer.val_dataloaders
        loaders = CombinedLoader(source).flattened
        chosen = loaders[loader] if loader < len(loaders) else None
        return not isinstance(chosen, (Loader, StreamLoader)) or chosen.real(batch) > 0


def _order_of(user: DataLoader[Any], seed: int, kind: str) -> tuple[Order | None, bool]:
    """Return the order that a user's sampler asks for (None = that of the plan's) and whether it is shuffled."""
    sampler = user.sampler
    if user.batch_size is None:
        return None, False  # refused later, with words
    if isinstance(sampler, SequentialSampler):
        return None, False
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(user.dataset):  # type: ignore[arg-type]
        return None, True
    if isinstance(sampler, DistributedSampler):
        raise UsageError(
            f"The {kind} loader has a DistributedSampler, but samples are shared out over the data axes already: "
            "leave the sampler out and pass shuffle=True."
        )

    def order(epoch: int) -> Sequence[int]:
        key = counter.derive("order", seed, epoch)
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(key >> 1)
        with _random_numbers(key):  # the same on all ranks
            return [int(index) for index in sampler]

    return order, False


def _arithmetic(plan: RunPlan) -> str:
    batch = plan.batch
    return (
        f"global_batch_size={batch.global_batch_size} over {batch.data_ranks} data ranks and {batch.accumulation} "
        "batches an optimizer step"
    )
