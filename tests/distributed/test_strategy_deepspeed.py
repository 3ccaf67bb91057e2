"""`strategy=deepspeed` equals one process: fp32, which is all that its engine has, so the bounds are those of fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import fit
from mixes import ACC2, ACC4, BF16_TRUE, CLIP, Mix
from parity import SHAPE, SmallGpt, equal_to_reference, initial_of, outcomes_of, reference_of, samples
from plans import make_plan, option
from test_resume_matrix import MATRIX
from user_modules import Mlp, Scalar, gathered, loader, regression, tokens

from framework.plan import RunPlan
from framework.testing import RanksError
from framework.trainer import Trainer
from framework.verify.reference import Bounds, Result, disagreements, train

pytestmark = pytest.mark.slow

ZERO = "strategy=deepspeed strategy.stage="
OFFLOAD = "strategy.offload_optimizer=cpu"
MIXES = [
    Mix("stage 0, accumulation, clip", 2, f"precision=fp32 {ZERO}0 {ACC4} {CLIP}"),
    Mix("stage 1, full AC, clip", 2, f"precision=fp32 {ZERO}1 activation=full {CLIP}"),
    Mix("stage 2, accumulation, clip", 2, f"precision=fp32 {ZERO}2 {ACC4} {CLIP}"),
    Mix("stage 2, offload, accumulation, clip", 2, f"precision=fp32 {ZERO}2 {OFFLOAD} {ACC2} {CLIP}"),
    Mix("stage 3, 4 ranks, accumulation, clip", 4, f"precision=fp32 {ZERO}3 {ACC2} {CLIP}"),
    Mix("stage 3, offload, AC", 2, f"precision=fp32 {ZERO}3 {OFFLOAD} strategy.offload_parameters=cpu activation=full"),
    Mix("bf16-mixed, stage 2", 2, f"precision=bf16-mixed {ZERO}2"),
]
"""Samples have between 1 and 8 valid tokens: ranks and micro-batches weigh differently."""


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_mix_equals_the_reference(pool: Any, mix: Mix) -> None:
    want, outcomes = equal_to_reference(pool, mix)
    if mix.clip[0] is not None:
        assert outcomes[0].grad_norm == pytest.approx(want.grad_norms[-1], rel=1e-5)


def test_bf16_weights_have_masters_in_fp32(pool: Any) -> None:
    """So its updates are those of `bf16-mixed`, from weights that began rounded to bf16, and none is rounded away."""
    (got, *_) = outcomes_of(pool, Mix("", 2, f"precision=bf16-true {ZERO}3"))
    want = reference_of(pool, Mix("", 1, "precision=bf16-mixed"))
    assert disagreements(got.result, want, BF16_TRUE) == []
    start = initial_of(pool, "bf16-true")
    assert all(torch.equal(tensor, start[name].float()) for name, tensor in got.initial.items())


class Adam(SmallGpt):
    """AdamW, whose state has numbers beside tensors, and a schedule."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def end_of(plan: RunPlan, save_to: str | None, start: str | None) -> tuple[dict[str, torch.Tensor], float]:
    """Called on every rank: weights at the end, and the validation loss then."""
    with torch.device("meta"):
        model = Adam(**SHAPE)
    trainer = Trainer(plan)
    size = plan.batch.local_batch_size
    trainer.fit(model, loader(samples(), size), loader(samples(), 5), ckpt_path=start)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return gathered(trainer.strategy.named_parameters()), float(trainer.callback_metrics["val_loss"])


def run(pool: Any, words: str, ranks: int, steps: int, folder: Path, save_to: Any = None, start: Any = None) -> Any:
    plan = MATRIX.plan_of(Mix("", ranks, f"precision=fp32 {words}".strip()), steps, folder)
    paths = [None if path is None else str(path) for path in (save_to, start)]
    return pool.run(end_of, ranks, plan, *paths, process_group=False, timeout=90)[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [(f"{ZERO}3", "strategy=fsdp"), ("strategy=ddp", f"{ZERO}2 {OFFLOAD}"), (f"{ZERO}1", f"{ZERO}3")],
)
def test_a_run_goes_on_under_another_mix(pool: Any, tmp_path: Path, before: str, after: str) -> None:
    """Weights, AdamW's state, schedule and data position; validation gives the same number."""
    weights, val_loss = run(pool, "", 1, MATRIX.steps, tmp_path)
    run(pool, before, 2, MATRIX.stop, tmp_path, save_to=tmp_path / "saved")
    got, later = run(pool, after, 2, MATRIX.steps, tmp_path, start=tmp_path / "saved")
    assert later == pytest.approx(val_loss, rel=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-4, atol=1e-5)


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


class OneRankOnly(Mlp):
    """A layer that only rank 0 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + self.extra(x) if torch.distributed.get_rank() == 0 else y


def test_a_parameter_without_gradient_is_named(pool: Any) -> None:
    """DeepSpeed itself aborts the process, or adds gradients of different parameters of one size (P23).

    In stage 3 it is the forward that waits: rank 0 gathers a layer that rank 1 never asks for (docs/deepspeed.md).
    """
    with pytest.raises(RanksError, match=r"extra\.weight, extra\.bias got no gradient on rank 1"):
        pool.run(fit, 2, zero(2, micro_batch_size=4), OneRankOnly, regression(samples=24), process_group=False)
