"""From the records of many attempts to one history, and what is wrong with it. Imports neither torch nor Lightning."""

from __future__ import annotations

import json
from array import array
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from framework.checkpoint_files import newest_complete
from framework.errors import UsageError
from framework.ledger.chain import Stretch, digests, links

FOLDER = "ledger"
FORMAT = 3
HEAD = ("time", "data_ranks", "step", "chain", "from", "order", "seed", "size", "usable")
"""What the first line of a file must have."""
ORDERED = ("shuffled", "in order", "stream")
"""Orders that can be computed again and compared with what was read."""


@dataclass(frozen=True)
class Record:
    """What one data rank wrote about one optimizer step; see `framework.ledger.writer`."""

    step: int
    epoch: int
    at: int
    places: tuple[range, ...]
    samples: bytes
    chain: str | None

    def placed(self) -> Iterator[tuple[int, int]]:
        """Yield place and number of each sample."""
        yield from zip(chain.from_iterable(self.places), array("q", self.samples), strict=True)


@dataclass
class Segment:
    """One attempt: where it started, and by data rank what it wrote.

    Attributes:
        name: `<run_id>-<attempt>`.
        run_dir: folder of its run.
        heads: data rank -> first line of its file.
        records: data rank -> step -> record.
    """

    name: str
    run_dir: Path
    heads: dict[int, dict[str, Any]] = field(default_factory=dict)
    records: dict[int, dict[int, Record]] = field(default_factory=dict)

    @property
    def head(self) -> dict[str, Any]:
        """The first data rank's head; but for the ranks all are alike."""
        return self.heads[min(self.heads)]

    def missing(self) -> list[int]:
        """Return the data ranks that left no file."""
        return [rank for rank in range(self.head["data_ranks"]) if rank not in self.heads]

    def last_common(self) -> int:
        """Return the last step that all data ranks wrote; the step it started at if there is none."""
        return min((max(steps, default=self.head["step"]) for steps in self.records.values()), default=0)


@dataclass(frozen=True)
class Finding:
    """What is wrong, and where.

    Attributes:
        step: optimizer step, 0 = of no step.
        text: one sentence.
    """

    step: int
    text: str


@dataclass
class History:
    """The steps that count, in order: each with the segment that made it.

    Attributes:
        run_dir: of the run that made the last one.
        steps: (segment, step number).
        segments: of which it is made, in order.
        left: steps that were made, but a later attempt started before them.
    """

    run_dir: Path
    steps: list[tuple[Segment, int]]
    segments: list[Segment]
    left: int


def read(run_dir: Path) -> list[Segment]:
    """Return the attempts of a run, oldest first.

    Raises:
        UsageError: there is no ledger, or a line of it can't be read.
    """
    folder = run_dir / FOLDER
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise UsageError(f"{run_dir} has no ledger: there is no file in {folder}.")
    segments: dict[str, Segment] = {}
    for path in files:
        name, _, rank = path.stem.rpartition("-")
        if not name or not rank.isdecimal():
            raise UsageError(f"{path} is no <run>-<attempt>-<data rank>.jsonl, as a ledger's files are: move it away.")
        segment = segments.setdefault(name, Segment(name, run_dir))
        _read_file(path, int(rank), segment)
    found = [one for one in segments.values() if one.heads]
    if not found:
        raise UsageError(f"{run_dir} has no ledger: no file in {folder} has a whole line.")
    return sorted(found, key=lambda one: float(one.head["time"]))


def _read_file(path: Path, rank: int, segment: Segment) -> None:
    lines = path.read_bytes().split(b"\n")[:-1]  # what comes after the last newline is no whole line
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if number == 1:
                if row["format"] > FORMAT:
                    raise UsageError(f"{path} has format {row['format']}, newer than this version's {FORMAT}.")
                for key in HEAD:
                    row[key]  # a KeyError says which one is missing
                segment.heads[rank] = row
                segment.records[rank] = {}
                continue
            for record in _records(row):
                if record.step in segment.records[rank]:
                    raise ValueError(f"step {record.step} is there twice")
                segment.records[rank][record.step] = record
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"Line {number} of {path} can't be read: {error!r}.") from None


def _records(row: dict[str, Any]) -> Iterator[Record]:
    """Yield the steps of a line: since format 3 a stretch of them."""
    ats, chained = (row["at"], row["chain"]) if isinstance(row["at"], list) else ([row["at"]], [row["chain"]])
    places = tuple(range(first, first + count * by, by) for first, count, by in row["places"])
    size = sum(map(len, places))
    samples, count = b64decode(row["samples"], validate=True), len(ats) * size
    if len(samples) == 4 * count:  # since format 2
        samples = array("q", array("i", samples)).tobytes()
    if len(samples) != 8 * count:
        raise ValueError(f"{len(samples)} bytes of samples for {count} places")
    for number, (at, link) in enumerate(zip(ats, chained, strict=True)):
        own = samples[8 * size * number : 8 * size * (number + 1)]
        yield Record(row["step"] + number, row["epoch"], at, places, own, link)


def history(run_dir: Path, segments: Sequence[Segment]) -> tuple[History, list[Finding]]:
    """Follow a run's newest attempt back to the first step, through whatever attempts it went on from.

    Args:
        run_dir: of the run.
        segments: of all runs that may be part of it.
    """
    tip = [segment for segment in segments if segment.run_dir == run_dir][-1]
    chosen: list[tuple[Segment, int, int]] = []
    findings: list[Finding] = []
    end, used = tip.last_common(), [tip]
    while True:
        start, last_link = tip.head["step"], tip.head["chain"]
        chosen.insert(0, (tip, start + 1, end))
        if start == 0:
            break
        before = [
            segment for segment in segments
            if segment not in used and any(_ends(records, start, last_link) for records in segment.records.values())
        ]  # fmt: skip
        if not before:
            findings.append(Finding(start, _no_beginning(tip)))
            break
        source = Path(tip.head["from"] or "")
        # equal histories have equal chains: the run that the checkpoint lies in comes first, then this one
        tip, end = max(before, key=lambda one: (one.run_dir in source.parents, one.run_dir == tip.run_dir)), start
        used.insert(0, tip)
    steps = [(segment, step) for segment, first, last in chosen for step in range(first, last + 1)]
    made = sum(max(0, one.last_common() - one.head["step"]) for one in segments if one.run_dir in _folders(used))
    return History(run_dir, steps, used, made - len(steps)), findings


def _folders(segments: Sequence[Segment]) -> set[Path]:
    return {segment.run_dir for segment in segments}


def _ends(records: dict[int, Record], step: int, last_link: str | None) -> bool:
    return last_link is not None and step in records and records[step].chain == last_link


def _no_beginning(segment: Segment) -> str:
    head = segment.head
    if head["chain"] is None:
        return f"attempt {segment.name} went on from step {head['step']} of {head['from']}, which had no ledger"
    return (
        f"attempt {segment.name} went on from step {head['step']} of {head['from']}, and no ledger here has that step "
        f"with the chain {head['chain']}: name the run that it belongs to as well"
    )


def check(story: History) -> Iterator[Finding]:
    """Yield what is wrong with a history, in the order of its steps."""
    tip = story.segments[-1]
    newest = newest_complete(story.run_dir)
    # the ledger is on the disk before a checkpoint is
    if newest is not None and newest.saved >= float(tip.head["time"]) and newest.step > (last := _last(story)):
        yield Finding(
            last + 1, f"the ledger of attempt {tip.name} ends at step {last}, but {newest.path} was saved at step "
            f"{newest.step}: what was trained in between isn't proven"
        )  # fmt: skip
    expected: str | None = story.segments[0].head["chain"]
    orders: dict[tuple[Any, ...], Sequence[int]] = {}
    epochs: dict[int, Counter[int]] = {}
    position: tuple[int, int] | None = None
    for segment in story.segments:
        if missing := segment.missing():
            yield Finding(segment.head["step"], f"data ranks {missing} of attempt {segment.name} left no ledger")
            return
    for segment, step in story.steps:
        absent = [rank for rank, records in segment.records.items() if step not in records]
        if absent:
            yield Finding(step, f"data rank {absent[0]} wrote nothing about this step")
            return
        written = {rank: records[step] for rank, records in segment.records.items()}
        first = written[min(written)]
        placed = sorted((place, number, rank) for rank, record in written.items() for place, number in record.placed())
        yield from _place_findings(step, placed)
        found = {record.chain for record in written.values()}
        if expected is not None:
            (expected,) = links(expected, step, first.epoch, [first.at], _total(written))
            if found != {expected}:
                yield Finding(
                    step, f"the chain is broken: {', '.join(sorted(map(str, found)))} is written, not {expected}"
                )
                return
        yield from _order_findings(segment, step, first, placed, orders)
        yield from _position_findings(segment, step, first, position)
        position = (first.epoch, first.at + len(placed))
        seen = epochs.setdefault(first.epoch, Counter())
        again = next((number for _, number, _ in placed if seen[number]), None)
        seen.update(number for _, number, _ in placed)
        if again is not None and segment.head["order"] in ORDERED:
            yield Finding(step, f"sample {again} was trained before in epoch {first.epoch}")
        if position[1] == segment.head["usable"] == segment.head["size"] and segment.head["order"] in ORDERED:
            lost = [number for number in range(segment.head["size"]) if not seen[number]]
            if lost:
                yield Finding(step, f"epoch {first.epoch} is over, and sample {lost[0]} was never trained")


def _last(story: History) -> int:
    return story.steps[-1][1] if story.steps else int(story.segments[-1].head["step"])


def _total(written: dict[int, Record]) -> list[float]:
    parts = digests(Stretch(1, record.places, record.samples) for record in written.values())
    return [sum(parts[::2]), sum(parts[1::2])]


def _place_findings(step: int, placed: Sequence[tuple[int, int, int]]) -> Iterator[Finding]:
    """Places of a step are 0, 1, 2, ..., each once."""
    for expected, (place, number, rank) in enumerate(placed):
        if place != expected:
            what = f"place {place} was filled twice" if place < expected else f"place {expected} of the step is empty"
            yield Finding(step, f"{what} (data rank {rank}, sample {number})")
            return


def _order_findings(
    segment: Segment,
    step: int,
    first: Record,
    placed: Sequence[tuple[int, int, int]],
    orders: dict[tuple[Any, ...], Sequence[int]],
) -> Iterator[Finding]:
    """Where the order can be computed again, each sample is the one whose turn it was."""
    head = segment.head
    if head["order"] not in ORDERED:
        return
    order: Sequence[int]
    if head["order"] == "shuffled":
        key = (head["seed"], first.epoch, head["size"])
        if key not in orders:
            from framework.counter import epoch_order  # it needs torch

            orders.clear()
            orders[key] = epoch_order(*key)
        order = orders[key]
    else:
        order = range(head["size"] or first.at + len(placed))
    for place, number, rank in placed:
        at = first.at + place
        if at >= len(order) or order[at] != number:
            turn = f"sample {order[at]}" if at < len(order) else "nothing"
            yield Finding(
                step, f"data rank {rank} trained sample {number} where it was the turn of {turn} (place {at} of epoch "
                f"{first.epoch})"
            )  # fmt: skip
            return


def _position_findings(
    segment: Segment, step: int, first: Record, position: tuple[int, int] | None
) -> Iterator[Finding]:
    """Each step begins where the one before ended, or with the next epoch."""
    if position is None or (first.epoch, first.at) == position:
        return
    usable = segment.head["usable"]
    ended = usable is None or position[1] >= usable or not segment.head.get("whole_epochs", True)
    if (first.epoch, first.at) == (position[0] + 1, 0) and ended:
        return
    yield Finding(
        step, f"it begins at sample {first.at} of epoch {first.epoch}, but the step before ended at sample "
        f"{position[1]} of epoch {position[0]}"
    )  # fmt: skip


def first_difference(one: History, other: History) -> Finding | None:
    """Return the first step at which two histories trained other samples, or in another order; None if none."""
    for (mine, step), (theirs, their_step) in zip(one.steps, other.steps, strict=False):
        ours, his = _samples(mine, step), _samples(theirs, their_step)
        if ours != his:
            place = next((at for at, (a, b) in enumerate(zip(ours, his, strict=False)) if a != b), None)
            if place is None:
                return Finding(step, f"{one.run_dir} trained {len(ours)} samples, {other.run_dir} {len(his)}")
            return Finding(
                step, f"place {place} of the step is sample {ours[place]} in {one.run_dir}, but {his[place]} in "
                f"{other.run_dir}"
            )  # fmt: skip
    return None


def _samples(segment: Segment, step: int) -> list[int]:
    placed = [pair for records in segment.records.values() if step in records for pair in records[step].placed()]
    return [number for _, number in sorted(placed)]
