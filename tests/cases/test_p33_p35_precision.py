"""P33, P34, P35: loss scale, master weights, and losses that aren't numbers."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from fitting import fit
from lightning.pytorch import Callback
from plans import make_plan, option
from user_modules import Mlp, Scalar, regression, tokens

from framework.testing import RanksError

ONES = tokens(*[[1.0]] * 16)


class Overflow(Callback):
    """Makes the gradient infinite, before it is unscaled, in some optimizer steps; on one rank only."""

    def __init__(self, steps: tuple[int, ...], rank: int) -> None:
        self.steps, self.rank, self.seen, self.scales = steps, rank, 0, []

    def on_after_backward(self, trainer, pl_module):
        if self.seen in self.steps and trainer.global_rank == self.rank:
            pl_module.w.grad.fill_(float("inf"))
        self.seen += 1

    def on_train_batch_end(self, trainer, *_):
        self.scales.append(trainer.precision_plugin.scale.scale)


def fit_with_overflow(plan, data, rank):
    overflow = Overflow((0, 2), rank)
    module = partial(Scalar, w=1.0, lr=0.1, halve=True)
    probe = fit(plan, module, data, callbacks=[overflow], tensors=False)  # the ranks' gradients are not alike
    return probe, overflow.scales


@pytest.mark.parametrize(("strategy", "ranks", "culprit"), [(None, 1, 0), ("ddp", 2, 1), ("ddp", 2, 0)])
def test_p33_a_skipped_step_moves_nothing(pool, strategy, ranks, culprit):
    scale = option("precision", "fp16-mixed", init_scale=65536.0)
    plan = make_plan(ranks, strategy=strategy, precision="fp16-mixed", components={"precision": scale})
    data = tokens(*[[1.0]] * 4 * ranks)
    for probe, scales in pool.run(fit_with_overflow, ranks, plan, data, culprit, process_group=False):
        assert probe.final["w"].item() == pytest.approx(0.85)  # stock: 0.9375
        assert probe.rates == pytest.approx([0.1, 0.1, 0.05, 0.05])
        assert scales == [32768.0, 32768.0, 16384.0, 16384.0]
        # an attempted step consumes its samples, so Lightning counts it; the real ones are those less the skipped
        assert (probe.global_step, probe.skipped) == (4, 2)


class PipelineOverflow(Overflow):
    """The same for the weight of one stage."""

    def on_after_backward(self, trainer, pl_module):
        if self.seen in self.steps and trainer.global_rank == self.rank:
            next(p for p in pl_module.parameters() if p.grad is not None).grad.fill_(float("inf"))
        self.seen += 1


def fit_pipeline_with_overflow(plan, data, rank):
    overflow = PipelineOverflow((0, 2), rank)
    probe = fit(plan, partial(Mlp, momentum=0.0), data, callbacks=[overflow])
    return probe, overflow.scales


@pytest.mark.parametrize("stage", [0, 1])
def test_p33_an_overflow_on_one_stage_skips_the_step_on_all(pool, stage):
    scale = option("precision", "fp16-mixed", init_scale=1024.0)
    plan = make_plan(2, pp="gpipe", microbatches=2, precision="fp16-mixed", components={"precision": scale})
    for probe, scales in pool.run(fit_pipeline_with_overflow, 2, plan, regression(8), stage, process_group=False):
        assert scales == [512.0, 512.0, 256.0, 256.0]
        assert (probe.global_step, probe.skipped) == (4, 2)
        for name, weight in probe.final.items():
            assert weight.isfinite().all()
            real = probe.gradients[1][name] + probe.gradients[3][name]
            torch.testing.assert_close(weight, probe.initial[name] - 0.1 * real, rtol=1e-5, atol=1e-6)


class Five(Scalar):
    """Gradient 5 through an operation of the scaled loss."""

    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx)["loss"] * 5.0, "weight": batch["valid"].sum()}


@pytest.mark.parametrize(("strategy", "ranks"), [(None, 1), ("ddp", 2), ("fsdp", 2)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_p33_unscaled_once_then_clipped(pool, strategy, ranks, accumulation):
    """Clip before unscale: 0.000977; unscale twice: 0.0049."""
    scale = option("precision", "fp16-mixed", init_scale=1024.0)
    plan = make_plan(
        ranks,
        strategy=strategy,
        precision="fp16-mixed",
        accumulation=accumulation,
        components={"precision": scale},
        trainer={"gradient_clip_val": 1.0},
    )
    data = tokens(*[[1.0]] * plan.batch.global_batch_size)
    for probe in pool.run(fit, ranks, plan, partial(Five, lr=1.0), data, process_group=False):
        assert probe.gradients[0]["w"].item() == 5.0
        assert probe.grad_norm == 5.0
        assert probe.final["w"].item() == pytest.approx(-1.0, rel=1e-5)


class Dtypes(Callback):
    """What the weights and the optimizer's state are stored in."""

    def on_train_end(self, trainer, pl_module):
        optimizer = trainer.optimizers[0]
        self.weights = {str(p.dtype) for p in pl_module.parameters()}
        self.state = {
            str(value.dtype) for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)
        }


def fit_with_dtypes(plan, data, **options):
    dtypes = Dtypes()
    probe = fit(plan, partial(Scalar, w=1.0, lr=0.001, momentum=0.0001), data, callbacks=[dtypes], **options)
    return probe, dtypes.weights, dtypes.state


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_p34_mixed_precision_keeps_small_updates(pool, strategy):
    plan = make_plan(2, strategy=strategy, precision="bf16-mixed", trainer={"max_steps": 10, "max_epochs": -1})
    for probe, weights, state in pool.run(fit_with_dtypes, 2, plan, ONES, process_group=False):
        assert probe.final["w"].item() == pytest.approx(0.990, abs=1e-4)  # in bf16: 1.0
        assert weights == state == {"torch.float32"}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_p34_resume_goes_on_with_master_weights(pool, strategy, tmp_path):
    components = {"checkpoint": option("checkpoint", "dcp")}
    where = str(tmp_path / "at5")

    def plan(steps):
        limits = {"max_steps": steps, "max_epochs": -1}
        return make_plan(
            2, strategy=strategy, precision="bf16-mixed", run_dir=str(tmp_path), trainer=limits, components=components
        )

    pool.run(fit_with_dtypes, 2, plan(5), ONES, save_to=where, process_group=False)
    resumed = pool.run(fit_with_dtypes, 2, plan(10), ONES, ckpt_path=where, process_group=False)
    for probe, weights, state in resumed:
        assert probe.initial["w"].item() == pytest.approx(0.995, abs=1e-4)
        assert probe.final["w"].item() == pytest.approx(0.990, abs=1e-4)
        assert weights == state == {"torch.float32"}


def test_p34_true_bf16_loses_them_as_it_says(pool):
    plan = make_plan(1, precision="bf16-true", trainer={"max_steps": 10, "max_epochs": -1})
    (((probe, weights, _), warned),) = pool.run(fit_and_listen, 1, plan, ONES, process_group=False)
    assert [line for line in warned if "precision=bf16-true" in line and "precision=bf16-mixed" in line]
    assert probe.final["w"].item() == 1.0
    assert weights == {"torch.bfloat16"}


def fit_and_listen(plan, data):
    lines = []

    class Listener(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger("framework_plugins").addHandler(listener)
    try:
        return fit_with_dtypes(plan, data), lines
    finally:
        logging.getLogger("framework_plugins").removeHandler(listener)


class Bad(Scalar):
    """On one rank, in one optimizer step, the loss is NaN or missing."""

    def __init__(self, how: str, rank: int = 1, step: int = 2, **options) -> None:
        super().__init__(**options)
        self.how, self.bad_rank, self.bad_step = how, rank, step

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == self.bad_rank and batch_idx == self.bad_step:
            return None if self.how == "none" else {**output, "loss": output["loss"] * float("nan")}
        return output


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("how", ["nan", "none"])
def test_p35_raise_names_rank_and_step_on_all_ranks(pool, strategy, how):
    plan = make_plan(2, strategy=strategy, on_nonfinite="raise")
    data = tokens(*[[1.0]] * 8)
    with pytest.raises(RanksError) as error:
        pool.run(fit, 2, plan, partial(Bad, how), data, process_group=False, timeout=30)
    assert set(error.value.messages) == {0, 1}
    for message in error.value.messages.values():
        assert "rank 1" in message
        assert "step 2" in message


@pytest.mark.parametrize("strategy", ["ddp", "overlap", "fsdp"])
@pytest.mark.parametrize("how", ["nan", "none"])
def test_p35_skip_leaves_the_step_out_on_all_ranks(pool, strategy, how):
    if strategy == "overlap":
        chosen = {"strategy": option("strategy", "ddp", reduction="overlap")}
        plan = make_plan(2, strategy="ddp", components=chosen, on_nonfinite="skip")
    else:
        plan = make_plan(2, strategy=strategy, on_nonfinite="skip")
    data = tokens(*[[1.0]] * 8)
    for probe in pool.run(fit, 2, plan, partial(Bad, how, lr=0.1), data, process_group=False):
        assert probe.skipped == probe.logged["skipped_steps"] == 1
        assert probe.final["w"].item() == pytest.approx(-0.3)  # three updates of four


class BadMlp(Mlp):
    """NaN in one optimizer step, in one micro-batch, on the last stage."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 2 and bool((batch["x"] == 7.0).any()) else loss


def marked(samples):
    """Regression data in which one sample of the third global batch is the bad one."""
    data = regression(samples)
    data.columns["x"][9] = 7.0
    return data


def test_p35_raise_under_a_pipeline(pool):
    plan = make_plan(2, pp="1f1b", microbatches=2, micro_batch_size=2, on_nonfinite="raise")
    with pytest.raises(RanksError) as error:
        pool.run(fit, 2, plan, BadMlp, marked(16), process_group=False, timeout=30)
    assert set(error.value.messages) == {0, 1}
    for message in error.value.messages.values():
        assert "rank 1" in message
        assert "step 2" in message


def test_p35_skip_under_a_pipeline(pool):
    plan = make_plan(2, pp="1f1b", microbatches=2, micro_batch_size=2, on_nonfinite="skip")
    for probe in pool.run(fit, 2, plan, partial(BadMlp, momentum=0.0), marked(16), process_group=False):
        assert (probe.global_step, probe.skipped) == (4, 1)
        for name, weight in probe.final.items():
            real = sum(probe.gradients[step][name] for step in (0, 1, 3))
            torch.testing.assert_close(weight, probe.initial[name] - 0.1 * real, rtol=1e-5, atol=1e-6)
