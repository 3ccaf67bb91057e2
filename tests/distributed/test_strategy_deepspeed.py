"""`strategy=deepspeed` equals one process: fp32, which is all that its engine has, so the bounds are those of fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_resume_matrix as resume
import torch
from fitting import fit
from mixes import ACC4, CLIP, Mix
from parity import initial_of, outcomes_of, reference_of
from plans import make_plan, option
from user_modules import Mlp, Scalar, loader, regression, tokens

from framework.verify.reference import Bounds, Result, disagreements, train

pytestmark = pytest.mark.slow

ZERO = "strategy=deepspeed strategy.stage="
OFFLOAD = "strategy.offload_optimizer=cpu"
MIXES = [
    Mix("stage 0, accumulation, clip", 2, f"precision=fp32 {ZERO}0 {ACC4} {CLIP}"),
    Mix("stage 1, full AC, clip", 2, f"precision=fp32 {ZERO}1 activation=full {CLIP}"),
    Mix("stage 2, accumulation, clip", 2, f"precision=fp32 {ZERO}2 {ACC4} {CLIP}"),
    Mix("stage 2, offload, accumulation, clip", 2, f"precision=fp32 {ZERO}2 {OFFLOAD} {ACC4} {CLIP}"),
    Mix("stage 3, accumulation, clip, full AC", 4, f"precision=fp32 {ZERO}3 {ACC4} {CLIP} activation=full"),
    Mix("stage 3, all offloaded", 2, f"precision=fp32 {ZERO}3 {OFFLOAD} strategy.offload_parameters=cpu"),
    Mix("bf16-mixed, stage 2", 2, f"precision=bf16-mixed {ZERO}2"),
    Mix("bf16-true, stage 3", 2, f"precision=bf16-true {ZERO}3"),
]
"""Samples have between 1 and 8 valid tokens: ranks and micro-batches weigh differently."""


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_mix_equals_the_reference(pool: Any, mix: Mix) -> None:
    want = reference_of(pool, mix)
    outcomes = outcomes_of(pool, mix)
    for rank, outcome in enumerate(outcomes):
        assert disagreements(outcome.result, want, mix.bounds) == [], f"rank {rank}"
    start = initial_of(pool, mix.settings["precision"])
    assert {name for name, tensor in outcomes[0].initial.items() if not torch.equal(tensor, start[name])} == set()
    if mix.clip[0] is not None:
        assert outcomes[0].grad_norm == pytest.approx(want.grad_norms[-1], rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [("strategy=deepspeed strategy.stage=3", "strategy=fsdp"), ("strategy=ddp", "strategy=deepspeed strategy.stage=2")],
)
def test_a_run_goes_on_under_another_mix(pool: Any, tmp_path: Path, before: str, after: str) -> None:
    """Weights, momentum, schedule and data position."""
    saved = tmp_path / "saved"
    first, second = (Mix(words, 2, f"precision=fp32 {words}") for words in (before, after))
    weights, losses, _ = resume.run(pool, Mix("one", 1, "precision=fp32"), resume.STEPS, tmp_path)
    resume.run(pool, first, resume.STOP, tmp_path, save_to=saved)
    got, later, steps = resume.run(pool, second, resume.STEPS, tmp_path, start=saved)
    assert steps == resume.STEPS
    assert later == pytest.approx(losses[resume.STOP :], rel=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-5, atol=1e-6)


def zero(stage: int, **fields: Any) -> Any:
    """A plan of 2 ranks by hand: batches of 1 sample."""
    component = option("strategy", "deepspeed", stage=stage)
    return make_plan(2, strategy="fsdp", components={"strategy": component}, **fields)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_module_with_weights_of_its_own(pool: Any, stage: int) -> None:
    """Built for real on every rank, not on the meta device."""
    data = regression(samples=24)
    want = train(Mlp(), [[batch] for batch in loader(data, 8)], _mean_squared_error, lr=0.1, momentum=0.9)
    for probe in pool.run(fit, 2, zero(stage, micro_batch_size=4), Mlp, data, process_group=False):
        updates = {name: probe.final[name] - start for name, start in probe.initial.items()}
        got = Result(losses=probe.losses, first_gradients=probe.gradients[0], updates=updates)
        got.grad_norms = want.grad_norms
        assert disagreements(got, want, Bounds(1e-6, 1e-5, 1e-5)) == []


def _mean_squared_error(model: Mlp, batch: Any) -> tuple[torch.Tensor, int]:
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"]), len(batch["x"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_uneven_tokens_and_a_micro_batch_without_any(pool: Any, stage: int) -> None:
    """P07 by hand: micro-batches of 1, 2, 0 and 3 tokens; the gradient is the mean of all 6, 6.5, and lr is 0.1."""
    data = tokens([2.0], [4.0, 6.0], [], [5.0, 8.0, 14.0])
    for seen in pool.run(fit, 2, zero(stage, accumulation=2), Scalar, data, process_group=False):
        assert seen.gradients[0]["w"].item() == pytest.approx(6.5)
        assert seen.final["w"].item() == pytest.approx(-0.65)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_whose_loss_is_not_finite_is_left_out(pool: Any, stage: int) -> None:
    """Step 2 of 3 is skipped on all ranks, with the gradients of its good micro-batches."""
    good, bad = [1.0], [float("inf")]
    data = tokens(good, good, good, good, good, good, good, bad, good, good, good, good)
    plan = zero(stage, accumulation=2, on_nonfinite="skip")
    for seen in pool.run(fit, 2, plan, Scalar, data, process_group=False):
        assert seen.skipped == 1
        assert seen.final["w"].item() == pytest.approx(-0.2)
