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
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from framework import counter
from framework.adapters import torch_private
from framework.randomness import random_numbers, seed

Numbered: TypeAlias = "tuple[bytes, Any]"
"""Numbers of samples, and the batch of them, or what it is collated from.

Numbers are int64 in bytes, which workers send, and pinning leaves, as they are. A plain tuple, of which pinning makes a
list, since two are made for each batch on the path of a step.
"""


class Asked(NamedTuple):
    """A batch to be read.

    Attributes:
        key: of the random numbers that samples of this epoch are drawn with.
        place: number of the first sample among those of the epoch, over all ranks.
        numbers: indices of the samples in the dataset, int64 in bytes.
        probe: place and index of a sample that is read besides, for `NumberedSamples.probed`; None = no other.
    """

    key: int
    place: int
    numbers: bytes
    probe: tuple[int, int] | None = None


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
    """A map-style dataset whose batches come with the indices of their samples.

    Each sample is read under random numbers of its own, which follow from its place in the epoch: neither ranks nor
    workers nor a restart change how it is augmented. A dataset that reads batches (`__getitems__`) is seeded once a
    batch, and what `collate_fn` draws follows from the batch's last sample.

    Attributes:
        shared: memory that workers share: a checksum of the sample that was read as a probe.
    """

    shared: Tensor

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, shared=torch.zeros(1, dtype=torch.int64).share_memory_())  # type: ignore[no-untyped-call]

    @property
    def probed(self) -> int:
        """Checksum of the probe; 0 = there was none, or it is another one each time that it is read."""
        return int(self.shared[0])

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, asked: Asked) -> Numbered:
        """Return the samples of one batch; torch's fetcher does the same where there is no such method.

        What the dataset's own `__getitems__` returned need not be a list: it is whatever its `collate_fn` takes.
        """
        if asked.probe is not None:
            place, index = asked.probe
            alone = asked._replace(place=place, numbers=array("q", [index]).tobytes(), probe=None)
            found = [checksum(self.__getitems__(alone)[1]) for _ in range(2)]
            self.shared[0] = found[0] if found[0] == found[1] else 0
        indices = memoryview(asked.numbers).cast("q")
        if together := getattr(self.dataset, "__getitems__", None):
            seed(counter.at(asked.key, asked.place))
            return asked.numbers, together(list(indices))
        return asked.numbers, [self._read(index, asked, number) for number, index in enumerate(indices)]

    def _read(self, index: Any, asked: Asked, number: int) -> Any:
        seed(counter.at(asked.key, asked.place + number))
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"Sample {index} of {type(self.dataset).__name__} was being read.")
            raise

    def __len__(self) -> int:
        return len(self.dataset)


class NumberedStream(_Around, IterableDataset[Any]):
    """A stream whose samples come as (number, sample), drawn under random numbers that follow from seed and epoch.

    Args:
        dataset: the user's.
        key: seed of the run and kind of loader.

    Attributes:
        shared: memory that workers share, as some live on: the epoch that the next iteration is of, how many samples
            it leaves out, and a checksum of the stream's first sample, written when it was read.
    """

    key: tuple[int, str]
    shared: Tensor

    def __init__(self, dataset: Any, key: tuple[int, str]) -> None:
        shared = torch.zeros(3, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        super().__init__(dataset, key=key, shared=shared)

    def begin(self, epoch: int, consumed: int) -> None:
        """Have the next iteration be of an epoch, and start behind so many of its samples."""
        self.shared.copy_(torch.tensor([epoch, consumed, 0]))

    @property
    def epoch(self) -> int:
        """Of the running iteration."""
        return int(self.shared[0])

    @property
    def first(self) -> int:
        """Checksum of the first sample; 0 = there is none, or it wasn't read yet."""
        return int(self.shared[2])

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        if torch_private.take_worker() is not None:  # in the main process the loader sees to it
            seed(counter.derive("stream", *self.key, self.epoch, -1))
        start, rows = int(self.shared[1]), enumerate(self.dataset)
        first = list(islice(rows, 1))
        if first:
            self.shared[2] = checksum(first[0][1])
        return islice(chain(first, rows), start, None)


def checksum(sample: Any) -> int:
    """Return a number from what a sample holds: values of tensors and arrays, numbers and text; else its types."""
    found = 0
    for leaf in torch_private.tree_leaves(sample):
        value = leaf.numpy(force=True) if isinstance(leaf, Tensor) and leaf.dtype != torch.bfloat16 else leaf
        plain = isinstance(value, (str, bytes, int, float))
        known = value.tobytes() if isinstance(value, np.ndarray) else repr(value if plain else type(value)).encode()
        found = crc32(known, found)
    return found


class Blocks(_Around, IterableDataset[Any]):
    """The batches of one worker: of n workers, every n-th `size` samples of what its rank reads."""

    size: int

    def __init__(self, dataset: Any, size: int) -> None:
        super().__init__(dataset, size=size)

    def __iter__(self) -> Iterator[Any]:
        worker, workers = torch_private.take_worker() or (0, 1)
        return (row for number, row in enumerate(self.dataset) if number // self.size % workers == worker)


class Collate:
    """The user's `collate_fn` over samples with numbers: a `Numbered`, or a stream's pairs.

    Args:
        user: the function.
        stream: random numbers for it follow from its epoch and the first sample's number; None = samples of a map-style
            dataset, and random numbers of the process.
        alone: it gets one pair, not a list of them: the stream yields batches.
    """

    def __init__(self, user: Callable[[Any], Any], stream: NumberedStream | None = None, alone: bool = False) -> None:
        self.user = user
        self.stream = stream
        self.alone = alone

    def __call__(self, rows: Any) -> Numbered:
        if (stream := self.stream) is None:  # on the path of each batch: as little as can be
            return rows[0], self.user(rows[1])
        pairs = [rows] if self.alone else rows
        numbers = array("q", [number for number, _ in pairs])
        with random_numbers(counter.derive("collate", *stream.key, stream.epoch, numbers[0])):
            return numbers.tobytes(), self.user(rows[1] if self.alone else [sample for _, sample in pairs])


class Tray:
    """The batches that a loader has given and nobody has trained yet, each with its numbers, and what was trained.

    Attributes:
        waited_s: how long training has waited for batches of this loader, seconds.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._waiting: deque[Numbered] = deque()
        self._last: Numbered | None = None
        self._claimed: Numbered | None = None
        self._trained: list[tuple[bytes, int]] = []

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
            yield row[1]

    def claim(self, batch: Any) -> None:
        """Take the numbers of a batch that is about to be trained, as the loader gave it.

        By identity, so that a batch that got lost on the way, or came twice, takes its own numbers with it. A batch
        that a hook or a precision made anew is the one that waited longest.
        """
        waiting = self._waiting
        if waiting and waiting[0][1] is batch:
            self._claimed = self._last = waiting.popleft()
        else:
            self._claimed = self._found(batch)

    def _found(self, batch: Any) -> Numbered | None:
        waiting = self._waiting
        if self._last is not None and batch is self._last[1]:
            return self._last
        if any(row[1] is batch for row in waiting):
            while waiting[0][1] is not batch:
                waiting.popleft()
        if waiting:
            self._last = waiting.popleft()
            return self._last
        return None

    def begin(self, number: int) -> None:
        """Note that training batch `number` holds what was claimed."""
        if self._claimed is not None:
            self._trained.append((self._claimed[0], number))

    def take(self) -> list[tuple[bytes, int]]:
        """Return the samples trained since the last call, by micro-step: their numbers (int64), and the batch's."""
        trained, self._trained = self._trained, []
        return trained
