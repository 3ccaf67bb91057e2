"""Numbers of samples that travel with a batch: put on where a sample is read, taken off where it is trained.

A sample's number is its index in a map-style dataset, and in a stream how many samples the stream yielded before it.

Every worker of every rank reads a stream whole, under the same random numbers, and takes what is its own. So neither
the number of ranks nor that of workers says what a batch holds. (torch gives each worker a copy of the stream: one that
doesn't look for workers comes as often as there are any, and one that does is cut in another way by each number.)
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from framework import counter
from framework.adapters import torch_private
from framework.randomness import random_numbers, seed

if TYPE_CHECKING:
    from framework.data import BatchPlan


class Numbered(NamedTuple):
    """A batch and its samples' numbers: int64 in bytes, which workers send, and pinning leaves, as they are."""

    numbers: bytes
    batch: Any


class Packed:
    """The batches of a `BatchPlan` as arrays.

    Args:
        batches: the plan; its position is read when an iteration begins.
    """

    def __init__(self, batches: BatchPlan) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[array[int]]:
        return map(self.batches.packed, range(self.batches.first(), len(self.batches)))


class Together(NamedTuple):
    """What a dataset's `__getitems__` returned (samples, or whatever its `collate_fn` takes), with numbers."""

    numbers: array[int]
    samples: Any


class _Around:
    """What stands around a user's dataset: other attributes are read from and written to the dataset."""

    dataset: Any

    def __init__(self, dataset: Any, **own: Any) -> None:
        self.__dict__.update(own, dataset=dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # unpickling asks before there is a dataset
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value) if name not in self.__dict__ else self.__dict__.update({name: value})


class NumberedSamples(_Around, Dataset[Any]):
    """A map-style dataset whose batches come with the indices of their samples."""

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: array[int]) -> Together:
        """Return the samples of one batch; torch's fetcher does the same where there is no such method."""
        together = getattr(self.dataset, "__getitems__", None)
        return Together(indices, together(list(indices)) if together else [self.dataset[index] for index in indices])

    def __len__(self) -> int:
        return len(self.dataset)


class NumberedStream(_Around, IterableDataset[Any]):
    """A stream whose samples come as (number, sample), drawn under random numbers that follow from seed and epoch.

    Args:
        dataset: the user's.
        key: seed of the run and kind of loader.

    Attributes:
        epoch: that the next iteration is of; written by the loader into memory that workers share, as some live on.
    """

    key: tuple[int, str]
    epoch: Tensor

    def __init__(self, dataset: Any, key: tuple[int, str]) -> None:
        epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        super().__init__(dataset, key=key, epoch=epoch)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        if torch_private.take_worker() is not None:  # in the main process the loader sees to it
            seed(counter.derive("stream", *self.key, int(self.epoch), -1))
        return zip(count(), self.dataset, strict=False)


class Blocks(_Around, IterableDataset[Any]):
    """The batches of one worker: of n workers, every n-th `size` samples of what its rank reads."""

    size: int

    def __init__(self, dataset: Any, size: int) -> None:
        super().__init__(dataset, size=size)

    def __iter__(self) -> Iterator[Any]:
        worker, workers = torch_private.take_worker() or (0, 1)
        return (row for number, row in enumerate(self.dataset) if number // self.size % workers == worker)


class Collate:
    """The user's `collate_fn` over samples with numbers.

    Args:
        user: the function.
        key: of random numbers for it, with the first sample's number; None = those of the process.
    """

    def __init__(self, user: Callable[[Any], Any], key: tuple[int, str] | None = None) -> None:
        self.user = user
        self.key = key

    def __call__(self, rows: Together | list[tuple[int, Any]]) -> Numbered:
        if not isinstance(rows, Together):
            rows = Together(array("q", [row[0] for row in rows]), [row[1] for row in rows])
        if self.key is None:
            return Numbered(rows.numbers.tobytes(), self.user(rows.samples))
        with random_numbers(counter.derive("collate", *self.key, rows.numbers[0])):
            return Numbered(rows.numbers.tobytes(), self.user(rows.samples))


class Tray:
    """The batches that a loader has given and nobody has trained yet, each with its numbers.

    Attributes:
        waited_s: how long training has waited for batches of this loader, seconds.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._waiting: deque[Numbered] = deque()
        self._last: Numbered | None = None

    def unpack(self, rows: Iterator[Numbered]) -> Iterator[Any]:
        """Yield the batches of a new iteration as the user knows them."""
        self._waiting.clear()
        while True:
            since = time.perf_counter()
            row = next(rows, None)
            self.waited_s += time.perf_counter() - since
            if row is None:
                return
            self._waiting.append(row)
            yield row.batch

    def claim(self, batch: Any) -> bytes:
        """Return the numbers of the batch that is about to be trained; empty if there are none.

        By identity, so that a batch that got lost on the way, or came twice, takes its own numbers with it. A batch
        that a hook or a precision made anew is the one that waited longest.
        """
        waiting = self._waiting
        if not waiting or waiting[0].batch is not batch:
            if self._last is not None and batch is self._last.batch:
                return self._last.numbers
            if any(row.batch is batch for row in waiting):
                while waiting[0].batch is not batch:
                    waiting.popleft()
            if not waiting:
                return b""
        self._last = last = waiting.popleft()
        return last.numbers
