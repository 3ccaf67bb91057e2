"""P27, P28: the loss of the last stage is everybody's; what may travel between stages."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from fitting import fit
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from plans import make_plan, option
from torch import nn
from user_modules import Mlp, loader, regression

from framework.verify.reference import Bounds, Result, disagreements, train

DATA = regression(samples=40)


def truth(module, data, batch_size, epochs=1) -> Result:
    batches = list(loader(data, batch_size)) * epochs
    return train(module, [[batch] for batch in batches], mean_squared_error, lr=0.1, momentum=0.9)


def mean_squared_error(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"]), len(batch["x"])


def result_of(probe) -> Result:
    updates = {name: probe.final[name] - start for name, start in probe.initial.items()}
    return Result(losses=probe.losses, first_gradients=probe.gradients[0], updates=updates)


@pytest.mark.parametrize("ranks", [2, 4])
def test_p27_logged_loss_is_the_whole_models_on_every_rank(pool, ranks):
    strategy = "ddp" if ranks == 4 else None
    plan = make_plan(ranks, pp="gpipe", strategy=strategy, microbatches=4, micro_batch_size=8 // (ranks // 2) // 4)
    assert plan.batch.global_batch_size == 8
    want = truth(Mlp(), DATA, 8)
    for probe in pool.run(fit, ranks, plan, Mlp, DATA, process_group=False):
        got = result_of(probe)
        got.grad_norms = want.grad_norms
        assert disagreements(got, want, Bounds(1e-6, 1e-5, 1e-5)) == []


def fit_and_stop(plan, data, run_dir):
    stop = EarlyStopping("train_loss", patience=0, min_delta=100.0, check_on_train_epoch_end=True)
    keep = ModelCheckpoint(run_dir, monitor="train_loss", save_top_k=1, save_on_train_epoch_end=True)
    probe = fit(plan, Mlp, data, callbacks=[stop, keep])
    return probe.global_step, stop.stopped_epoch, float(stop.best_score), float(keep.best_model_score)


def test_p27_early_stopping_and_best_checkpoint_act_on_one_value(pool, tmp_path):
    plan = make_plan(
        2,
        pp="gpipe",
        microbatches=4,
        micro_batch_size=2,
        run_dir=str(tmp_path),
        trainer={"max_epochs": 5},
        components={"checkpoint": option("checkpoint", "dcp")},
    )
    first, second = pool.run(fit_and_stop, 2, plan, DATA, str(tmp_path), process_group=False)
    assert first == second
    steps, epoch, best, score = first
    assert (steps, epoch) == (10, 1)  # the second epoch is not better by 100
    losses = truth(Mlp(), DATA, 8, epochs=2).losses
    assert min(losses) * 0.5 < best < max(losses) * 1.5
    assert score == pytest.approx(losses[9] if losses[9] < losses[4] else losses[4], rel=1e-5)


class Block(nn.Module):
    """Linear and tanh; passes on beside its output what `beside` says, for the next block to multiply with."""

    def __init__(self, seed: int, beside: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.beside = beside
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.linear.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5

    def forward(self, x, beside=None):
        y = torch.tanh(self.linear(x))
        if self.beside == "integer":
            before = torch.ones(len(x), dtype=torch.long) if beside is None else beside
            return y * before[:, None], before + 1
        if self.beside == "tuple":
            return (y, x) if beside is None else (y + beside, x)
        return y, None


class Carry(LightningModule):
    """Two blocks between which more than one float tensor travels."""

    def __init__(self, beside: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(1, beside), Block(2, beside)])

    def forward(self, x):
        carried = (x,)
        for layer in self.layers:
            carried = layer(*carried)
        return carried[0]

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self(batch["x"]), batch["y"])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("beside", ["integer", "tuple", "none"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_p28_integers_tuples_and_none_travel(pool, beside, schedule):
    plan = make_plan(2, pp=schedule, microbatches=2, micro_batch_size=4)
    want = truth(Carry(beside), DATA, 8)
    for probe in pool.run(fit, 2, plan, partial(Carry, beside), DATA, process_group=False):
        got = result_of(probe)
        got.grad_norms = want.grad_norms
        assert disagreements(got, want, Bounds(1e-6, 1e-5, 1e-5)) == []


class Frozen(Mlp):
    """The first block doesn't learn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
def test_p28_frozen_first_stage(pool, schedule):
    module = FrozenFour if schedule == "zbv" else Frozen
    plan = make_plan(2, pp=schedule, microbatches=2, micro_batch_size=4)
    want = truth(module(), DATA, 8)
    for probe in pool.run(fit, 2, plan, module, DATA, process_group=False):
        got = result_of(probe)
        got.grad_norms = want.grad_norms
        got.updates = {name: update for name, update in got.updates.items() if name in want.updates}
        assert disagreements(got, want, Bounds(1e-6, 1e-5, 1e-5)) == []
        assert torch.equal(probe.final["layers.0.0.weight"], probe.initial["layers.0.0.weight"])


class Four(Mlp):
    """Four blocks, for schedules with two stages a rank."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(9)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5


class FrozenFour(Four):
    """The first block doesn't learn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
