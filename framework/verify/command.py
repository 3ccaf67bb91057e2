"""`python -m framework verify`: train under each mix and without a framework, and say which are equal."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch

from framework.errors import EXIT_OK, EXIT_RUN_FAILED, PlanError, UsageError
from framework.plan import RunPlan
from framework.verify.mixes import MESH_SLOTS, Mix, every, pairwise
from framework.verify.reference import Bounds, Distance, distances, global_norm, tensor_distances

if TYPE_CHECKING:
    from framework.testing import WorkerPool
    from framework.verify.rank import Outcome

SMALL = {"global_batch_size": "16", "sampler.shuffle": "false", "precision": "fp64", "threads": "1"}
"""What is set unless the user sets it: small, in order, and exact enough for a narrow bound."""

QUIET = {
    "accelerator": "cpu",
    "trainer.enable_progress_bar": "false",
    "trainer.limit_val_batches": "0",
    **dict.fromkeys(("checkpoint", "logs", "recovery", "logger"), "none"),
}
"""What is set in any case: one small process group on this host's CPUs, whatever the target hardware is."""

BOUNDS = Bounds()
TIMEOUT_S = 300.0
SHOWN = 8
"""Lines of a wrong mix in the table."""
SHARE = 0.02
"""By what share of the weights the first step moves them: the learning rate is chosen for that."""


@dataclass
class Row:
    """What became of a mix.

    Attributes:
        mix: its words.
        ranks: processes.
        verdict: `equal`, `wrong`, `failed` (it didn't run to its end) or `refused` (not legal).
        worst: largest relative distance from the reference, over everything that is compared.
        seconds: that it took.
        initial_sha256: of its initial weights.
        lines: what differs, or why it was refused or failed.
    """

    mix: str
    ranks: int
    verdict: str
    worst: float | None = None
    seconds: float = 0.0
    initial_sha256: str = ""
    lines: list[str] = field(default_factory=list)


def flags_of(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Take the command's own flags out of what was typed."""
    parser = argparse.ArgumentParser(
        prog="python -m framework verify",
        description="Train the composed model under a mix (or many), and hold it against a plain torch loop in one "
        "process: losses, gradient norms, first gradients, updates, buffers, initial weights.",
        epilog="Everything else is as for train: +strategy=fsdp model._target_=my_project.MyModule -cn recipe ...",
    )
    parser.add_argument(
        "--mixes",
        metavar="all|pairwise|PATTERN",
        help="all legal mixes, a cover of all pairs of words, or those that match ('*pp=zbv*'); else what is typed",
    )
    parser.add_argument("--ranks", type=int, default=8, help="the most processes that a mix may have (8)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps (5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("-cn", "--config-name", default="train")
    return parser.parse_known_args(list(words))


def main(words: Sequence[str]) -> int:
    """Run the command; return 0 if every mix that ran is equal."""
    flags, overrides = flags_of(words)
    unknown = [word for word in overrides if word.startswith("-")]
    if unknown:
        raise UsageError(f"verify has no flag {' '.join(unknown)}. Type python -m framework verify --help.")
    asked = [word for word in overrides if _slot(word) in (*MESH_SLOTS, "devices")]
    if flags.mixes and asked:
        raise UsageError(
            f"--mixes={flags.mixes} goes through many mixes and {' '.join(asked)} chooses one. Type one of the two."
        )
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        composer = _Composer(flags, [word for word in overrides if word not in asked], folder)
        rows = []
        for row in _rows(composer, flags, asked):
            rows.append(row)
            print(_line(row), file=sys.stderr if flags.json else sys.stdout, flush=True)
    if flags.json:
        print(json.dumps(_summary(rows) | {"rows": [asdict(row) for row in rows]}, indent=1))
    else:
        _print_details(rows)
    return EXIT_OK if all(row.verdict in ("equal", "refused") for row in rows) else EXIT_RUN_FAILED


class _Composer:
    """Makes the plan of a mix: its words, then what the user typed, then what a verification sets.

    Args:
        flags: of the command.
        rest: what was typed beside the mix.
        folder: that the runs may write to.
    """

    def __init__(self, flags: argparse.Namespace, rest: Sequence[str], folder: str) -> None:
        typed = {word.lstrip("+~").partition("=")[0] for word in rest}
        kept = {**{key: value for key, value in SMALL.items() if key not in typed}, **QUIET}
        kept |= {"trainer.max_steps": str(flags.steps), "run_dir": folder}
        clash = typed & kept.keys()
        if clash:
            raise UsageError(f"verify sets {', '.join(sorted(clash))} itself. Leave that out.")
        self.config_name = flags.config_name
        self.rest = [*rest, *(f"{key}={value}" for key, value in kept.items())]

    def __call__(self, words: Sequence[str], ranks: int) -> RunPlan:
        """Return the plan; `ranks` 0 = as many as the words come to. What a recipe says about the mesh is left out."""
        from framework.compose import compose

        slots = {_slot(word) for word in words}
        off = [f"{slot}=none" for slot in _with_options() if slot not in slots]
        size = [f"devices={ranks}"] if ranks else []
        return compose([*words, *off, *size, *self.rest], self.config_name)


def _slot(word: str) -> str:
    return word.lstrip("+~").partition("=")[0].partition(".")[0]


def _with_options() -> dict[str, list[str]]:
    """Return the concerns of the mesh that have any option, and the names of these."""
    from framework.catalog import NONE, catalog

    known = {slot: [name for name in catalog().of(slot) if name != NONE] for slot in MESH_SLOTS}
    return {slot: names for slot, names in known.items() if names}


def _chosen(flags: argparse.Namespace, asked: Sequence[str]) -> list[Mix]:
    """Return the mixes to go through; a typed one has 0 ranks: its words say how many."""
    if not flags.mixes:
        return [Mix(tuple(asked), 0)] if asked else []
    mixes = [mix for mix in every(_with_options(), flags.ranks) if mix.words]
    if flags.mixes in ("all", "pairwise"):
        return mixes
    found = [mix for mix in mixes if fnmatch(str(mix), flags.mixes)]
    if not found:
        raise UsageError(f"--mixes={flags.mixes} matches none of the {len(mixes)} mixes; they look like '{mixes[-1]}'.")
    return found


def _rows(composer: _Composer, flags: argparse.Namespace, asked: Sequence[str]) -> Iterator[Row]:
    """Yield a row for one process under the Trainer, then one for each mix; a refused one takes no time."""
    from framework.testing import WorkerPool
    from framework.verify import rank

    single = composer([], 1)
    plans: list[tuple[Mix, RunPlan]] = []
    for mix in _chosen(flags, asked):
        try:
            plan = composer(mix.words, mix.ranks)
        except PlanError as refused:
            yield Row(str(mix), mix.ranks, "refused", lines=str(refused).splitlines())
        else:
            plans.append((Mix(mix.words, plan.world_size), plan))
    if flags.mixes == "pairwise":
        cover = set(pairwise([mix for mix, _ in plans]))
        plans = [(mix, plan) for mix, plan in plans if mix in cover]
    with WorkerPool() as pool:
        (first, batches), *_ = pool.run(rank.begin, 1, single, flags.steps, process_group=False, timeout=TIMEOUT_S)
        lr = SHARE * global_norm(first.initial.values()) / max(first.result.grad_norms[0], 1e-12)
        model, clip = single.components["model"], single.trainer.get("gradient_clip_val")
        want, *_ = pool.run(
            rank.alone, 1, model, first.initial, batches, lr, clip, process_group=False, timeout=TIMEOUT_S
        )
        for mix, plan in [(Mix((), 1), single), *plans]:
            yield _judge(pool, mix, plan, lr, want)


def _judge(pool: WorkerPool, mix: Mix, plan: RunPlan, lr: float, want: Outcome) -> Row:
    """Train under a mix and hold it against the reference."""
    from framework.testing import RanksError
    from framework.verify import rank

    began = time.monotonic()
    row = Row(str(mix), mix.ranks, "failed")
    try:
        got, *_ = pool.run(rank.train, mix.ranks, plan, lr, process_group=False, timeout=TIMEOUT_S)
    except RanksError as error:
        row.lines = str(error).splitlines()[:3]
    else:
        found = distances(got.result, want.result, BOUNDS.floor) + _other_distances(got, want)
        row.worst = max((one.distance for one in found), default=math.inf)
        row.lines = [f"{one}{_named(one.ratio, plan)}" for one in found if not one.distance <= BOUNDS.gradient]
        row.verdict = "wrong" if row.lines else "equal"
        row.initial_sha256 = rank.sha256(got.initial)
    row.seconds = time.monotonic() - began
    return row


def _other_distances(got: Outcome, want: Outcome) -> list[Distance]:
    """Compare what isn't in a `Result`: buffers, and the initial weights, bit by bit."""
    found = tensor_distances("buffer", got.buffers, want.buffers, BOUNDS.floor)
    for name, tensor in want.initial.items():
        if name not in got.initial or not torch.equal(got.initial[name], tensor):
            found.append(Distance("initial weights", name, math.inf, 1.0))
    return found


def _named(ratio: float, plan: RunPlan) -> str:
    """Say what a ratio of norms is, if it is the size of something of the mix: a factor left out or doubled."""
    mesh, batch = plan.mesh, plan.batch
    sizes = {
        "the size of dp_replicate": mesh.dp_replicate, "the size of dp_shard": mesh.dp_shard, "the size of tp": mesh.tp,
        "the size of pp": mesh.pp, "the size of cp": mesh.cp, "the number of data ranks": mesh.data_ranks,
        "pp.microbatches": batch.microbatches, "the accumulation": batch.accumulation,
    }  # fmt: skip
    for factor, text in ((ratio, "times"), (1 / ratio if ratio else 0.0, "divided by")):
        names = [name for name, size in sizes.items() if size > 1 and math.isclose(factor, size, rel_tol=1e-6)]
        if names:
            return f" ({text} {' or '.join(names)})"
    return ""


def _line(row: Row) -> str:
    worst = "" if row.worst is None else f"{row.worst:.1e}"
    return f"{row.verdict:8} {row.ranks:2} ranks  {worst:8} {row.seconds:5.1f} s  {row.mix}"


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    counts = Counter(row.verdict for row in rows)
    hashes = {row.initial_sha256 for row in rows if row.initial_sha256}
    return {"verdicts": dict(counts), "initial_sha256": sorted(hashes), "seconds": sum(row.seconds for row in rows)}


def _print_details(rows: Sequence[Row]) -> None:
    """Print why rows aren't equal, worst first in each, and the sum of it all."""
    for row in rows:
        if row.verdict != "equal":
            print(f"\n{row.verdict}: {row.mix}")
            print("\n".join(f"  {line}" for line in row.lines[:SHOWN]))
            if len(row.lines) > SHOWN:
                print(f"  and {len(row.lines) - SHOWN} more (--json shows all)")
    summary = _summary(rows)
    said = ", ".join(f"{count} {verdict}" for verdict, count in summary["verdicts"].items())
    print(f"\n{said}; {len(summary['initial_sha256'])} hash of initial weights")
