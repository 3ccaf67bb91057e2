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
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from framework.errors import EXIT_OK, EXIT_RUN_FAILED, PlanError, UsageError
from framework.plan import RunPlan
from framework.verify.mixes import MESH_SLOTS, Mix, every, pairwise, slot_of, thinned
from framework.verify.reference import Bounds, Distance, distances, global_norm, tensor_distances, unmoved

if TYPE_CHECKING:
    from framework.blueprint import Blueprint
    from framework.testing import WorkerPool
    from framework.verify.rank import Outcome

SMALL = {"global_batch_size": "16", "threads": "1"}
"""What is set unless the user sets it; and the setting `context` of a model or data that has one."""

CONTEXT = 16
"""Tokens of a sequence, unless the user sets it: the weights are those of the whole model."""

QUIET = {
    "accelerator": "cpu",
    "sampler.shuffle": "false",
    "trainer.enable_progress_bar": "false",
    "trainer.limit_val_batches": "0",
    **dict.fromkeys(("checkpoint", "logs", "recovery", "logger"), "none"),
}
"""What is set in any case, with the precision: this host's CPUs whatever the target is, in order."""

BOUNDS = {"fp64": Bounds(), "fp32": Bounds(loss=1e-6, gradient=1e-5, update=1e-5, floor=0.1)}
"""Precision -> how near is equal. fp32 is for mixes with an option that excludes `precision=fp64`."""
TIMEOUT_S = 300.0
FORCED_S = 45.0
"""Time limit of a mix that is refused and forced: it may hang."""
COVERS = {"all": thinned, "pairwise": pairwise}
"""Word after `--mixes=` -> which of the legal mixes it means."""
GOOD = ("equal", "refused", "caught")
SHOWN = 8
"""Lines that are printed of a wrong mix."""
SHARE = 0.01
"""By what share of the weights the first step moves them: the learning rate is chosen for that."""


@dataclass
class Row:
    """What became of a mix.

    Attributes:
        mix: its words.
        ranks: processes.
        precision: that it ran in; the reference is always computed in fp64.
        verdict: `equal`, `wrong`, `failed` (it didn't run to its end) or `refused` (not legal); of a planted fault
            `caught` or `missed`; of a refused mix that was forced, `needless` if it came out equal.
        worst: largest relative distance from the reference, over everything that is compared.
        seconds: that it took.
        axes: sizes of the mesh's axes above 1, of a mix that ran; `ep` borrows its ranks from `dp_shard`.
        initial_sha256: of its initial weights in fp32.
        lines: what differs, or why it was refused or failed.
    """

    mix: str
    ranks: int
    verdict: str
    precision: str = "fp64"
    worst: float | None = None
    seconds: float = 0.0
    axes: dict[str, int] = field(default_factory=dict)
    initial_sha256: str = ""
    lines: list[str] = field(default_factory=list)


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
    from framework.testing import WorkerPool

    flags, overrides = flags_of(words)
    unknown = [word for word in overrides if word.startswith("-")]
    if unknown:
        raise UsageError(f"verify has no flag {' '.join(unknown)}. Type python -m framework verify --help.")
    asked = [word for word in overrides if slot_of(word) in (*MESH_SLOTS, "devices")]
    if flags.mixes and asked:
        raise UsageError(
            f"--mixes={flags.mixes} goes through many mixes and {' '.join(asked)} chooses one. Type one of the two."
        )
    if flags.force and not flags.mixes:
        raise UsageError("--force runs mixes that --mixes finds and the options refuse. Type --mixes=all too.")
    if flags.mutants and (overrides or flags.mixes):
        given = " ".join([*overrides, *([f"--mixes={flags.mixes}"] if flags.mixes else [])])
        raise UsageError(f"--mutants has mixes and a model of its own. Leave {given} out.")
    rows = []
    with tempfile.TemporaryDirectory(prefix="verify-") as folder, WorkerPool() as pool:
        composer = Composer(flags, [word for word in overrides if word not in asked], folder)
        oracle = Oracle(pool, composer, flags.steps)
        for row in _mutant_rows(oracle, flags.mutants) if flags.mutants else _rows(oracle, flags, asked):
            rows.append(row)
            print(_line(row), file=sys.stderr if flags.json else sys.stdout, flush=True)
    if flags.json:
        shown = [asdict(row) | {"worst": _finite(row.worst)} for row in rows]
        print(json.dumps({"steps": flags.steps} | _summary(rows) | {"rows": shown}, indent=1, allow_nan=False))
    else:
        _print_details(rows)
    ran = [row for row in rows if row.verdict != "refused"]
    enough = bool(rows) if flags.force else len(ran) > 1 or not (asked or flags.mixes)  # the first is one process
    return EXIT_OK if enough and all(row.verdict in GOOD for row in rows) else EXIT_RUN_FAILED


class Composer:
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
        clash = typed & {*kept, "precision"}
        if clash:
            raise UsageError(f"verify sets {', '.join(sorted(clash))} itself. Leave that out.")
        self.config_name = flags.config_name
        self.rest = [*rest, *(f"{key}={value}" for key, value in kept.items())]
        context = (self._one_process().values.get("model") or {}).get("context")
        if isinstance(context, int) and context > CONTEXT and not typed & {"model.context", "data.context"}:
            self.rest.append(f"model.context={CONTEXT}")

    def __call__(self, words: Sequence[str], more: Sequence[str] = (), precision: str = "") -> RunPlan:
        """Return the plan of a mix that was typed; what a recipe says about the mesh is left out.

        Args:
            words: of the mix.
            more: other words, which count more than what a verification sets.
            precision: of the run; empty = the most exact that the mix allows.
        """
        from framework.compose import compose

        slots = {slot_of(word) for word in words}
        off = [f"{slot}=none" for slot in _with_options() if slot not in slots]
        said = {word.partition("=")[0] for word in more}
        other_model = {"model", "model._target_"} & said  # which may not have the setting that was made smaller
        rest = [
            word
            for word in self.rest
            if word.partition("=")[0] not in said and not (other_model and word.startswith("model."))
        ]
        precise = f"precision={precision or self.most_exact(words)}"
        return compose([*words, *off, precise, *more, *rest], self.config_name)

    def _one_process(self) -> Blueprint:
        from framework.compose import blueprint, read

        off = [f"{slot}=none" for slot in _with_options()]
        words = [*off, "devices=1", "num_nodes=1", "precision=fp64", *self.rest]
        return blueprint(read(words, self.config_name))

    @cached_property
    def base(self) -> Blueprint:
        """One process, of which the mixes are variations."""
        return self._one_process()

    def vary(self, mix: Mix, force: bool = False) -> RunPlan:
        """Return the plan of a mix of the list: what was composed once is varied, which takes milliseconds.

        `force`: in spite of complaints, if the arithmetic allows one.
        """
        if self.base.model is None:
            self.base.plan()  # builds the model, which the variations share
        words = (*mix.words, f"precision={self.most_exact(mix.words)}")
        return self.base.vary(words, mix.ranks).plan(suggest=False, force=force)

    def options(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Return the options of the concerns of the mesh that need no setting, and the variants of each."""
        found = {slot: {name: self.base.wants(slot, name) for name in names} for slot, names in _with_options().items()}
        return {
            slot: {name: wants.variants for name, wants in options.items() if wants is not None}
            for slot, options in found.items()
        }

    def most_exact(self, words: Sequence[str]) -> str:
        """Return the precision in which a mix is verified: fp64, or fp32 if an option of it excludes that."""
        chosen = [word.lstrip("+~").partition("=") for word in words]
        wants = [self.base.wants(slot, name) for slot, _, name in chosen if slot in MESH_SLOTS]
        return "fp32" if any(one is not None and "precision=fp64" in one.excludes for one in wants) else "fp64"


def _with_options() -> dict[str, list[str]]:
    """Return the concerns of the mesh that have any option, and the names of these."""
    from framework.catalog import NONE, catalog

    known = {slot: [name for name in catalog().of(slot) if name != NONE] for slot in MESH_SLOTS}
    return {slot: names for slot, names in known.items() if names}


def _chosen(flags: argparse.Namespace, asked: Sequence[str], composer: Composer) -> list[Mix]:
    """Return the mixes to go through; a typed one has 0 ranks: its words say how many."""
    if not flags.mixes:
        return [Mix(tuple(asked), 0)] if asked else []
    mixes = [mix for mix in every(composer.options(), flags.ranks) if mix.words]
    if flags.mixes in COVERS:
        return mixes
    found = [mix for mix in mixes if fnmatch(str(mix), flags.mixes)]
    if not found:
        raise UsageError(f"--mixes={flags.mixes} matches none of the {len(mixes)} mixes; they look like '{mixes[-1]}'.")
    return found


@dataclass(frozen=True)
class Truth:
    """What a model's mixes are held against.

    Attributes:
        plan: of one process.
        lr: learning rate.
        by_rank: modules whose dropout would depend on the mix, and is switched off.
        outcome: what the reference shows.
        alone: arguments of `rank.alone`, which made it.
    """

    plan: RunPlan
    lr: float
    by_rank: set[str]
    outcome: Outcome
    alone: tuple[Any, ...]


class Oracle:
    """Trains under mixes in one set of processes, and holds each against the reference of its model and data.

    Args:
        pool: of processes.
        composer: makes plans.
        steps: optimizer steps.
    """

    def __init__(self, pool: WorkerPool, composer: Composer, steps: int) -> None:
        self.pool = pool
        self.composer = composer
        self.steps = steps
        self._truths: dict[tuple[str, ...], Truth] = {}
        self._delayed: dict[Any, Outcome] = {}

    def truth(self, more: Sequence[str] = (), precision: str = "fp64") -> Truth:
        """Return what mixes are held against; arguments of `Composer`."""
        from framework.verify import rank

        key = (*more, precision)
        if key not in self._truths:
            single = self.composer(["devices=1"], more, precision)
            first, batches, by_rank = self._run(rank.begin, single, self.steps)
            if not first.result.grad_norms[0] > 0:
                raise UsageError("The gradient of the first step is zero, so nothing can be verified: use other data.")
            # a step moves the weights by the same share of their size, whatever the model
            gradients = first.result.first_gradients
            lr = SHARE * global_norm(first.initial[name] for name in gradients) / global_norm(gradients.values())
            clip, by = (single.trainer.get(f"gradient_clip_{what}") for what in ("val", "algorithm"))
            alone = (
                single.components["model"], first, batches, by_rank, single.seed, lr, clip or None, by or "norm",
            )  # fmt: skip
            want = self._run(rank.alone, *alone)
            if still := ", ".join(unmoved(want.result, BOUNDS[precision])):
                print(f"Nothing is proven about {still}: they hardly move in {self.steps} steps.", file=sys.stderr)
            if by_rank:
                print(f"Dropout is off in {', '.join(sorted(by_rank))}: it depends on the mix.", file=sys.stderr)
            self._truths[key] = Truth(single, lr, by_rank, want, alone)
        return self._truths[key]

    def delayed(self, got: Outcome, words: frozenset[str], truth: tuple[str, ...]) -> Outcome:
        """Return what one process with the same delays shows, for a mix that gives `delayed_gradients`.

        PipeDream's delays follow from the stages, PipeDream-2BW's is one step everywhere. `truth`: the reference's key.
        """
        from framework.verify import rank

        last = max(got.stages.values())
        by_stage = "delay_by_stage" in words
        delays = {name: last - stage if by_stage else 1 for name, stage in got.stages.items()}
        key = (truth, tuple(sorted(delays.items())), "vertical_sync" in words)
        if key not in self._delayed:
            self._delayed[key] = self._run(rank.alone, *self._truths[truth].alone, delays, "vertical_sync" in words)
        return self._delayed[key]

    def judge(
        self, mix: Mix, plan: RunPlan, more: Sequence[str] = (), mutant: str = "", timeout_s: float = TIMEOUT_S
    ) -> Row:
        """Train under a mix, with a planted fault if one is named, and hold it against the reference."""
        from framework.memory import given_words
        from framework.testing import RanksError
        from framework.verify import rank

        precision = plan.chosen("precision") or "fp64"
        truth = self.truth(more, precision)
        want = truth.outcome
        bounds = BOUNDS[precision]
        allowed = {"loss of step": bounds.loss, "update": bounds.update}
        began = time.monotonic()
        axes = {axis: size for axis, size in asdict(plan.mesh).items() if size > 1}
        row = Row(mutant or str(mix), mix.ranks, "failed", precision, axes=axes)
        try:
            args = (plan, truth.lr, truth.by_rank, mutant)
            got = rank.together(self._on_all(rank.train, mix.ranks, *args, timeout_s=timeout_s))
        except RanksError as error:
            row.lines = str(error).splitlines()[:3]
        else:
            words = given_words(plan)
            if "delayed_gradients" in words:
                want = self.delayed(got, words, (*more, precision))
            found = distances(got.result, want.result, bounds.floor) + _other_distances(got, want)
            row.worst = max((math.inf if math.isnan(one.distance) else one.distance for one in found), default=math.inf)
            wrong = [one for one in found if not one.distance <= allowed.get(one.kind, bounds.gradient)]
            row.lines = [f"{one}{_named(one.ratio, plan)}" for one in wrong]
            row.verdict = "wrong" if row.lines else "equal"
            # in one precision, so that rows of several can be compared
            row.initial_sha256 = rank.sha256({name: tensor.float() for name, tensor in got.initial.items()})
        row.seconds = time.monotonic() - began
        return row

    def _run(self, function: Any, *args: Any) -> Any:
        return self._on_all(function, 1, *args)[0]

    def _on_all(self, function: Any, ranks: int, *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        return self.pool.run(function, ranks, *args, process_group=False, timeout=timeout_s)


def _rows(oracle: Oracle, flags: argparse.Namespace, asked: Sequence[str]) -> Iterator[Row]:
    """Yield a row for one process under the Trainer, then one for each mix; a refused one takes no time."""
    plans: list[tuple[Mix, RunPlan]] = []
    reasons: dict[str, Mix] = {}
    for mix in _chosen(flags, asked, oracle.composer):
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
            plans.append((Mix(mix.words, plan.world_size), plan))
    if flags.mixes in COVERS:
        cover = set(COVERS[flags.mixes]([mix for mix, _ in plans]))
        plans = [(mix, plan) for mix, plan in plans if mix in cover]
    if flags.force:
        yield from _forced_rows(oracle, reasons)
        return
    for mix, plan in [(Mix((), 1), oracle.truth().plan), *plans]:
        yield oracle.judge(mix, plan)


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


def _other_distances(got: Outcome, want: Outcome) -> list[Distance]:
    """Compare what isn't in a `Result`: buffers, copies on several ranks, and the initial weights, bit by bit."""
    shared = got.buffers.keys() & want.buffers.keys()
    same = {name for name in shared if torch.equal(got.buffers[name], want.buffers[name])}  # infinite ones too: masks
    ours, theirs = ({name: b for name, b in some.items() if name not in same} for some in (got.buffers, want.buffers))
    found = tensor_distances("buffer", ours, theirs, 0.0)
    found += [
        Distance("copy", name, apart, math.nan, f"{apart:.1e} away from rank 0's") for name, apart in got.apart.items()
    ]
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


def _finite(number: float | None) -> float | str | None:
    return number if number is None or math.isfinite(number) else "infinite"


def _line(row: Row) -> str:
    worst = "" if row.worst is None else f"{row.worst:.1e}"
    precision = "" if row.precision == "fp64" else f" (in {row.precision})"
    return f"{row.verdict:8} {row.ranks:2} ranks  {worst:8} {row.seconds:5.1f} s  {row.mix}{precision}"


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    counts = Counter(row.verdict for row in rows)
    hashes = {row.initial_sha256 for row in rows if row.initial_sha256}
    return {"verdicts": dict(counts), "initial_sha256": sorted(hashes), "seconds": sum(row.seconds for row in rows)}


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
