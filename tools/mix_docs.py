"""Write `docs/mixes.md` from the figures of the last `verify --mixes=all`, so that the page says what was measured.

python tools/mix_docs.py          # write
python tools/mix_docs.py --check  # exit code 1 if the page isn't that of the figures

The figures: python -m framework verify --mixes=all --json > tests/campaign/mixes.json
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

HEAD = """\
# Mixes

Written by `python tools/mix_docs.py` from `tests/campaign/mixes.json`, the figures of
`python -m framework verify --mixes=all --json` (the default GPT, float64, SGD with momentum, {steps} steps;
[verify.md](verify.md) says what is compared and how near).

**{equal} legal mixes equal one process, {wrong} don't**; the largest relative distance of anything compared is
{worst:.1e}. All begin with one set of weights: {hashes} SHA-256. {refused} more are refused before a process starts,
for the reasons below.

A cell holds the numbers of ranks with which a mix was run and found equal; `-` = refused in every size that was tried;
empty = it doesn't fit into {most} ranks.
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
    """Return a table for each kind of tensor parallelism: strategies down, schedules across."""
    cells: dict[tuple[str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        parts = split("" if row["mix"] == "one process" else row["mix"])
        cells[kind(parts["tp"]), kind(parts["strategy"]), kind(parts["pp"])].append(row)
    tps, strategies, schedules = (list(dict.fromkeys(key[at] for key in sorted(cells))) for at in range(3))
    for kinds in (tps, strategies, schedules):
        kinds.sort(key=lambda name: (name != "none", name))
    lines = []
    for tp in tps:
        lines += [f"\n## `{tp}`\n" if tp != "none" else "\n## Without tensor parallelism\n"]
        lines += ["| | " + " | ".join(f"`{name}`" for name in schedules) + " |", "|---" * (len(schedules) + 1) + "|"]
        for strategy in strategies:
            found = [cell(cells.get((tp, strategy, schedule), [])) for schedule in schedules]
            lines.append(f"| `{strategy}` | " + " | ".join(found) + " |")
    return "\n".join(lines)


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
    lines = ["\n## Refused\n", "| reason | mixes | for example |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {why} | {len(mixes)} | `{mixes[0]}` |" for why, mixes in sorted(found.items()))])


def page() -> str:
    """Return the whole page."""
    figures = json.loads(FIGURES.read_text())
    rows, counts = figures["rows"], figures["verdicts"]
    head = HEAD.format(
        steps=figures["steps"],
        equal=counts.get("equal", 0),
        wrong=counts.get("wrong", 0) + counts.get("failed", 0),
        refused=counts.get("refused", 0),
        worst=max(row["worst"] for row in rows if row["verdict"] == "equal"),
        hashes=len(figures["initial_sha256"]),
        most=max(row["ranks"] for row in rows),
    )
    return f"{head}{matrix(rows)}\n{reasons(rows)}\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE.name} is out of date: type python tools/mix_docs.py")
    PAGE.write_text(page())
