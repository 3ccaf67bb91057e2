"""Ways of being silently wrong: each has a guard, and here each guard is taken out once to see that its check notices.

(1) Schedules that split the backward, with parameters resharded after the forward; (2) Lightning's zero_grad between a
pipeline's passes and `backward`; (3) torch's extra call of the last stage on the first step; (4) a precision that isn't
the one asked for; (5) Trainer arguments that a strategy doesn't implement; (6) a frozen stage before a split backward.
"""

from __future__ import annotations

import pytest
import torch
from fitting import fit
from lightning.pytorch import Callback, LightningModule
from mixes import FP64, Mix
from parity import outcome_of, plan_of, reference_of, run
from plans import make_plan
from torch import nn
from user_modules import Mlp, regression

from framework import FrameworkError
from framework.trainer import Trainer
from framework.verify.reference import disagreements


# -- 1 ---------------------------------------------------------------------------------------------------------------
def run_resharding(plan):
    """Without the guard of strategy=fsdp: parameters are freed after each forward although there is a pipeline."""
    from torch.distributed import fsdp

    original = fsdp.fully_shard

    def reshard(module, **options):
        return original(module, **{**options, "reshard_after_forward": True})

    fsdp.fully_shard = reshard
    try:
        return run(plan)
    finally:
        fsdp.fully_shard = original


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv", "dualpipev"])
def test_split_backward_needs_parameters_that_stay(pool, schedule):
    mix = Mix("", 4, f"strategy=fsdp pp={schedule} pp.microbatches=4")
    assert disagreements(outcome_of(pool, mix).result, reference_of(pool, mix), FP64) == []
    wrong = pool.run(run_resharding, 4, plan_of(mix), process_group=False)[0]
    lines = disagreements(wrong.result, reference_of(pool, mix), FP64)
    assert [line for line in lines if line.startswith("first gradient")], "torch was mended: the guard may go"


# -- 6 ---------------------------------------------------------------------------------------------------------------
class Frozen(Mlp):
    """Four blocks, the first of which doesn't learn."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(9)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
        self.layers[0].requires_grad_(False)


def fit_without_asking_for_input_gradients(plan, data):
    """Without the guard of `Stage`: what a frozen stage sends on asks for no gradient."""
    from framework import stages

    original, stages._differentiable = stages._differentiable, lambda tensor: tensor
    try:
        return fit(plan, Frozen, data)
    finally:
        stages._differentiable = original


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv", "dualpipev"])
def test_split_backward_behind_a_frozen_stage(pool, schedule):
    plan = make_plan(2, pp=schedule, microbatches=4, micro_batch_size=2)
    data = regression(40)
    (truth,) = pool.run(fit, 1, make_plan(1, micro_batch_size=8), Frozen, data, process_group=False)
    right, wrong = (
        pool.run(f, 2, plan, *a, process_group=False)[0].gradients[0]
        for f, a in ((fit, (Frozen, data)), (fit_without_asking_for_input_gradients, (data,)))
    )
    learning = {name: gradient for name, gradient in truth.gradients[0].items() if not name.startswith("layers.0")}
    for name, gradient in learning.items():
        torch.testing.assert_close(right[name], gradient, rtol=1e-5, atol=1e-7)
    second = [name for name in learning if name.startswith("layers.1")]
    assert second
    assert not all(name in wrong and torch.allclose(wrong[name], learning[name], rtol=1e-3) for name in second)


# -- 2 ---------------------------------------------------------------------------------------------------------------
def run_without_setting_aside(plan):
    """Without the guard of `Pipeline`: what the schedule left in `grad` is gone after zero_grad."""
    from framework.pipeline import Pipeline

    original, Pipeline.merge_gradients = Pipeline.merge_gradients, lambda self: None
    try:
        return run(plan)
    finally:
        Pipeline.merge_gradients = original


def test_gradients_of_a_pipeline_survive_zero_grad(pool):
    mix = Mix("", 2, "pp=gpipe pp.microbatches=4")
    assert disagreements(outcome_of(pool, mix).result, reference_of(pool, mix), FP64) == []
    wrong = pool.run(run_without_setting_aside, 2, plan_of(mix), process_group=False)[0]
    lines = disagreements(wrong.result, reference_of(pool, mix), FP64)
    assert [line for line in lines if line.startswith("first gradient")]
    assert [line for line in lines if line.startswith("update")]


# -- 3 ---------------------------------------------------------------------------------------------------------------
class Counting(Mlp):
    """Logs 1 a micro-batch, summed: the number of times that a step was counted."""

    calls = 0

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        self.calls += 1
        self.log("counted", 1.0, reduce_fx="sum")
        return output


class Watch(Callback):
    """What was logged in each step, and how often the step method ran."""

    def __init__(self) -> None:
        self.logged, self.calls = [], []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.logged.append(float(trainer.callback_metrics["counted"]))
        self.calls.append(pl_module.calls)


def count(plan, data):
    watch = Watch()
    fit(plan, Counting, data, callbacks=[watch])
    return watch.logged, watch.calls


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_first_step_of_a_pipeline_is_counted_once(pool, schedule):
    plan = make_plan(2, pp=schedule, microbatches=4, micro_batch_size=2)
    ranks = pool.run(count, 2, plan, regression(16), process_group=False)
    assert [logged for logged, _ in ranks] == [[4.0, 4.0], [4.0, 4.0]]
    assert ranks[-1][1][0] > 4, "torch was mended: it calls the last stage once a micro-batch in the first step too"


# -- 4 ---------------------------------------------------------------------------------------------------------------
class Formats(LightningModule):
    """Notes which dtypes a product and the weights have in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = set()

    def training_step(self, batch, batch_idx):
        product = self.linear(batch["x"])
        self.seen.add((str(self.linear.weight.dtype), str(product.dtype)))
        loss = product.float().square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def formats(plan, data):
    kept = []

    def module():
        kept.append(Formats())
        return kept[0]

    fit(plan, module, data)
    return kept[0].seen


FORMATS = {
    "fp64": ("torch.float64", "torch.float64"),
    "fp32": ("torch.float32", "torch.float32"),
    "bf16-mixed": ("torch.float32", "torch.bfloat16"),
    "bf16-true": ("torch.bfloat16", "torch.bfloat16"),
    "fp16-mixed": ("torch.float32", "torch.float16"),
}


@pytest.mark.parametrize("strategy", [None, "ddp", "fsdp"])
@pytest.mark.parametrize("precision", list(FORMATS))
def test_the_precision_is_the_one_asked_for(pool, precision, strategy):
    """Stock Lightning turns 16-mixed on CPU into bf16 in silence."""
    ranks = 2 if strategy else 1
    plan = make_plan(ranks, strategy=strategy, precision=precision, micro_batch_size=2)
    for seen in pool.run(formats, ranks, plan, regression(8), process_group=False):
        assert seen == {FORMATS[precision]}


# -- 5 ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("setting", "value"),
    [("precision", "16-mixed"), ("sync_batchnorm", True), ("strategy", "ddp"), ("plugins", []), ("devices", 8)],
)
def test_trainer_arguments_that_would_do_nothing_are_refused(setting, value):
    with pytest.raises(FrameworkError, match=f"trainer.{setting}"):
        Trainer(make_plan(1, trainer={setting: value}))


def test_lightning_itself_would_have_taken_them_in_silence():
    """Why row 5 needs a guard: the same arguments pass through Lightning's Trainer with a strategy of one's own."""
    from lightning.pytorch import Trainer as Stock

    from framework.strategy import MeshStrategy

    plan = make_plan(1)
    strategy = MeshStrategy(plan)
    strategy.precision_plugin = Trainer(plan).precision_plugin
    stock = Stock(
        strategy=strategy, devices=1, accelerator="cpu", precision="16-mixed", sync_batchnorm=True, logger=False
    )
    assert type(stock.precision_plugin).__name__ == "Precision"
    assert stock.precision_plugin.name == "fp32"
