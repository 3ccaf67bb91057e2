"""`python -m framework verify`: train under each mix and without a framework, and say which are equal."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatch
from itertools import groupby
from typing import Any

from framework.errors import EXIT_OK, EXIT_RUN_FAILED, PlanError, UsageError
from framework.plan import RunPlan
from framework.verify.mixes import MESH_SLOTS, Mix, every, pairwise, slot_of, thinned
from framework.verify.oracle import Composer, Oracle, Row
from framework.verify.pools import Pools

FORCED_S = 45.0
"""Time limit of a mix that is refused and forced: it may hang."""
COVERS = {"all": thinned, "pairwise": pairwise}
"""Word after `--mixes=` -> which of the legal mixes it means."""
GOOD = ("equal", "refused", "caught")
SHOWN = 8
"""Lines that are printed of a wrong mix."""


def flags_of(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Take the command's own flags out of what was typed."""
    parser = argparse.ArgumentParser(
        prog="python -m framework verify",
        allow_abbrev=False,
        description="Train the composed model under a mix (or many), and hold it against a plain torch loop in one "
        "process: losses, gradient norms, first gradients, updates, buffers, initial weights.",
        epilog="Everything else is as for train: +strategy=fsdp model._target_=my_project.MyModule -cn recipe ...",
    )
    parser.add_argument(
        "--mixes",
        metavar="all|pairwise|PATTERN",
        help="all: each option alone, each pair of options of two concerns, some mixes of three; pairwise: few mixes "
        "in which each pair stands; those that match ('*pp=zbv*'; '*' = every one)",
    )
    parser.add_argument(
        "--mutants",
        nargs="?",
        const="*",
        metavar="PATTERN",
        help="plant classic faults (those whose names match) one by one; each must be caught",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="of each reason for a refusal run one mix all the same: it must fail or come out wrong",
    )
    parser.add_argument("--ranks", type=int, default=8, help="the most processes that a mix may have (8)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps (5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("-cn", "--config-name", metavar="NAME", default="train", help="start from a recipe")
    return parser.parse_known_args(list(words))


def main(words: Sequence[str]) -> int:
    """Run the command; return 0 if every mix that ran is equal, and every mutant caught."""
    flags, overrides = flags_of(words)
    unknown = [word for word in overrides if word.startswith("-")]
    if unknown:
        raise UsageError(f"verify has no flag {' '.join(unknown)}. Type python -m framework verify --help.")
    asked = [word for word in overrides if slot_of(word) in (*MESH_SLOTS, "devices")]
    if flags.mixes and asked:
        raise UsageError(
            f"--mixes={flags.mixes} goes through many mixes and {' '.join(asked)} chooses one. Type one of the two."
        )
    if flags.steps < 1:
        raise UsageError(f"--steps {flags.steps}: a mix is judged by its steps. Type --steps 1, or more.")
    if flags.force and not flags.mixes:
        raise UsageError("--force runs mixes that --mixes finds and the options refuse. Type --mixes=all too.")
    if flags.mutants and (overrides or flags.mixes):
        given = " ".join([*overrides, *([f"--mixes={flags.mixes}"] if flags.mixes else [])])
        raise UsageError(f"--mutants has mixes and a model of its own. Leave {given} out.")
    others = [word for word in overrides if word not in asked]
    for line in _notes(flags, others):
        print(line, file=sys.stderr)
    rows = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="verify-") as folder, Pools() as pools:
        composer = Composer(flags, others, folder)
        oracle = Oracle(pools, composer, flags.steps)
        for row in _mutant_rows(oracle, flags.mutants) if flags.mutants else _rows(oracle, pools, flags, asked, others):
            rows.append(row)
            print(_line(row), file=sys.stderr if flags.json else sys.stdout, flush=True)
    if flags.json:
        shown = [asdict(row) | {"worst": _finite(row.worst)} for row in rows]
        about = {"typed": others, "steps": flags.steps, "seconds": time.monotonic() - began}
        print(json.dumps(about | _summary(rows) | {"rows": shown}, indent=1, allow_nan=False))
    else:
        _print_details(rows)
    ran = [row for row in rows if row.verdict != "refused"]
    enough = bool(rows) if flags.force else len(ran) > 1 or not (asked or flags.mixes)  # the first is one process
    return EXIT_OK if enough and all(row.verdict in GOOD for row in rows) else EXIT_RUN_FAILED


def _notes(flags: argparse.Namespace, others: Sequence[str]) -> Iterator[str]:
    """Yield what must be said of the words that aren't of the mesh: those of many mixes are in no row of theirs."""
    if flags.mixes and others:
        yield f"Every mix with {' '.join(others)}."
    if unread := " ".join(word for word in others if slot_of(word) == "optimizer"):
        yield f"{unread} isn't verified: every mix is trained with SGD and momentum."


def _chosen(flags: argparse.Namespace, asked: Sequence[str], alone: Mix, composer: Composer) -> list[Mix]:
    """Return the mixes to go through; a typed one has 0 ranks: its words say how many. `alone`: one process."""
    if not flags.mixes:
        return [replace(alone, words=tuple(asked), ranks=0)] if asked else []
    mixes = [mix for mix in every(composer.options(), flags.ranks) if mix.words]
    if not mixes:
        raise UsageError(f"--ranks {flags.ranks}: no mix has so few processes. Type --ranks 2, or more.")
    if flags.mixes in COVERS:
        return mixes
    found = [mix for mix in mixes if fnmatch(str(mix), flags.mixes)]
    if not found:
        raise UsageError(f"--mixes={flags.mixes} matches none of the {len(mixes)} mixes; they look like '{mixes[-1]}'.")
    return found


def _rows(
    oracle: Oracle, pools: Pools, flags: argparse.Namespace, asked: Sequence[str], others: Sequence[str]
) -> Iterator[Row]:
    """Yield a row for one process under the Trainer, then one for each mix; a refused one takes no time."""
    alone = Mix((), 1, () if flags.mixes else tuple(others))
    plans: list[tuple[Mix, RunPlan]] = []
    reasons: dict[str, Mix] = {}
    for mix in _chosen(flags, asked, alone, oracle.composer):
        try:
            plan = oracle.composer.vary(mix) if flags.mixes else oracle.composer(mix.words)
        except PlanError as refused:
            if not flags.mixes:
                raise
            lines = str(refused).splitlines()
            reasons.setdefault(lines[0], mix)
            if not flags.force:
                yield Row(str(mix), mix.ranks, "refused", lines=lines)
        else:
            plans.append((replace(mix, ranks=plan.world_size), plan))
    if flags.mixes in COVERS:
        cover = set(COVERS[flags.mixes]([mix for mix, _ in plans]))
        plans = [(mix, plan) for mix, plan in plans if mix in cover]
    if flags.force:
        yield from _forced_rows(oracle, reasons)
        return
    mixes = [(alone, oracle.truth().plan), *plans]
    for ranks, alike in groupby(mixes, lambda one: one[0].ranks):
        # mixes of few ranks run side by side: no more processes at once than one mix may have
        yield from pools.side_by_side(max(1, flags.ranks // ranks), lambda one: oracle.judge(*one), alike)


def _forced_rows(oracle: Oracle, reasons: Mapping[str, Mix]) -> Iterator[Row]:
    """Yield for each reason what became of its mix: `refused` with good cause, or `needless`."""
    for reason, mix in reasons.items():
        try:
            plan = oracle.composer.vary(mix, force=True)
        except PlanError:
            yield Row(str(mix), mix.ranks, "refused", lines=[reason, "There is no plan that could be forced."])
            continue
        row = oracle.judge(mix, plan, timeout_s=FORCED_S)
        row.lines = [reason, f"Forced, it is {row.verdict}.", *row.lines]
        row.verdict = "needless" if row.verdict == "equal" else "refused"
        yield row


def _mutant_rows(oracle: Oracle, pattern: str) -> Iterator[Row]:
    """Yield for each mutant its mix without the fault (once), then with it: `caught` or `missed`."""
    from framework.verify.mutants import MUTANTS

    chosen = [mutant for mutant in MUTANTS if fnmatch(mutant.name, pattern)]
    if not chosen:
        names = ", ".join(f"'{mutant.name}'" for mutant in MUTANTS[:3])
        raise UsageError(f"--mutants={pattern} matches none of {len(MUTANTS)} faults; they are called {names}, ...")
    healthy: set[tuple[str, ...]] = set()
    for mutant in chosen:
        words = mutant.words.split()
        of_mesh = tuple(word for word in words if slot_of(word) in MESH_SLOTS)
        more = (*mutant.base, *(word for word in words if word not in of_mesh))
        plan = oracle.composer([*of_mesh, *(["devices=4"] if "strategy.replicas=2" in of_mesh else [])], more)
        mix = Mix(of_mesh, plan.world_size)
        if (*of_mesh, *more) not in healthy:
            healthy.add((*of_mesh, *more))
            row = oracle.judge(mix, plan, more)
            row.mix = mutant.words
            yield row
        row = oracle.judge(mix, plan, more, mutant.name)
        row.verdict = {"equal": "missed", "wrong": "caught"}.get(row.verdict, row.verdict)
        row.mix += f" ({mutant.words})"
        yield row


def _finite(number: float | None) -> float | str | None:
    return number if number is None or math.isfinite(number) else "infinite"


def _line(row: Row) -> str:
    worst = "" if row.worst is None else f"{row.worst:.1e}"
    precision = "" if row.precision == "fp64" else f" (in {row.precision})"
    return f"{row.verdict:8} {row.ranks:2} ranks  {worst:8} {row.seconds:5.1f} s  {row.mix}{precision}"


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    counts = Counter(row.verdict for row in rows)
    hashes = {row.initial_sha256 for row in rows if row.initial_sha256}
    return {"verdicts": dict(counts), "initial_sha256": sorted(hashes)}


def _print_details(rows: Sequence[Row]) -> None:
    """Print why rows aren't equal, worst first in each, and the sum of it all."""
    for row in rows:
        if row.verdict not in ("equal", "caught"):
            print(f"\n{row.verdict}: {row.mix}")
            print("\n".join(f"  {line}" for line in row.lines[:SHOWN]))
            if len(row.lines) > SHOWN:
                print(f"  and {len(row.lines) - SHOWN} more (--json shows all)")
    summary = _summary(rows)
    said = ", ".join(f"{count} {verdict}" for verdict, count in summary["verdicts"].items())
    print(f"\n{said}; {len(summary['initial_sha256'])} hash of initial weights")
