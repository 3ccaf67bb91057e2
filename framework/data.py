"""Which rank reads which samples, and where a resumed run goes on: loaders between the user's and Lightning.

A user writes a plain `DataLoader`; here it is rebuilt with the batches of this data rank. How an epoch is cut is said
by a `BatchPlan` (hook `make_sampler`); this module holds what is common to all of them: the position.

The position of a run is `(epoch, consumed)`: samples of that epoch that *completed optimizer steps* have used, over all
ranks. It doesn't count what was fetched ahead, is the same on all ranks, and has a meaning under any other mix.
It travels in the checkpoint through Lightning's own protocol for stateful loaders.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, runtime_checkable

import torch
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from framework import counter
from framework.adapters import lightning_private
from framework.errors import UsageError
from framework.ledger.chain import Stretch
from framework.ledger.numbering import NumberedStream, Tray
from framework.loaders import Loader
from framework.loading import Where
from framework.plan import RunPlan
from framework.randomness import random_numbers
from framework.streams import StreamLoader

if TYPE_CHECKING:
    from pluggy import PluginManager

log = logging.getLogger(__name__)

DROP_LAST = (
    "drop_last=True of the training loader isn't read, since ranks make each batch together: type "
    "sampler.drop_last=true to leave out samples that don't fill a global batch."
)

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

    def place(self, batch: int) -> int | None:
        """Return the number of the batch's first sample among those of its optimizer step, over all ranks.

        None = steps are full, and their samples go to accumulation steps and in these to data ranks, in order.
        """
        return None

    def whole(self) -> int:
        """Return the number of the first batch that isn't of a whole optimizer step.

        Those before are full, and the samples of each step have the same places: the ledger asks about all at once. 0 =
        nobody knows, and it asks about each.
        """
        return 0

    @abstractmethod
    def consumed(self, steps: int) -> int:
        """Return how many samples of this epoch are consumed `steps` completed optimizer steps after the position."""

    def packed(self, batch: int) -> bytes:
        """Return `indices` as int64 in bytes, which the ledger keeps."""
        return array("q", self.indices(batch)).tobytes()

    def origin(self, batch: int) -> int:
        """Return a number from which the random numbers of the batch's samples follow: its first sample's.

        Where it is the place in the epoch over all ranks, samples are augmented alike under every mix.
        """
        return self.indices(batch)[0]

    def fingerprint(self) -> str:
        """Return what tells the order of this epoch from others that `how`, seed and size fit as well; "" = nothing."""
        return ""

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches from the position on; the position is read now, not at the first batch."""
        return map(self.indices, range(self.first(), len(self)))


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
        self.tray = Tray()
        """Of the training loader; one that stays empty where samples have no numbers."""
        batch = plan.batch
        self._cut = (batch.local_batch_size, batch.data_ranks, batch.accumulation)

    def process(self, loader: object, trainer: LightningTrainer) -> object:
        """Return `loader` with the batches of this data rank; called by Lightning for each loader of each stage.

        Raises:
            UsageError: the loader can't be shared out, or contradicts the plan.
        """
        stage = trainer.state.stage
        if stage == RunningStage.PREDICTING or isinstance(loader, (Loader, StreamLoader)):
            return loader
        where = Where(trainer, self.plan, self.data_rank, stage == RunningStage.TRAINING)
        kind = "training" if where.train else "validation" if stage != RunningStage.TESTING else "test"
        if not isinstance(loader, DataLoader) or not _is_plain(loader):
            if self.plan.mesh.data_ranks == 1:
                return self._foreign(loader, where) if where.train else loader
            raise UsageError(
                f"The {kind} loader is a {type(loader).__name__}, which can't be shared out over "
                f"{self.plan.mesh.data_ranks} data ranks: return a torch.utils.data.DataLoader."
            )
        if not loader.in_order and (where.train or self.plan.mesh.data_ranks > 1):
            raise UsageError(
                f"The {kind} loader has in_order=False, so how fast its workers are would decide which samples make a "
                "step, and a resumed run would repeat some and leave others out: leave in_order out."
            )
        stream = isinstance(loader.dataset, IterableDataset)
        ours = self._stream(loader, where, kind) if stream else self._map(loader, where, kind)
        if where.train and isinstance(ours, (Loader, StreamLoader)):
            if self.training is not None and not self.training.begun:
                raise UsageError(
                    "There are several training loaders, but an optimizer step is made of the samples of one: join the "
                    "datasets (torch.utils.data.ConcatDataset, StackDataset)."
                )
            self.training, self.tray = ours, ours.tray
        return ours

    def _foreign(self, loader: Any, where: Where) -> Any:
        """Return a training loader that isn't torch's as it is, if that can be right."""
        name, ours = type(loader).__name__, self.plan.batch.local_batch_size
        theirs = getattr(loader, "batch_size", None)
        if isinstance(theirs, int) and theirs != ours:
            raise UsageError(
                f"The training loader is a {name}, so it is used as it is, and its batch_size is {theirs}, not the "
                f"{ours} samples that {_arithmetic(self.plan)} gives: type global_batch_size="
                f"{self._global_batch(theirs)}."
            )
        if not isinstance(loader, _Stateful) and lightning_private.goes_on_within_an_epoch(where.trainer):
            raise UsageError(
                f"The training loader is a {name}, which can't go on in the middle of an epoch, where the checkpoint "
                "was saved: return a torch.utils.data.DataLoader, or give it state_dict and load_state_dict."
            )
        return loader

    def _map(self, user: DataLoader[Any], where: Where, kind: str) -> DataLoader[Any]:
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
            if where.train and user.drop_last and batches.usable % self.plan.batch.global_batch_size:
                log.warning(DROP_LAST)
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

    def _stream(self, user: DataLoader[Any], where: Where, kind: str) -> StreamLoader:
        stream = NumberedStream(user.dataset, (self.plan.seed, "train" if where.train else "evaluation"))
        dataset = self.manager.hook.shard_iterable(
            dataset=stream, plan=self.plan, data_rank=self.data_rank, train=where.train
        )
        if dataset is None:
            if self.plan.mesh.data_ranks > 1:
                raise UsageError(
                    f"Nobody shares the {kind} stream out over {self.plan.mesh.data_ranks} data ranks: type "
                    "sampler=consistent."
                )
            dataset = stream
        if where.train and user.drop_last and not getattr(dataset, "whole_steps", False):
            log.warning(DROP_LAST)
        # None: the dataset itself yields batches
        batch_size = None if user.batch_size is None else self._batch_size(user, where, kind)
        return StreamLoader(user, dataset, batch_size, where, stream)

    def _batch_size(self, user: DataLoader[Any], where: Where, kind: str) -> int:
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

    def placed(self, steps: Sequence[Sequence[tuple[bytes, int]]]) -> list[Stretch]:
        """Return what a tray gave for each of these steps, fillers left out; before the loader's next iteration."""
        found, at = [], 0
        while at < len(steps):
            whole = self._whole(steps, at)
            one = [row for row in steps[at] if whole or (self.training is not None and self.training.real(row[1]))]
            rows = chain.from_iterable(steps[at : at + whole]) if whole else one
            places = tuple(self._places(len(own) // 8, batch) for own, batch in one)
            found.append(Stretch(whole or 1, places, b"".join([own for own, _ in rows])))
            at += whole or 1
        return found

    def _whole(self, steps: Sequence[Sequence[tuple[bytes, int]]], at: int) -> int:
        """Return how many steps from `at` on are whole, made of full batches of which one follows on the other."""
        size, _, accumulation = self._cut
        if self.training is None or not steps[at] or (batch := steps[at][0][1]) % accumulation:
            return 0
        length = 8 * (1 if self._counts_batches else size)
        count = min(len(steps) - at, (self.training.whole(batch) - batch) // accumulation)
        while count > 0:
            some = steps[at : at + count]
            sizes, numbers = zip(*chain.from_iterable(some), strict=True)
            if (
                {accumulation} == set(map(len, some))
                and {length} == set(map(len, sizes))
                and numbers == tuple(range(batch, batch + len(numbers)))
            ):
                return count
            count //= 2
        return 0

    @property
    def _counts_batches(self) -> bool:
        """Whether what is counted are a stream's batches, not samples."""
        return isinstance(self.training, StreamLoader) and self.training.own_batches

    def _places(self, count: int, batch: int) -> range:
        """Return the places in their step of what is counted of training batch `batch`, `count` of it."""
        if self._counts_batches:
            _, ranks, accumulation = self._cut
            at = batch % accumulation * ranks + self.data_rank
            return range(at, at + 1)
        return self.numbers(batch)[:count]

    def numbers(self, batch: int) -> range:
        """Return the numbers, among the samples of their optimizer step, of the samples of training batch `batch`."""
        size, ranks, accumulation = self._cut
        before = batch % accumulation * size * ranks
        if isinstance(self.training, StreamLoader):  # every n-th sample is this rank's
            return range(before + self.data_rank, before + size * ranks, ranks)
        place = None if self.training is None else self.training.batches.place(batch)
        start = before + self.data_rank * size if place is None else place
        return range(start, start + size)

    def real(self, trainer: LightningTrainer, batch: int, loader: int = 0) -> int:
        """Return how many samples of batch number `batch` of the running stage count; 1 if nobody knows.

        0 = a filler, only there for its collectives.
        """
        if trainer.state.stage == RunningStage.TRAINING:
            return 1 if self.training is None else self.training.real(batch)
        loaders, sequential = lightning_private.evaluation_loaders(trainer)
        if not sequential:
            if self.plan.mesh.data_ranks > 1:
                raise UsageError(
                    "The loaders of this evaluation are read side by side (CombinedLoader), so samples can't be "
                    f"counted once over {self.plan.mesh.data_ranks} data ranks: return a list of them, or type "
                    'mode="sequential".'
                )
            return 1
        chosen = loaders[loader]
        return chosen.real(batch) if isinstance(chosen, (Loader, StreamLoader)) else 1


@runtime_checkable
class _Stateful(Protocol):
    """A loader whose position Lightning saves."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether a loader does nothing but torch's: torchdata's can keep a position besides, for which ours stands in."""
    return type(loader).__iter__.__module__ in (
        DataLoader.__module__,
        "torchdata.stateful_dataloader.stateful_dataloader",
    )


def _is_random(sampler: Any) -> bool:
    """Whether it is torch's `RandomSampler` or torchdata's, and no subclass, which may have an order of its own."""
    kind = type(sampler)
    theirs = (kind.__module__, kind.__name__) == ("torchdata.stateful_dataloader.sampler", "RandomSampler")
    return kind is RandomSampler or theirs


def _order_of(user: DataLoader[Any], seed: int, kind: str) -> tuple[Order | None, bool]:
    """Return the order that a user's sampler asks for (None = that of the plan's) and whether it is shuffled."""
    sampler = user.sampler
    if user.batch_size is None:
        return None, False  # refused later, with words
    if type(sampler) is SequentialSampler:  # a subclass may have an order of its own
        return None, False
    if _is_random(sampler) and not sampler.replacement and sampler.num_samples == len(user.dataset):  # type: ignore[arg-type, attr-defined]
        return None, True
    if isinstance(sampler, DistributedSampler):
        raise UsageError(
            f"The {kind} loader has a DistributedSampler, but samples are shared out over the data axes already: "
            "leave the sampler out and pass shuffle=True."
        )

    def order(epoch: int) -> Sequence[int]:
        key = counter.derive("order", seed, epoch)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(key >> 1)
        with random_numbers(key):  # the same on all ranks
            found = list(sampler)
        if odd := next((index for index in found if not isinstance(index, SupportsIndex)), None):
            raise UsageError(
                f"The sampler of the {kind} loader gives {odd!r}, but samples are told apart by their numbers, 0 to "
                f"{len(user.dataset) - 1}: let it give whole numbers."  # type: ignore[arg-type]
            )
        return [int(index) for index in found]

    return order, False


def _arithmetic(plan: RunPlan) -> str:
    batch = plan.batch
    return (
        f"global_batch_size={batch.global_batch_size} over {batch.data_ranks} data ranks and {batch.accumulation} "
        "batches an optimizer step"
    )
