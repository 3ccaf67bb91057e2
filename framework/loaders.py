"""`Loader`, which stands in for a user's loader of a map-style dataset: this rank's batches, from the position on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Sampler

from framework import counter
from framework.adapters import lightning_private
from framework.agreement import gather, odd_rank
from framework.errors import UsageError
from framework.ledger.numbering import Asked, Collate, NumberedSamples, Tray
from framework.loading import Position, Where, check, iterate, settings_of

if TYPE_CHECKING:
    from framework.data import BatchPlan


class Loader(DataLoader[Any]):
    """The user's loader of a map-style dataset, with this data rank's batches.

    Args:
        user: what the user built; everything but sampler and batch size is taken over.
        batches: of this rank.
        where: in the run.
    """

    def __init__(self, user: DataLoader[Any], batches: BatchPlan, where: Where) -> None:
        super().__init__(batch_sampler=batches, **settings_of(user))
        self.batches = batches
        self.numbered = where.train
        self.tray = Tray()
        self._where = where
        self.position = Position(where)
        # what really reads: users look at `dataset` and `collate_fn` of this loader and find their own
        self._samples = NumberedSamples(user.dataset)
        numbered = {"dataset": self._samples, "collate_fn": Collate(user.collate_fn)}
        self._asking = _Asking(batches, where)
        self._reader: Any = DataLoader(batch_sampler=self._asking, **settings_of(user) | numbered)
        self._compared = where.plan.world_size == 1

    def __iter__(self) -> Any:
        """Start at the position; random numbers of workers and of this process are seeded by it."""
        if self._where.train:
            self.batches.position = self.position.begin(self.batches.usable)
            lightning_private.expect_batches(self._where.trainer, len(self.batches))
        _same_on_all_ranks(self.batches)
        self._asking.probe = None if self._compared else _first_of_rank_0(self.batches)
        rows = iterate(self._reader, self._where, self.batches.position[0])
        if self._asking.probe is not None:
            rows = self._same_samples(rows, self._asking.probe[1])
        return self.tray.unpack(rows) if self.numbered else (row[1] for row in rows)

    def _same_samples(self, rows: Iterator[Any], index: int) -> Iterator[Any]:
        """Yield `rows`; UsageError on all ranks if sample `index` isn't the same on all."""
        first = list(islice(rows, 1))
        everyones = gather(self._samples.probed)
        if all(everyones) and (other := odd_rank(everyones)):
            raise UsageError(
                f"Sample {index} of {type(self._samples.dataset).__name__} is another on rank {other} than on rank 0, "
                "but the framework shares samples out: give every rank all of the data, not a part by its rank."
            )
        self._compared = True
        yield from chain(first, rows)

    @property
    def begun(self) -> bool:
        """Whether it was iterated."""
        return self.position.begun

    def order(self) -> dict[str, Any]:
        """Return what the order of an epoch follows from."""
        batches = self.batches
        return {"order": batches.how, "seed": batches.seed, "size": batches.size, "usable": batches.usable}

    def began(self, steps: range) -> tuple[int, list[int]]:
        """Return the epoch of optimizer steps of the running iteration, and the samples of it consumed before each."""
        base, consumed = self.position.base, self.batches.consumed
        return base.epoch, [consumed(step - 1 - base.steps) for step in steps]

    def whole(self, batch: int) -> int:
        """Return the first batch, from `batch` on, that isn't of a whole optimizer step."""
        return self.batches.whole()

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
        check(state, "order", self.batches.how, "leave loader and sampler.shuffle as they were")
        check(state, "size", self.batches.size, "use the same data")
        check(state, "seed", self.batches.seed, f"type seed={state['seed']}")
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


class _Asking(Sampler[Any]):
    """The batches of a `BatchPlan`, with what the random numbers of their samples follow from.

    Attributes:
        probe: see `Asked`; of the next iteration's first batch.
    """

    probe: tuple[int, int] | None = None

    def __init__(self, batches: BatchPlan, where: Where) -> None:
        self.batches = batches
        self._key = ("sample", where.plan.seed, "train" if where.train else "evaluation")

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        batches, key = self.batches, counter.derive(*self._key, self.batches.position[0])
        numbers = range(batches.first(), len(batches))  # the position is read now
        probes = {numbers.start: self.probe}
        return (Asked(key, batches.origin(n), batches.packed(n), probes.get(n)) for n in numbers)


def _first_of_rank_0(batches: BatchPlan) -> tuple[int, int] | None:
    """Return place and index of the first sample that rank 0 is about to read; None = there is none."""
    first = batches.first()
    mine = (batches.origin(first), batches.indices(first)[0]) if first < len(batches) else None
    found: tuple[int, int] | None = gather(mine)[0]
    return found


def _same_on_all_ranks(batches: BatchPlan) -> None:
    """UsageError on all ranks if their datasets have different sizes, or a user's sampler different orders."""
    mine = (f"{batches.size} samples", batches.how, batches.fingerprint())
    everyones = gather(mine)
    if rank := odd_rank(everyones):
        here, there = everyones[0][0], everyones[rank][0]
        what = f"{there}, and {here} on rank 0" if there != here else "another order"
        raise UsageError(
            f"The data of rank {rank} has {what}: give all ranks the same dataset and sampler, which the framework "
            "shares out; what a sampler draws with torch's, NumPy's or Python's random numbers is alike."
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
