"""Lightning's averages of weights (EMA, SWA) in the pairs of `test_resume_matrix.py`, and what the module holds when.

Validation measures the average, and it is left in the module at the end; the weights that are trained go on under it,
through any change of mix. Both are compared with those of one process that was never stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from mixes import FSDP, SP_LP, Mix
from parity import SHAPE, samples
from plans import make_plan, option
from resuming import Matrix
from test_resume_matrix import on_meta
from torch import Tensor, nn
from user_modules import Mlp, gathered, loader, regression

from framework.adapters.lightning_averaging import averages_of
from framework.checkpoint_files import newest_complete
from framework.errors import UsageError
from framework.export import export
from framework.plan import RunPlan
from framework.testing import RanksError
from framework.trainer import Trainer

MIXES = {
    mix.name: mix
    for mix in (
        Mix("one process", 1),
        Mix("ddp 2", 2, "strategy=ddp"),
        Mix("fsdp 2", 2, FSDP),
        Mix("hybrid 2 x 2", 4, f"{FSDP} strategy.replicas=2"),
        Mix("tp 2", 2, f"{SP_LP} activation=full"),
        Mix("megatron 2", 2, "tp=megatron"),
        Mix("zbv 2", 2, "pp=zbv"),
        Mix("gpipe x fsdp", 4, f"{FSDP} pp=gpipe"),
    )
}


class Left(Callback):
    """Keeps what a fit leaves in the module."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        found = gathered(trainer.strategy.named_parameters())
        self.found = {f"average of {name}": tensor for name, tensor in found.items()}


def with_ema() -> Sequence[Callback]:
    return [EMAWeightAveraging(decay=0.7), Left()]


def with_mean() -> Sequence[Callback]:
    return [WeightAveraging(), Left()]


WORDS = {f"model.{name}": value for name, value in SHAPE.items()}
MATRIX = Matrix("ema", MIXES, on_meta, samples, words=WORDS, watch=with_ema)
MEAN = Matrix("mean", MIXES, on_meta, samples, words=WORDS, watch=with_mean)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume-averages")


@pytest.mark.parametrize(("before", "after"), MATRIX.pairs())
def test_an_average_goes_on_under_any_other_mix(pool: Any, folder: Path, before: str, after: str) -> None:
    MATRIX.check(pool, folder, before, after)


@pytest.mark.parametrize(("before", "after"), [("gpipe x fsdp", "tp 2"), ("tp 2", "gpipe x fsdp")])
def test_the_mean_of_all_steps_too(pool: Any, folder: Path, before: str, after: str) -> None:
    MEAN.check(pool, folder, before, after)


class Seen(nn.Module):
    """Nothing but a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))


class Normed(Mlp):
    """With running statistics, a module that has only a buffer, tied layers, and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = Seen()
        self.norm = nn.BatchNorm1d(4)
        self.enter, self.leave = nn.Linear(4, 4), nn.Linear(4, 4)
        self.enter.weight = self.leave.weight = nn.Parameter(torch.eye(4) * 0.5)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(self.enter(x))) + self.leave(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.inputs.total += batch["x"].mean(0).detach()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch["x"]), batch["y"]))

    def get_extra_state(self) -> int:
        return self.steps

    def set_extra_state(self, state: int) -> None:
        self.steps = state


class SaveInValidation(Callback):
    """Where SIGTERM would save: the module holds the average then."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        if not Path(self.path).exists():
            trainer.save_checkpoint(self.path)


def plan_for(run_dir: Path, ranks: int, steps: int, **mix: Any) -> RunPlan:
    return make_plan(
        ranks, micro_batch_size=4 // ranks, precision="fp64", run_dir=str(run_dir),
        trainer={"max_steps": steps, "max_epochs": 9, "val_check_interval": 2},
        components={"checkpoint": option("checkpoint", "dcp")}, **mix,
    )  # fmt: skip


def train(plan: RunPlan, save_to: str | None = None, ckpt_path: str | None = None, average: bool = True) -> Any:
    """Called on every rank: the average and the last weights that were trained, buffers, losses in validation."""
    averaging = [EMAWeightAveraging(decay=0.7)] if average else []
    more = [SaveInValidation(save_to)] if save_to else []
    trainer, module, size = Trainer(plan, callbacks=[*averaging, *more]), Normed(), plan.batch.local_batch_size
    data, held_out = regression(24, dtype=torch.float64), regression(8, seed=3, dtype=torch.float64)
    trainer.fit(module, loader(data, size), loader(held_out, size), ckpt_path=ckpt_path)
    left = gathered(trainer.strategy.named_parameters())
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return left, buffers, float(trainer.callback_metrics["val_loss"]), module.steps


def test_what_is_saved_when(pool: Any, tmp_path: Path) -> None:
    """At the end of training, and in the middle of a validation: who goes on from either is the one that went on."""
    whole, buffers, loss, steps = pool.run(train, 1, plan_for(tmp_path / "whole", 1, 6), process_group=False)[0]
    save = str(tmp_path / "in-validation")
    pool.run(train, 1, plan_for(tmp_path / "run", 1, 4), save, process_group=False)
    at_end = newest_complete(tmp_path / "run")
    assert at_end is not None
    for start in (save, at_end.path):
        plan = plan_for(tmp_path / "again", 1, 6)
        left, theirs, val_loss, counted = pool.run(train, 1, plan, None, start, process_group=False)[0]
        assert (val_loss, counted) == (pytest.approx(loss, rel=1e-12), steps)
        for name, tensor in {**whole, **buffers}.items():
            torch.testing.assert_close({**left, **theirs}[name], tensor, rtol=1e-12, atol=1e-14)


def test_what_is_exported_is_the_average(pool: Any, tmp_path: Path) -> None:
    plan = plan_for(tmp_path / "run", 2, 4, strategy="fsdp")
    left = pool.run(train, 2, plan, process_group=False)[0][0]
    newest = newest_complete(tmp_path / "run")
    assert newest is not None
    export(Path(newest.path), plan, "torch", tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.pt")
    weights = torch.load(file, weights_only=True)
    for name, tensor in left.items():
        assert torch.equal(weights[name], tensor), name


def test_a_run_that_averages_nothing_does_not_take_the_average_for_its_weights(pool: Any, tmp_path: Path) -> None:
    pool.run(train, 1, plan_for(tmp_path / "run", 1, 4), process_group=False)
    start = newest_complete(tmp_path / "run")
    assert start is not None
    again = plan_for(tmp_path / "again", 1, 6)
    with pytest.raises(RanksError, match=r"average of weights beside those that were trained.*EMAWeightAveraging"):
        pool.run(train, 1, again, None, start.path, False, process_group=False)


@pytest.mark.parametrize(
    ("callback", "plan", "own_engine", "told"),
    [
        (EMAWeightAveraging(), make_plan(2, strategy="ddp"), True, "keeps in its engine; type strategy=fsdp"),
        (StochasticWeightAveraging(0.1), make_plan(2, strategy="fsdp"), False, "callbacks.WeightAveraging"),
    ],
)
def test_what_cannot_be_averaged_is_refused(callback: Any, plan: RunPlan, own_engine: bool, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        averages_of([callback], plan, own_engine)
    assert averages_of([partial], make_plan(1), False) == []
