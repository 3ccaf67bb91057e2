"""`StreamLoader`, which stands in for a user's loader of an iterable dataset: this data rank's share of the stream."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from framework.adapters import lightning_private
from framework.agreement import gather, odd_rank
from framework.errors import UsageError
from framework.ledger.numbering import Blocks, Collate, NumberedStream, Tray
from framework.loading import Position, Where, check, iterate, settings_of
from framework.window import batch_size


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
        settings, batch = settings_of(user), where.plan.batch
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
        self.position = Position(where)
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
        rows = self._in_step(iterate(self._reader, self._where, epoch, shared=True), consumed)
        return self.tray.unpack(rows) if self.numbered else (row[1] for row in rows)

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
                    last = next(row for row in gather(ready[0] if ready else last) if row is not None)
            for row in ready or [last]:
                last = row
                self._real.append(0 if not ready else 1 if self.own_batches else len(row[0]) // 8)
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
        firsts = gather(int(self._stream.first))
        if other := odd_rank(firsts):
            raise UsageError(
                f"The stream begins with another sample on rank {other} than on rank 0, but the framework shares it "
                "out: let every rank yield all of it, in the same order (random numbers of torch, NumPy and Python are "
                "alike on all ranks)."
            )
        plan, size = self._where.plan, 0 if row is None or not self.own_batches else batch_size(row[1], 0)
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

    def began(self, steps: range) -> tuple[int, list[int]]:
        """Return the epoch of optimizer steps of the running iteration, and the samples of it consumed before each."""
        base = self.position.base
        return base.epoch, [base.consumed + (step - 1 - base.steps) * self._step for step in steps]

    def whole(self, batch: int) -> int:
        """Return the first batch, from `batch` on, that isn't full: those before are of whole optimizer steps."""
        full = 1 if self.own_batches else self._where.plan.batch.local_batch_size
        return next((at for at in range(batch, len(self._real)) if self._real[at] != full), len(self._real))

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
        check({"order": "stream", **state}, "order", self._how, "use the same kind of loader")
        check(state, "seed", self._where.plan.seed, f"type seed={state['seed']}")
        if state["epoch_done"]:
            self.position.restore(state["epoch"] + 1, 0)
            return
        self.position.restore(state["epoch"], state["consumed"])
        now = self._batches(state["consumed"])
        lightning_private.move_to_batch(self._where.trainer, saved=state["batches"], now=now, length=None)


def _alone(decision: bool, all: bool) -> bool:
    """What one rank agrees on with itself."""
    return decision
