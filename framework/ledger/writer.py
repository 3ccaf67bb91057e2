"""`Ledger`: writes each optimizer step's samples into `run_dir/ledger`.

A file for each data rank and attempt, `<run_id>-<attempt>-<data rank>.jsonl`, one JSON object a line: first where this
attempt starts, then stretches of steps that follow one another in an epoch and are cut alike:

- `step`: number of the first; `epoch`, from 0;
- `at` and `chain`, of each: the samples of the epoch consumed before it, and its link;
- `places` of each step's samples in it over all ranks, as [first, count, stride] of each micro-step;
- `samples`: numbers of all (int32, or int64 if there are larger ones, little endian, base64).

A step only notes what it was trained on. Every `STEPS` steps, and before each checkpoint, ranks add up their hashes of
all of them in one all-reduce and write: what a kill can take are steps that are made again, as no checkpoint has them.
"""

from __future__ import annotations

import json
import logging
import os
import time
from base64 import b64encode
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lightning.pytorch import Trainer

from framework.adapters import lightning_private
from framework.ledger.chain import START, Stretch, digests, links
from framework.ledger.history import FOLDER, FORMAT
from framework.loaders import Loader
from framework.metrics import add_up
from framework.plan import RunPlan
from framework.streams import StreamLoader

log = logging.getLogger(__name__)

STEPS = 256


class Pending(NamedTuple):
    """A stretch with the number of its first step, its epoch, and of each step the samples of that epoch before it."""

    step: int
    epoch: int
    ats: Sequence[int]
    stretch: Stretch


def narrowed(numbers: bytes) -> bytes:
    """Return int64 numbers as int32 if all fit."""
    wide = np.frombuffer(numbers, np.int64)
    narrow = wide.astype(np.int32)
    return narrow.tobytes() if np.array_equal(narrow, wide) else numbers


def _json(row: dict[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode()


class Ledger:
    """The part of `framework.trainer.MeshCallback` that knows about samples; one a rank.

    Args:
        plan: of the run.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.chain: str | None = START
        """The last link, the same on all ranks and under any mix; None = a checkpoint that had none was loaded."""
        self.step = 0
        """Optimizer steps that are noted."""
        self._file: int | None = None
        self._noted: list[Sequence[tuple[bytes, int]]] = []
        self._pending: list[Pending] = []
        self._unsettled = 0
        self._counts = False
        self._strategy: Any = None
        self._loaders: Any = None
        self._loader: Loader | StreamLoader | None = None

    def start(self, trainer: Trainer) -> None:
        """Begin an attempt; open its file if this rank speaks for a data rank."""
        self._strategy = trainer.strategy
        self.step = lightning_private.completed_steps(trainer)
        loaders = self._loaders = self._strategy.loaders
        training = None if loaders is None else loaders.training
        self._loader = training if training is not None and training.numbered else None
        if self._loader is not None:
            self._loader.position.before_begin = self.place
        at = self.plan.mesh.coordinate(trainer.global_rank)
        self._counts = not (at["pp"] or at["cp"] or at["tp"])  # others read the same samples
        if self._loader is None or not self._counts:
            return
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._open(Path(self.plan.run_dir) / FOLDER, f"{self.plan.run_id}-{attempt}", loaders.data_rank)
        head = {
            "format": FORMAT,
            "run_id": self.plan.run_id,
            "attempt": attempt,
            "time": time.time(),
            "rank": trainer.global_rank,
            "data_rank": loaders.data_rank,
            "data_ranks": self.plan.batch.data_ranks,
            "mesh": str(self.plan.mesh),
            "step": self.step,
            "chain": self.chain,
            "from": str(trainer.ckpt_path) if trainer.ckpt_path else None,
            "whole_epochs": trainer.limit_train_batches in (None, 1.0),
            **self._loader.order(),
        }
        self._write([_json(head), b"\n"])

    def batch_end(self, step: int) -> None:
        """At the end of an optimizer step note it; not called between, as `step` tells.

        Args:
            step: how many are done.
        """
        if step != self.step + 1:
            self.place()
        self.step = step
        if self._loader is None:
            return
        self._noted.append(self._loaders.tray.take())
        self._unsettled += 1
        if self._unsettled >= STEPS:
            self.settle()

    def place(self) -> None:
        """Find the epoch and the places of noted steps: many at once is cheap, and each by itself isn't."""
        if self._loader is None or not self._noted:
            return
        step = self.step + 1 - len(self._noted)
        for stretch in self._loaders.placed(self._noted):
            epoch, ats = self._loader.began(range(step, step + stretch.steps))
            self._pending.append(Pending(step, epoch, ats, stretch))
            step += stretch.steps
        self._noted.clear()

    def settle(self) -> None:
        """Agree on the hashes of the steps since the last time, and write them. Collective."""
        if self._unsettled:
            shares = self.shares()
            alone = self.plan.batch.data_ranks == 1
            self.close_steps(shares if alone else add_up(shares, self._strategy.root_device))

    def shares(self) -> list[float]:
        """Return what this rank adds to the sums of hashes of the pending steps, two numbers for each."""
        self.place()
        stretches = [pending.stretch for pending in self._pending]
        if not self._counts and self.plan.batch.data_ranks > 1:
            return [0.0] * (2 * sum(stretch.steps for stretch in stretches))
        return digests(stretches)

    def close_steps(self, sums: Sequence[float]) -> None:
        """Link the pending steps to the chain and write them down; `sums` are those of all ranks' `shares`."""
        parts: list[bytes] = []
        at = 0
        for step, epoch, ats, (steps, places, numbers) in self._pending:
            chained: list[str] | list[None] = [None] * steps
            if self.chain is not None:
                chained = links(self.chain, step, epoch, ats, sums[2 * at : 2 * (at + steps)])
                self.chain = chained[-1]
            at += steps
            row = {
                "step": step,
                "epoch": epoch,
                "at": ats,
                "places": [[one.start, len(one), one.step] for one in places],
                "chain": chained,
            }
            # what is long goes around `json.dumps`, which would look at each of its characters
            parts += [_json(row)[:-1], b',"samples":"', b64encode(narrowed(numbers)), b'"}\n']
        self._pending.clear()
        self._unsettled = 0
        self._write(parts)

    def sync(self) -> None:
        """Settle, down to the disk: a checkpoint holds these steps. Collective."""
        self.settle()
        if self._file is not None:
            try:
                os.fsync(self._file)
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self, folder: Path, attempt: str, data_rank: int) -> None:
        """Make a file of this attempt's own; a second `fit` of one attempt gets another."""
        for name in chain([attempt], (f"{attempt}.{number}" for number in count(1))):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{name}-{data_rank:05d}.jsonl"
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
            except FileExistsError:
                continue
            except OSError as error:
                self._give_up(error)
            return

    def _write(self, parts: Sequence[bytes]) -> None:
        if self._file is None:
            return
        left = memoryview(b"".join(parts))
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A full disk ends this attempt's ledger, not the training; whoever asks for proof hears what is missing."""
        log.warning("The ledger can't be written from step %d on, so this attempt proves nothing: %s", self.step, error)
        self.close()
