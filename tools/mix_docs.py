"""Write `docs/mixes.md` from the figures of the last campaign, so that the page says what was measured.

python tools/mix_docs.py          # write
python tools/mix_docs.py --check  # exit code 1 if the page isn't that of the figures

The figures: python -m pytest -m campaign tests/cli/test_verify.py -k all_mixes
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "tests" / "campaign" / "mixes.json"
PAGE = ROOT / "docs" / "mixes.md"
SHARDING = ("strategy.sharding=", "strategy.stage=", "strategy.replicas=")
"""Settings that make another sharding."""

HEAD = """\
# Mixes

Written by `python tools/mix_docs.py` from `tests/campaign/mixes.json`, the figures of these commands at commit
`{commit}` ({minutes} minutes on {cores} cores; [verify.md](verify.md) says what is compared and how near):

```console
{commands}
```

**{equal} legal mixes equal one process, {wrong} don't.** All of them begin with one set of weights a model.

| model | legal mixes | distinct | with three axes | wrong | refused before a start | largest distance, fp64 | fp32 |
|---|---|---|---|---|---|---|---|
{models}

Distinct are mixes that differ in engine, sharding, kind of tp, schedule, kind of cp, experts or the size of an axis,
and not only in another setting. Three axes: above 1, of dp_replicate, dp_shard, tp, pp and cp. A distance is relative,
the largest of anything that is compared: losses, gradient norms, first gradients, updates, buffers; fp32 is for engines
that have no fp64. In the tables a cell holds the numbers of ranks with which a mix was run and found equal; `-` =
refused in every size that was tried; empty = not tried: it doesn't fit into {most} ranks, or is a variant of an option
with two more axes. Mixes that are refused whatever the schedule stand below the tables only.
"""


def split(words: str) -> dict[str, list[str]]:
    """Return slot -> words of a mix, sizes left out."""
    found: dict[str, list[str]] = defaultdict(list)
    for word in words.split():
        key = word.partition("=")[0]
        if "=" in word and not key.endswith(".size"):
            found[key.partition(".")[0]].append(word)
    return found


def kind(words: Sequence[str]) -> str:
    """Return the words of one slot as a heading."""
    return " ".join(words) or "none"


def matrix(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a table for each choice of tp, cp and ep: strategies down, schedules across."""
    cells: dict[tuple[str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        parts = split("" if row["mix"] == "one process" else row["mix"])
        other = kind([word for slot in ("tp", "cp", "ep") for word in parts[slot]])
        cells[other, kind(parts["strategy"]), kind(parts["pp"])].append(row)
    lines = []
    for other in ordered(key[0] for key in cells):
        strategies = ordered(key[1] for key in cells if key[0] == other and runs(cells, key[:2]))
        schedules = ordered(key[2] for key in cells if key[0] == other)
        if not strategies:
            continue
        lines += [f"\n### `{other}`\n" if other != "none" else "\n### Without tp, cp and ep\n"]
        lines += ["| | " + " | ".join(f"`{name}`" for name in schedules) + " |", "|---" * (len(schedules) + 1) + "|"]
        for strategy in strategies:
            found = [cell(cells.get((other, strategy, schedule), [])) for schedule in schedules]
            lines.append(f"| `{strategy}` | " + " | ".join(found) + " |")
    return "\n".join(lines)


def ordered(names: Iterable[str]) -> list[str]:
    """Return names once, `none` first."""
    return sorted(set(names), key=lambda name: (name != "none", name))


def runs(cells: Mapping[tuple[str, str, str], Sequence[Mapping[str, Any]]], of: tuple[str, ...]) -> bool:
    """Return whether any mix of a row of a table isn't refused."""
    return any(row["verdict"] != "refused" for key, rows in cells.items() if key[:2] == of for row in rows)


def cell(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one cell."""
    if any(row["verdict"] not in ("equal", "refused") for row in rows):
        return "**wrong**"
    equal = sorted({row["ranks"] for row in rows if row["verdict"] == "equal"})
    return " ".join(map(str, equal)) if equal else "-" if rows else ""


def reasons(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return each reason for a refusal once, with the mixes that it meets."""
    found: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row["verdict"] == "refused":
            found[row["lines"][0]].append(row["mix"])
    lines = ["\n### Refused\n", "| reason | mixes | for example |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {why} | {len(mixes)} | `{mixes[0]}` |" for why, mixes in sorted(found.items()))])


def many_axes(row: Mapping[str, Any]) -> bool:
    """Return whether three axes or more are above 1; `ep` isn't counted, it borrows ranks of `dp_shard`."""
    return sum(size > 1 for axis, size in row["axes"].items() if axis != "ep") >= 3


def distinct(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells a mix from others that do more than set something otherwise."""
    kinds = [word for words in split(row["mix"]).values() for word in words]
    kept = [word for word in kinds if "." not in word.partition("=")[0] or word.startswith(SHARDING)]
    return (*sorted(kept), *sorted(row["axes"].items()))


def worst(rows: Iterable[Mapping[str, Any]], precision: str) -> str:
    """Return the largest distance of the equal mixes of a precision."""
    found = [row["worst"] for row in rows if row["verdict"] == "equal" and row["precision"] == precision]
    return f"{max(found):.1e}" if found else ""


def summary(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a model's line of the first table."""
    equal = [row for row in rows if row["verdict"] == "equal" and row["mix"] != "one process"]
    refused = sum(row["verdict"] == "refused" for row in rows)
    wrong = len(rows) - len(equal) - refused - sum(row["mix"] == "one process" for row in rows)
    different, large = len(set(map(distinct, equal))), len({distinct(row) for row in equal if many_axes(row)})
    counts = (len(equal), different, large, wrong, refused, worst(rows, "fp64"), worst(rows, "fp32"))
    return f"| `model={name}` | " + " | ".join(map(str, counts)) + " |"


def page() -> str:
    """Return the whole page."""
    figures = json.loads(FIGURES.read_text())
    models = {name: model["rows"] for name, model in figures["models"].items()}
    rows = [row for of_model in models.values() for row in of_model if row["mix"] != "one process"]
    head = HEAD.format(
        commit=figures["commit"][:12],
        minutes=round(figures["seconds"] / 60),
        cores=figures["cores"],
        commands="\n".join(f"$ python -m framework verify --mixes=all --json model={name}" for name in models),
        equal=sum(row["verdict"] == "equal" for row in rows),
        wrong=sum(row["verdict"] not in ("equal", "refused") for row in rows),
        models="\n".join(summary(name, of_model) for name, of_model in models.items()),
        most=max(row["ranks"] for row in rows),
    )
    bodies = [f"\n## `model={name}`\n{matrix(rows)}\n{reasons(rows)}\n" for name, rows in models.items()]
    return head + "".join(bodies)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE.name} is out of date: type python tools/mix_docs.py")
    PAGE.write_text(page())
