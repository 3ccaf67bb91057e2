"""The batches of one data rank, and its share of a stream."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

from torch.utils.data import IterableDataset

from framework import UsageError
from framework.data import BatchPlan

OWN = "own sampler"
"""The order of a user's sampler, in words."""


def split(samples: int, batch_size: int, ranks: int) -> list[tuple[int, int]]:
    """Cut the samples of one step into batches, in the order accumulation step, then rank: (start, stop) of each.

    A full step gives `batch_size` samples to each; a smaller one takes as few accumulation steps as it can and spreads
    its samples evenly, so that batches differ by one sample at most. The last ones are empty if there are fewer samples
    than ranks.
    """
    if samples == 0:
        return []
    rounds = -(-samples // (batch_size * ranks))
    each, more = divmod(samples, rounds * ranks)
    starts = [number * each + min(number, more) for number in range(rounds * ranks + 1)]
    return list(pairwise(starts))


class ConsistentBatches(BatchPlan):
    """See `consistent.py` for the layout.

    Args:
        order: epoch -> indices; the same on all ranks.
        how: the order in words; a run can go on only under the same.
        seed: of the order.
        size: samples of an epoch.
        step: samples of an optimizer step over all ranks (in evaluation: of a batch over all ranks).
        batch_size: samples of a batch of one rank.
        data_ranks: ranks that share the samples.
        data_rank: this one.
        drop_last: leave out the samples that don't fill a step.
        balanced: give each rank the same number of batches, with fillers; False: a rank may have one batch less, and
            has a filler only if it would have none at all.
    """

    def __init__(
        self,
        *,
        order: Callable[[int], Sequence[int]],
        how: str,
        seed: int,
        size: int,
        step: int,
        batch_size: int,
        data_ranks: int,
        data_rank: int,
        drop_last: bool = False,
        balanced: bool = True,
    ) -> None:
        super().__init__()
        self.order, self.how, self.seed = order, how, seed
        self.size, self.step, self.batch_size = size, step, batch_size
        self.data_ranks, self.data_rank = data_ranks, data_rank
        self.usable = size - size % step if drop_last else size
        self.balanced = balanced
        self._per_step = step // (batch_size * data_ranks)
        self._known: tuple[int, Sequence[int]] | None = None
        self._asked: tuple[int, tuple[int, int]] | None = None
        self._answer = (0, 0, 0)

    def first(self) -> int:
        """See `BatchPlan`. A position inside a step (another global batch saved there) counts as the step's start.

        Counted so, an epoch that was begun under another global batch never has more batches than a whole one.
        """
        return self.position[1] // self.step * self._per_step

    def __len__(self) -> int:
        steps, rest = divmod(self._left, self.step)
        length = (
            self.first()
            + steps * self._per_step
            + len(split(rest, self.batch_size, self.data_ranks)[:: self.data_ranks])
        )
        if not self.balanced and length > 1 and self.real(length - 1) == 0:
            length -= 1
        return length

    @property
    def _left(self) -> int:
        """Samples from the position to the end of the epoch."""
        return max(0, self.usable - self.position[1])

    def _bounds(self, batch: int) -> tuple[int, int, int]:
        """Return where in the epoch's order the step of a batch starts, and where the batch starts and stops."""
        if self._asked == (batch, self.position):  # each batch is asked about several times in a row
            return self._answer
        step, at = divmod(batch - self.first(), self._per_step)
        start = self.position[1] + step * self.step
        samples, number = self.usable - start, at * self.data_ranks + self.data_rank
        if samples >= self.step:
            low, high = number * self.batch_size, (number + 1) * self.batch_size
        else:
            low, high = split(samples, self.batch_size, self.data_ranks)[number]
        self._asked, self._answer = (batch, self.position), (start, start + low, start + high)
        return self._answer

    def indices(self, batch: int) -> list[int]:
        """See `BatchPlan`. A filler is the first sample of its step."""
        return list(self._samples(batch))

    def packed(self, batch: int) -> bytes:
        """See `BatchPlan`."""
        samples = self._samples(batch)
        return (samples if isinstance(samples, array) else array("q", samples)).tobytes()

    def _samples(self, batch: int) -> Sequence[int]:
        order = self._order()
        start, low, high = self._bounds(batch)
        return order[low:high] if high > low else order[start : start + 1]

    def _order(self) -> Sequence[int]:
        """Return the order of the epoch that the position is in; UsageError if it has another length than epoch 0."""
        epoch = self.position[0]
        if self._known is None or self._known[0] != epoch:
            self._known = (epoch, self.order(epoch))
            if len(self._known[1]) != self.size:
                raise UsageError(
                    f"The sampler gives {len(self._known[1])} samples in epoch {epoch} and {self.size} in epoch 0, but "
                    "positions and schedules need epochs of one length: give it the same number in each."
                )
        return self._known[1]

    def origin(self, batch: int) -> int:
        """See `BatchPlan`: the place in the epoch's order."""
        _, low, _ = self._bounds(batch)
        return low

    def fingerprint(self) -> str:
        """See `BatchPlan`: a hash of what the user's own sampler gave."""
        if self.how != OWN:
            return ""
        return hashlib.sha256(array("q", self._order()).tobytes()).hexdigest()[:32]

    def real(self, batch: int) -> int:
        """See `BatchPlan`."""
        _, low, high = self._bounds(batch)
        return high - low

    def whole(self) -> int:
        """See `BatchPlan`."""
        return self.first() + self._left // self.step * self._per_step

    def place(self, batch: int) -> int:
        """See `BatchPlan`."""
        start, low, _ = self._bounds(batch)
        return low - start

    def consumed(self, steps: int) -> int:
        """See `BatchPlan`."""
        return min(self.position[1] + steps * self.step, self.usable)


class Share(IterableDataset[Any]):
    """Every n-th sample of a stream.

    Args:
        stream: all of it.
        rank: number of the first sample that is taken.
        ranks: n.
        whole_steps: samples at the end that don't fill an optimizer step are left out (the loader does it).
    """

    def __init__(self, stream: IterableDataset[Any], rank: int, ranks: int, whole_steps: bool = False) -> None:
        self.stream = stream
        self.rank = rank
        self.ranks = ranks
        self.whole_steps = whole_steps

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.stream), self.rank, None, self.ranks)
