"""One family in so many stages, held against one process that knows no framework."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from families import Family, samples
from fitting import fit
from plans import make_plan
from user_modules import loader

from framework.plan import RunPlan
from framework.survey import cuts, dearest, stage_costs, survey
from framework.testing import WorkerPool
from framework.verify.reference import Bounds, Result, disagreements, distances, global_norm, train
from framework_plugins.pp.schedules import Schedule

STEPS, MICRO, MICROBATCHES = 3, 2, 4


@dataclass
class Row:
    """What a family showed in so many stages; `refused` says why there is nothing else."""

    family: str
    stages: int
    cut: list[str] = field(default_factory=list)
    dearest: float = 0.0
    worst: float = 0.0
    lines: list[str] = field(default_factory=list)
    refused: str = ""


def family_plan(stages: int, **fields: Any) -> RunPlan:
    """Return a plan of one pipeline of `stages` ranks."""
    plan = make_plan(
        stages,
        pp="gpipe",
        stages=stages,
        microbatches=MICROBATCHES,
        micro_batch_size=MICRO,
        precision="fp64",
        trainer={"max_steps": STEPS},
    )
    return plan.with_(components={**plan.components, "pp": {**plan.components["pp"], **fields}})


def built(family: Family) -> Any:
    """Build the module as `fit` does."""
    torch.manual_seed(0)
    return family.make()


def reference(family: Family) -> Result:
    """Train in one process; a family with batch norm on the same micro-batches."""
    return trained(family)[1]


def trained(family: Family) -> tuple[Any, Result]:
    """As `reference`; returns the trained module too."""
    module = built(family).double()
    size = MICRO * (1 if family.batch_norm else MICROBATCHES)
    pieces = list(loader(samples(STEPS * MICRO * MICROBATCHES), size))
    each = MICROBATCHES if family.batch_norm else 1
    module.log = lambda *args, **kwargs: None

    def loss_of(model: Any, batch: Any) -> tuple[torch.Tensor, float]:
        return model.training_step(batch, 0), float(len(batch["ids"]))

    torch.set_default_dtype(torch.float64)
    try:
        steps = [pieces[at : at + each] for at in range(0, len(pieces), each)]
        return module, train(module, steps, loss_of, lr=0.05, momentum=0.9)
    finally:
        torch.set_default_dtype(torch.float32)


def outcome(plan: RunPlan, family: Family) -> tuple[Result, dict[str, torch.Tensor]]:
    """Train as one rank of `plan`; what it showed, and its buffers."""
    kept: list[Any] = []

    def make() -> Any:
        kept.append(family.make())
        return kept[0]

    seen = fit(plan, make, samples(STEPS * MICRO * MICROBATCHES))
    updates = {name: seen.final[name] - start for name, start in seen.initial.items()}
    norms = [global_norm(step.values()) for step in seen.gradients]
    return Result(seen.losses, norms, seen.gradients[0], updates), {n: b.clone() for n, b in kept[0].named_buffers()}


def row(pool: WorkerPool, family: Family, stages: int, **fields: Any) -> Row:
    """Run a family; refused, or compared on every rank."""
    result = Row(family.name, stages)
    plan = family_plan(stages, **fields)
    option = Schedule(schedule="gpipe", size=stages, microbatches=MICROBATCHES, **fields)
    module = built(family)
    problems = option.check_model(plan, module)
    if problems:
        result.refused = " ".join(map(str, problems))
        return result
    found = survey(copy.deepcopy(module).double(), next(iter(loader(samples(MICRO), MICRO))))
    chosen = cuts(found.costs("flops"), stages, found.sent)
    result.cut = [str(found.marks[segment]) for segment in chosen]
    costs = found.costs("flops")
    result.dearest = max(stage_costs(costs, chosen)) / dearest(costs, stages, found.sent)
    model, want = trained(family)
    buffers = dict(model.named_buffers())
    for got, theirs in pool.run(outcome, stages, plan, family, process_group=False, timeout=120):
        result.lines += disagreements(got, want, Bounds())
        result.worst = max([result.worst, *(one.distance for one in distances(got, want, Bounds().floor))])
        result.lines += [name for name, b in theirs.items() if not torch.allclose(b, buffers[name], 1e-9, 1e-12)]
    return result
