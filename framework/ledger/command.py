"""`python -m framework ledger RUN [RUN...]`: was every sample trained once, and by these runs in the same order?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from framework.errors import EXIT_OK, EXIT_RUN_FAILED, UsageError
from framework.guide import PROGRAM
from framework.ledger.history import Finding, History, check, first_difference, history, read

SHOWN = 5


def main(words: Sequence[str]) -> int:
    """Run the command; return 0 if each history is whole and all are the same.

    Args:
        words: folders of runs. Runs that went on from one another are one history; others are compared with the first.
    """
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} ledger", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    flags = parser.parse_args(list(words))
    folders = list(dict.fromkeys(Path(run).resolve() for run in flags.runs))
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: there is no such folder.")
    segments = [segment for folder in folders for segment in read(folder)]
    segments.sort(key=lambda segment: float(segment.head["time"]))
    found = [history(folder, segments) for folder in folders]
    # a run that another one went on from is part of that one's history
    inner = {part.run_dir for story, _ in found for part in story.segments if part.run_dir != story.run_dir}
    found = [(story, findings) for story, findings in found if story.run_dir not in inner]
    told = [_tell(story, [*findings, *check(story)]) for story, findings in found]
    for (other, _), row in zip(found[1:], told[1:], strict=True):
        different = first_difference(found[0][0], other)
        row["first_difference"] = None if different is None else asdict(different)
    good = not any(row["findings"] or row.get("first_difference") for row in told)
    if flags.json:
        print(json.dumps({"good": good, "histories": told}, indent=1))
    else:
        for row in told:
            _show(row)
    return EXIT_OK if good else EXIT_RUN_FAILED


def _tell(story: History, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return one history in plain data."""
    steps = story.steps
    written = [records[step] for segment, step in steps for records in segment.records.values() if step in records]
    last, at = steps[-1] if steps else (story.segments[-1], 0)
    ends = [records[at] for records in last.records.values() if at in records]
    ranks = [str(number) for number, _ in groupby(segment.head["data_ranks"] for segment in story.segments)]
    return {
        "runs": [str(folder) for folder in dict.fromkeys(segment.run_dir for segment in story.segments)],
        "attempts": len(story.segments),
        "data_ranks": " -> ".join(ranks),
        "steps": len(steps),
        "epochs": 1 + ends[0].epoch if ends else 0,
        "samples": sum(len(record.samples) // 8 for record in written),
        "steps_made_again": story.left,
        "chain": ends[0].chain if ends else last.head["chain"],
        "findings": [asdict(finding) for finding in findings],
    }


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _show(row: dict[str, Any]) -> None:
    print(" + ".join(row["runs"]))
    again = f", {_many(row['steps_made_again'], 'step')} made again after a restart" if row["steps_made_again"] else ""
    print(
        f"  {_many(row['steps'], 'step')}, {_many(row['samples'], 'sample')} of {_many(row['epochs'], 'epoch')}; "
        f"{_many(row['attempts'], 'attempt')}, data ranks {row['data_ranks']}{again}; chain {row['chain']}"
    )
    findings = row["findings"]
    for finding in findings[:SHOWN]:
        print(f"  step {finding['step']}: {finding['text']}")
    if len(findings) > SHOWN:
        print(f"  and {len(findings) - SHOWN} more (--json shows all)")
    if not findings:
        print("  Nothing was trained twice, nothing was left out, and the chain holds.")
    if "first_difference" in row:
        different = row["first_difference"]
        print(
            "  The same samples in the same order as the first run, as far as both go."
            if different is None
            else f"  First difference, at step {different['step']}: {different['text']}"
        )
