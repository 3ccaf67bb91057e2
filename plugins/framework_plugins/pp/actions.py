"""A pipeline schedule as a table of actions, in the CSV format of torch.distributed.pipelining, checked before it runs.

A row a rank, a cell an action: `2F0` is stage 2, forward, micro-batch 0; `B` a whole backward, or `I` (gradients of
inputs) and later `W` (of weights); an empty cell is a pause. Ranks, columns, stages and micro-batches count from 0.
Sends and receives aren't in the table: they follow from it.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

KINDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
COST = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Time units of an action where a bubble is counted: the backward takes twice the forward, a half for each part."""
CELL = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One cell."""

    stage: int
    kind: str
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


@dataclass(frozen=True)
class Table:
    """A schedule.

    Attributes:
        rows: for each rank its actions in order; None = a pause.
    """

    rows: tuple[tuple[Action | None, ...], ...]

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """Yield rank, column and action of each cell that isn't empty."""
        for rank, row in enumerate(self.rows):
            for column, action in enumerate(row):
                if action is not None:
                    yield rank, column, action

    @property
    def stages(self) -> int:
        """Stages in all."""
        return 1 + max(action.stage for *_, action in self.actions())

    @property
    def microbatches(self) -> int:
        """Micro-batches of a batch."""
        return 1 + max(action.micro for *_, action in self.actions())

    def of_rank(self, rank: int) -> list[int]:
        """Return the stages that a rank runs, ascending."""
        return sorted({action.stage for at, _, action in self.actions() if at == rank})


def read(path: Path) -> list[list[str]]:
    """Return the cells of a file; nothing in it is executed. Empty lines at its end are left out.

    Raises:
        OSError: it can't be read.
        ValueError: it isn't text, or has no cell.
    """
    with path.open(newline="", encoding="utf-8") as file:
        try:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file, strict=True)]
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"it is no CSV file ({error})") from error
    while rows and not any(rows[-1]):
        rows.pop()
    if not rows:
        raise ValueError("it has no actions")
    return rows


def parse(cells: Sequence[Sequence[str]]) -> tuple[Table | None, list[str]]:
    """Return the table and what is wrong with it, a sentence each; None if cells can't be read as actions."""
    faults = []
    for rank, row in enumerate(cells):
        if not any(row):
            faults.append(f"rank {rank} has no actions")
        for column, cell in enumerate(row):
            if cell and not CELL.fullmatch(cell):
                faults.append(f"rank {rank}, column {column}: {cell} {_why_not(cell)}")
    if faults:
        return None, faults
    matches = [[CELL.fullmatch(cell) for cell in row] for row in cells]
    table = Table(
        tuple(tuple(Action(int(m[1]), m[2], int(m[3])) if m is not None else None for m in row) for row in matches)
    )
    faults = list(_incomplete(table))
    return table, faults or list(_deadlock(table))


def _why_not(cell: str) -> str:
    if re.fullmatch(r"\d+(SEND|RECV)_[FB]\d+", cell) or re.fullmatch(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)", cell):
        return "moves data, and moves follow from the other actions; leave it out"
    if cell.startswith("("):
        return "joins two actions; write them in two columns"
    return f"is no action; write stage, one of {', '.join(KINDS)}, and micro-batch, as in 0F0"


def _incomplete(table: Table) -> Iterator[str]:
    """Yield each action that is missing, doubled, out of order in its row, or of a stage that is elsewhere."""
    places: dict[Action, tuple[int, int]] = {}
    owner: dict[int, int] = {}
    for rank, column, action in table.actions():
        here = f"rank {rank}, column {column}: {action}"
        if action in places:
            yield f"{here} stands at rank {places[action][0]}, column {places[action][1]} already"
            continue
        places[action] = (rank, column)
        if owner.setdefault(action.stage, rank) != rank:
            yield f"{here} is of stage {action.stage}, which rank {owner[action.stage]} has"
    for stage in range(table.stages):
        if stage not in owner:
            yield f"stage {stage} is on no rank, though there is a stage {table.stages - 1}"
            continue
        for micro in range(table.microbatches):
            found = {kind: places.get(Action(stage, kind, micro)) for kind in KINDS}
            yield from _one_pass(Action(stage, "", micro), owner[stage], found)


def _one_pass(which: Action, rank: int, found: Mapping[str, tuple[int, int] | None]) -> Iterator[str]:
    """Yield what is wrong with one micro-batch on one stage: F, then B, or I and W."""
    name = {kind: f"{which.stage}{kind}{which.micro}" for kind in KINDS}
    if found["F"] is None:
        yield f"rank {rank} never runs {name['F']}"
        return
    halves = [kind for kind in "IW" if found[kind] is not None]
    if found["B"] is not None and halves:
        at = found[halves[0]]
        yield f"rank {rank}, column {at and at[1]}: {name[halves[0]]} repeats a part of {name['B']}"
        return
    missing = [kind for kind in "IW" if found[kind] is None]
    if found["B"] is None and missing:
        yield f"rank {rank} never runs {' and '.join(name[kind] for kind in (missing if halves else 'B'))}"
        return
    order = [("F", "B")] if found["B"] is not None else [("F", "I"), ("I", "W")]
    for first, then in order:
        early, late = found[first], found[then]
        if early is not None and late is not None and early > late and early[0] == late[0]:
            yield f"rank {rank}, column {late[1]}: {name[then]} comes before {name[first]} (column {early[1]})"


def _needs(action: Action, stages: int, known: frozenset[Action]) -> list[Action]:
    """Return what must be done on another stage before an action; `known` are all actions of the table."""
    if action.kind == "F":
        return [Action(action.stage - 1, "F", action.micro)] if action.stage else []
    if action.kind == "W" or action.stage == stages - 1:
        return []
    half = Action(action.stage + 1, "I", action.micro)
    return [half if half in known else Action(action.stage + 1, "B", action.micro)]


@dataclass(frozen=True)
class _Played:
    """A table run without computing.

    Attributes:
        ends: when each action ends, in units of `COST`.
        stuck: rank, column and action that each rank waits at for ever, and what for.
    """

    ends: dict[Action, float]
    stuck: list[tuple[int, int, Action, list[Action]]]


def _play(table: Table) -> _Played:
    stages, known = table.stages, frozenset(action for *_, action in table.actions())
    ends: dict[Action, float] = {}
    at, clock = [0] * len(table.rows), [0.0] * len(table.rows)
    moved = True
    while moved:
        moved, stuck = False, []
        for rank, row in enumerate(table.rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                if action is not None:
                    needed = _needs(action, stages, known)
                    if missing := [one for one in needed if one not in ends]:
                        stuck.append((rank, at[rank], action, missing))
                        break
                    start = max([clock[rank], *(ends[one] for one in needed)])
                    clock[rank] = ends[action] = start + COST[action.kind]
                at[rank] += 1
                moved = True
    return _Played(ends, stuck)


def _deadlock(table: Table) -> Iterator[str]:
    """Yield one sentence if ranks wait for one another for ever."""
    waits = [
        f"rank {rank}, column {column}: {action} waits for {' and '.join(map(str, missing))}"
        for rank, column, action, missing in _play(table).stuck
    ]
    if waits:
        yield "the ranks wait for one another for ever (" + "; ".join(waits) + ")"


def bubble(table: Table) -> float:
    """Return the share of time in which ranks wait, 0 to 1, where forward, I and W take one unit and B two."""
    ends = _play(table).ends
    work = sum(COST[action.kind] for *_, action in table.actions())
    return 1.0 - work / (len(table.rows) * max(ends.values()))


def alive(table: Table) -> dict[int, int]:
    """Return for each stage the most micro-batches whose activations it holds at once: from F to B, or to W."""
    now: dict[int, int] = defaultdict(int)
    most: dict[int, int] = defaultdict(int)
    for _, _, action in table.actions():
        now[action.stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        most[action.stage] = max(most[action.stage], now[action.stage])
    return dict(sorted(most.items()))
