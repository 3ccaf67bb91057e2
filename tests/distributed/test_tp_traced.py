"""A model without a plan, trained by the Trainer over a pipeline of tensor-parallel stages."""

from __future__ import annotations

import torch
from fitting import fit
from mixes import FP64, Mix
from parity import SHAPE, Outcome, SmallGpt, initial_of, plan_of, reference_of, samples

from framework.plan import RunPlan
from framework.verify.reference import Result, disagreements, global_norm


class Unplanned(SmallGpt):
    tp_plan = None  # type: ignore[assignment]


def on_meta() -> Unplanned:
    with torch.device("meta"):
        return Unplanned(**SHAPE)


def run(plan: RunPlan) -> Outcome:
    seen = fit(plan, on_meta, samples())
    updates = {name: seen.final[name].double() - start.double() for name, start in seen.initial.items()}
    norms = [global_norm(step.values(), 2) for step in seen.gradients]
    return Outcome(Result(seen.losses, norms, seen.gradients[0], updates), seen.initial, seen.grad_norm)


def test_a_traced_plan_equals_the_reference(pool) -> None:
    mix = Mix("", 4, "tp=megatron tp.loss_parallel=true tp.check_shapes=true pp=1f1b pp.microbatches=4 activation=full")
    want, start = reference_of(pool, mix), initial_of(pool, "fp64")
    for outcome in pool.run(run, mix.ranks, plan_of(mix), process_group=False, timeout=90):
        assert disagreements(outcome.result, want, FP64) == []
        assert all(torch.equal(outcome.initial[name], tensor) for name, tensor in start.items())
