"""What decides whether a mix is right: `Composer` makes its plan, `Oracle` trains under it and without a framework."""

from __future__ import annotations

import argparse
import math
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from framework.errors import UsageError
from framework.plan import RunPlan
from framework.verify.mixes import MESH_SLOTS, Mix, slot_of
from framework.verify.reference import Bounds, Distance, distances, global_norm, tensor_distances, unmoved

if TYPE_CHECKING:
    from framework.blueprint import Blueprint
    from framework.testing import WorkerPool
    from framework.verify.pools import Pools
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
        seconds: that it took, beside others perhaps.
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
        pool: of processes; with `Pools` several threads may ask.
        composer: makes plans.
        steps: optimizer steps.
    """

    def __init__(self, pool: WorkerPool | Pools, composer: Composer, steps: int) -> None:
        self.pool = pool
        self._lock = threading.Lock()
        self.composer = composer
        self.steps = steps
        self._truths: dict[tuple[str, ...], Truth] = {}
        self._delayed: dict[Any, Outcome] = {}

    def truth(self, more: Sequence[str] = (), precision: str = "fp64") -> Truth:
        """Return what mixes are held against; arguments of `Composer`."""
        with self._lock:
            return self._truth(more, precision)

    def _truth(self, more: Sequence[str], precision: str) -> Truth:
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
        with self._lock:
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
