"""All ranks' records as one file, `run_dir/global.log`: merged by time, a line that several ranks said written once.

Rank 0 merges while the run goes on (`GlobalLog.poll`); when it ends, or a process died, `complete` writes the file
anew from the ranks' files, which lose nothing. So `global.log` never depends on how rank 0 ended.
"""

from __future__ import annotations

import heapq
import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from framework.log_records import LAUNCHER, LogLine, Tail, log_file, log_files

SETTLE_SECONDS = 0.5
"""How long a line waits, however many others wait with it, for other ranks to say the same."""
WINDOW_SECONDS = 60.0
"""When the file is written anew: the longest time between a line's first and last speaker."""


def label(ranks: Iterable[int]) -> str:
    """Return `[rank 1]`, `[ranks 0-3,6]` or `[launcher]`."""
    ordered = sorted(ranks)
    if ordered == [LAUNCHER]:
        return "[launcher]"
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"[{'rank' if len(ordered) == 1 else 'ranks'} {text}]"


@dataclass(eq=False)
class Said:
    """One line and the ranks that said it; `line` is the earliest."""

    line: LogLine
    ranks: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        line = self.line
        return f"{line.stamp} {line.level} {line.logger} {label(self.ranks)} {line.text}"


class Merge:
    """Puts records in order of time and joins equal ones.

    Equal are logger, level, text and attempt; the n-th time that one rank says a line is joined with the n-th time
    that another does, so a line said in a loop stays as often as one rank said it.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._order: list[tuple[float, int, Said]] = []
        self._open: defaultdict[tuple[str, str, str, int], deque[Said]] = defaultdict(deque)
        self._count = 0

    def __len__(self) -> int:
        return len(self._order)

    def add(self, line: LogLine) -> None:
        """Take in one record."""
        key = (line.logger, line.level, line.text, line.attempt)
        for said in self._open[key]:
            if line.rank not in said.ranks:
                said.ranks.add(line.rank)
                if line.time < said.line.time:
                    said.line = line
                return
        said = Said(line, {line.rank})
        self._open[key].append(said)
        self._count += 1
        heapq.heappush(self._order, (line.time, self._count, said))

    def loudest(self) -> int:
        """Highest level that waits."""
        return max((said.line.levelno for _, _, said in self._order), default=0)

    def take(self, until: float, early: bool = False) -> Iterator[Said]:
        """Remove and yield, in order, the lines from before `until`; with `early` also those that all ranks said."""
        while self._order and (self._order[0][0] <= until or (early and self._whole(self._order[0][2]))):
            said = heapq.heappop(self._order)[2]
            line = said.line
            key = (line.logger, line.level, line.text, line.attempt)
            waiting = self._open[key]
            waiting.remove(said)
            if not waiting:
                del self._open[key]
            yield said

    def _whole(self, said: Said) -> bool:
        return len(said.ranks) >= self._world_size or LAUNCHER in said.ranks


def merged(run_dir: str | Path, world_size: int) -> Iterator[Said]:
    """Yield everything that the ranks' files hold, in order; memory is bounded by `WINDOW_SECONDS` of records."""
    merge = Merge(world_size)
    tails = [Tail(path, rank).drain() for rank, path in log_files(run_dir).items()]
    for line in heapq.merge(*tails, key=lambda line: line.time):
        merge.add(line)
        yield from merge.take(line.time - WINDOW_SECONDS)
    yield from merge.take(float("inf"))


def complete(run_dir: str | Path, world_size: int) -> list[Said]:
    """Write `global.log` anew from the ranks' files, which no process may be writing any more.

    Returns the warnings and errors that it didn't hold before: nobody has shown them on the console yet.
    """
    path = Path(run_dir) / "global.log"
    known = {
        (line.stamp, line.logger, line.text.partition("] ")[2])
        for line in (Tail(path, LAUNCHER).drain() if path.exists() else ())
        if line.levelno >= logging.WARNING
    }
    unseen = []
    temporary = path.with_name(".global.log.new")
    with open(temporary, "w", encoding="utf-8") as file:
        for said in merged(run_dir, world_size):
            file.write(f"{said}\n")
            line = said.line
            if line.levelno >= logging.WARNING and (line.stamp, line.logger, line.text) not in known:
                unseen.append(said)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return unseen


class GlobalLog:
    """Rank 0's side while the run goes on: reads what all ranks wrote, appends it to `global.log` in batches.

    Args:
        flush_entries: all that wait are written when that many do, or a warning does;
        flush_seconds: else each line is when it has waited that long.
    """

    def __init__(self, run_dir: str | Path, world_size: int, flush_entries: int, flush_seconds: float) -> None:
        self.path = Path(run_dir) / "global.log"
        self._merge = Merge(world_size)
        self._flush_entries = flush_entries
        self._flush_seconds = flush_seconds
        # An earlier start (restart, resume) is brought in order before its files are read on from their ends.
        ranks = set(range(world_size)) | {LAUNCHER} | set(log_files(run_dir))
        self._tails = [Tail(log_file(run_dir, rank), rank) for rank in sorted(ranks)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(".global.log.new")
        with open(temporary, "w", encoding="utf-8") as file:
            for line in heapq.merge(*(tail.drain(final=False) for tail in self._tails), key=lambda line: line.time):
                self._merge.add(line)
                file.writelines(f"{said}\n" for said in self._merge.take(line.time - WINDOW_SECONDS))
            file.writelines(f"{said}\n" for said in self._merge.take(time.time() - flush_seconds))
        os.replace(temporary, self.path)

    def poll(self, final: bool = False) -> list[Said]:
        """Read what is new; write what is due, or all with `final`. Returns what was written."""
        new = [line for tail in self._tails for line in tail.drain(final)]
        for line in sorted(new, key=lambda line: line.time):
            self._merge.add(line)
        now = time.time()
        if final:
            until = float("inf")
        elif len(self._merge) >= self._flush_entries or self._merge.loudest() >= logging.WARNING:
            until = now - min(SETTLE_SECONDS, self._flush_seconds)
        else:
            until = now - self._flush_seconds
        batch = list(self._merge.take(until, early=True))
        if batch:
            with open(self.path, "a", encoding="utf-8") as file:
                file.writelines(f"{said}\n" for said in batch)
        return batch
