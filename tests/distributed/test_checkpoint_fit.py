"""Checkpoints through `Trainer.fit`: what is kept, what comes back, what a user's own hooks may do (P16, P19, P22)."""

from __future__ import annotations

import json
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf
from plans import make_plan, option
from torch import Tensor, nn
from user_modules import Mlp, gathered, loader, regression

from framework import checkpoint_files as files
from framework.checkpoint_files import CheckpointError
from framework.testing import RanksError
from framework.trainer import Trainer

DATA = regression(samples=24)
VALIDATION = regression(samples=4, seed=3)


class Watched(Mlp):
    """Its validation loss is whatever the list says, by epoch."""

    def __init__(self, scores: list[list[float]], rank: int = 0) -> None:
        super().__init__()
        self.scores, self.rank = scores, rank

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.scores[int(os.environ["RANK"]) % len(self.scores)][self.current_epoch])


class Final(Callback):
    """Keeps what the tests compare: whole weights, and how often steps were made."""

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.started_at = trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.weights = gathered(pl_module.named_parameters())


def plan_for(ranks: int, run_dir: Path, steps: int = -1, epochs: int = -1, **more: Any) -> Any:
    settings = {key: more.pop(key) for key in list(more) if key in SETTINGS}
    trainer = {"max_steps": steps, "max_epochs": epochs, **more.pop("trainer", {})}
    return make_plan(
        ranks,
        micro_batch_size=4 // ranks if more.get("pp") is None else 2,
        run_dir=str(run_dir),
        trainer=trainer,
        components={"checkpoint": option("checkpoint", "dcp", **settings)},
        **more,
    )


SETTINGS = ("every_n_steps", "keep", "save_top_k", "monitor", "monitor_mode", "save_last", "mode")


def fit(plan: Any, make: Any, *, ckpt_path: str | None = None, validate: bool = False, callbacks: Any = ()) -> Any:
    """Return (weights, step it started at, warnings)."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    final = Final()
    trainer = Trainer(plan, callbacks=[*callbacks, final])
    size = plan.batch.local_batch_size
    batches = loader(VALIDATION, size) if validate else None
    trainer.fit(make(), loader(DATA, size), batches, ckpt_path=ckpt_path)
    best = next(c.best_model_path for c in trainer.checkpoint_callbacks)
    return final.weights, final.started_at, lines, best


def kept(run_dir: Path) -> list[str]:
    return sorted(path.name for path in files.folder_of(run_dir).glob("step-*"))


def same(one: dict[str, Tensor], other: dict[str, Tensor], within: float = 1e-6) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[k], other[k], atol=within, rtol=0) for k in one)


SCORES = [[0.5, 0.3, 0.7], [0.6, 0.5, 0.4]]  # the mean is best in epoch 1, rank 1 alone in epoch 2


@pytest.mark.parametrize(
    ("top_k", "keep", "expected"),
    [(1, 1, ["step-000012", "step-000018"]), (-1, 1, ["step-000006", "step-000012", "step-000018"]), (0, 1, [])],
)
def test_p19_best_is_chosen_by_the_reduced_metric(pool, tmp_path, top_k, keep, expected):
    plan = plan_for(
        2, tmp_path, epochs=3, strategy="fsdp", monitor="val_loss", save_top_k=top_k, keep=keep, every_n_steps=0
    )
    for _, _, lines, best in pool.run(fit, 2, plan, partial(Watched, SCORES), validate=True, process_group=False):
        assert not [line for line in lines if "rror" in line]
        assert Path(best).name == ("step-000012" if top_k else "")
    assert kept(tmp_path) == expected
    if top_k == 0:
        return
    best_one = files.folder_of(tmp_path) / "step-000012"
    assert {"rank-00000.safetensors", "rank-00001.safetensors", files.META} <= set(os.listdir(best_one))
    assert files.read_mark(best_one).score == pytest.approx(0.4)
    last = files.folder_of(tmp_path) / "last"
    assert last.resolve().name == "step-000018"
    again = plan_for(2, tmp_path / "again", epochs=4, strategy="fsdp")
    longer = [[*row, 1.0] for row in SCORES]
    for _, start, *_ in pool.run(fit, 2, again, partial(Watched, longer), ckpt_path=str(last), process_group=False):
        assert start == 18


def test_p19_lightnings_own_model_checkpoint_works_with_directories(pool, tmp_path):
    plan = plan_for(2, tmp_path, epochs=3, strategy="fsdp", save_top_k=0)
    callback = ModelCheckpoint(
        str(tmp_path / "theirs"), filename="{epoch}-{val_loss:.2f}", monitor="val_loss", save_top_k=1, save_last=True
    )
    pool.run(fit, 2, plan, partial(Watched, SCORES), validate=True, callbacks=[callback], process_group=False)
    names = sorted(os.listdir(tmp_path / "theirs"))
    assert names == ["epoch=1-val_loss=0.40.ckpt", "last.ckpt"]
    assert all(files.is_complete(tmp_path / "theirs" / name) for name in names)
    more = plan_for(1, tmp_path / "more", steps=20, save_top_k=0)
    ((_, start, *_),) = pool.run(
        fit, 1, more, Mlp, callbacks=[callback], ckpt_path=str(tmp_path / "theirs" / "last.ckpt"), process_group=False
    )
    assert start == 12  # Lightning's `last` follows its own saves, and epoch 2 wasn't among the best


def test_newest_ones_are_kept_and_the_end_is_saved(pool, tmp_path):
    plan = plan_for(1, tmp_path, steps=11, every_n_steps=2, keep=3)
    pool.run(fit, 1, plan, Mlp, process_group=False)
    assert kept(tmp_path) == ["step-000008", "step-000010", "step-000011"]
    assert files.newest_complete(tmp_path).step == 11


def test_a_metric_that_is_never_logged_is_named(pool, tmp_path):
    plan = plan_for(1, tmp_path, epochs=2, monitor="val_los")
    with pytest.raises(RanksError, match=r"checkpoint\.monitor=val_los.*train_loss"):
        pool.run(fit, 1, plan, Mlp, process_group=False)


class Noisy(Mlp):
    """Dropout: equal weights after a resume only if the random streams went on too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5))


@pytest.mark.parametrize("stop", [5, 6, 8])  # within an epoch, at its end, in the next
@pytest.mark.parametrize(("ranks", "strategy"), [(1, None), (2, "fsdp")])
def test_a_resumed_run_equals_one_that_never_stopped(pool, tmp_path, ranks, strategy, stop):
    run = partial(pool.run, fit, ranks, process_group=False)
    straight = run(plan_for(ranks, tmp_path / "a", steps=10, strategy=strategy), Noisy)
    run(plan_for(ranks, tmp_path / "b", steps=stop, strategy=strategy), Noisy)
    where = files.newest_complete(tmp_path / "b")
    assert where.step == stop
    resumed = run(plan_for(ranks, tmp_path / "b", steps=10, strategy=strategy), Noisy, ckpt_path=where.path)
    for (want, *_), (got, start, *_) in zip(straight, resumed, strict=True):
        assert start == stop
        assert same(want, got, within=0)


class Order(Callback):
    """The order of hooks, as a user's callback sees it."""

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.seen: list[str] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.seen.append(f"epoch {trainer.current_epoch}:")

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.seen.append(str(batch_idx))

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.seen.append("validated")


def ordered(plan: Any, theirs: dict[str, Any], validate: bool, ckpt_path: str | None = None) -> str:
    order = Order()
    make = partial(Watched, [[0.5, 0.4, 0.3, 0.2]])
    callbacks = [ModelCheckpoint(save_top_k=-1, filename="{step}", **theirs), order]
    fit(plan, make, ckpt_path=ckpt_path, validate=validate, callbacks=callbacks)
    return " ".join(order.seen)


MOMENTS = {
    "last batch": {"every_n_train_steps": 3},
    "validation": {"monitor": "val_loss"},
    "epoch's end": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
}


@pytest.mark.parametrize("limit", ["steps", "epochs"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_resume_at_the_end_of_an_epoch_begins_the_next_one(pool, tmp_path, moment, limit):
    """Also a second time. Lightning alone calls no `on_train_epoch_start` here, then trains an epoch too many."""
    start = None
    for number, epochs in enumerate((1, 2, 4)):
        length = {"steps": epochs * 6} if limit == "steps" else {"epochs": epochs}
        plan = plan_for(1, tmp_path / str(number), save_top_k=0, **length)
        theirs = {"dirpath": str(tmp_path / f"theirs{number}"), **MOMENTS[moment]}
        (seen,) = pool.run(ordered, 1, plan, theirs, moment == "validation", start, process_group=False)
        after = " validated" if moment == "validation" else ""
        begun = (0, 1, 2)[number]
        assert seen == " ".join(f"epoch {epoch}: 0 1 2 3 4 5{after}" for epoch in range(begun, epochs))
        start = str(tmp_path / f"theirs{number}" / f"step={epochs * 6}.ckpt")


class Idle(LightningModule):
    """P16: two blocks that train, one layer without a gradient, one frozen; AdamW in two groups."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 4)])
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.frozen.requires_grad_(False)
        self.freeze()

    def freeze(self) -> None:
        """Nothing more."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch["x"]), batch["y"])

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [
            {"params": [p for n, p in named if n.endswith("weight")], "betas": (0.8, 0.9)},
            {"params": [p for n, p in named if n.endswith("bias")]},
        ]
        return torch.optim.AdamW(groups, lr=0.05)


class FrozenStage(Idle):
    """All of the second stage is frozen."""

    def freeze(self) -> None:
        self.layers[1].requires_grad_(False)


@pytest.mark.parametrize(("name", "ranks", "module"), [("ddp", 2, Idle), ("fsdp", 2, Idle), ("gpipe", 2, FrozenStage)])
def test_p16_frozen_and_never_used_parameters(pool, tmp_path, name, ranks, module):
    mix = {"pp": "gpipe", "microbatches": 2} if name == "gpipe" else {"strategy": name}
    if name == "ddp":
        unused = {"strategy": {**option("strategy", "ddp"), "find_unused_parameters": True}}
    run = partial(pool.run, fit, ranks, process_group=False)

    def plan(where: str, steps: int) -> Any:
        made = plan_for(ranks, tmp_path / where, steps=steps, **mix)
        return made.with_(components={**made.components, **unused}) if name == "ddp" else made

    straight = run(plan("a", 3), module)
    run(plan("b", 2), module)
    where = files.newest_complete(tmp_path / "b").path
    resumed = run(plan("b", 3), module, ckpt_path=where)
    initial = dict(module().named_parameters())
    for (want, *_), (got, start, *_) in zip(straight, resumed, strict=True):
        assert start == 2
        assert same(want, got, within=1e-7)
        assert not same({"w": got["layers.0.weight"]}, {"w": initial["layers.0.weight"].detach()})
        for still in [n for n in got if n.startswith(("unused", "frozen"))]:
            assert torch.equal(got[still], initial[still])


class Configured(Mlp):
    """P22: keeps its Hydra config as hyper-parameters."""

    def __init__(self, config: DictConfig, act: Any = None) -> None:
        super().__init__(lr=config.rate)
        self.save_hyperparameters()


CONFIG = {"base": 0.05, "rate": "${base}", "names": ["a", "b"]}


def make_configured(act: Any = None) -> Configured:
    return Configured(OmegaConf.create(CONFIG), act)


def make_with_object() -> Configured:
    return make_configured(nn.ReLU())


def test_p22_a_config_among_the_hyper_parameters(pool, tmp_path):
    pool.run(fit, 1, plan_for(1, tmp_path, steps=2), make_configured, process_group=False)
    where = files.newest_complete(tmp_path).path
    ((_, start, *_),) = pool.run(
        fit, 1, plan_for(1, tmp_path, steps=4), make_configured, ckpt_path=where, process_group=False
    )
    assert start == 2
    stored = json.loads((Path(where) / files.STATE).read_text())["lightning"]["hyper_parameters"]
    assert stored == {"config": {"base": 0.05, "rate": 0.05, "names": ["a", "b"]}, "act": None}


def test_hyper_parameters_that_no_file_can_hold_are_refused_before_the_first_step(pool, tmp_path):
    with pytest.raises(RanksError, match=r"hyper_parameters\.act.*ReLU.*ignore="):
        pool.run(fit, 1, plan_for(1, tmp_path, steps=2), make_with_object, process_group=False)
    assert kept(tmp_path) == []


class Scheduled(Mlp):
    """A cosine schedule over the run's length."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_p15_a_changed_schedule_length_is_reported(pool, tmp_path):
    pool.run(fit, 1, plan_for(1, tmp_path, steps=4), Scheduled, process_group=False)
    where = files.newest_complete(tmp_path).path
    plan = plan_for(1, tmp_path, steps=8)
    ((_, _, lines, _),) = pool.run(fit, 1, plan, Scheduled, ckpt_path=where, process_group=False)
    assert any("T_max: 4 from the checkpoint, this run's settings say 8" in line for line in lines)
    assert not any("last_epoch" in line for line in lines)


class Grafting(Mlp):
    """Replaces a weight while loading, as users do to adapt old checkpoints."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        weights["layers.0.0.weight"] = torch.full((8, 4), 0.125)
        checkpoint["graft"] = 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"tensor": torch.arange(3), 5: ("a", None)}


class Weights(Callback):
    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.weights = gathered(pl_module.named_parameters())


def start_of(plan: Any, make: Any, ckpt_path: str) -> dict[str, Tensor]:
    seen = Weights()
    fit(plan, make, ckpt_path=ckpt_path, callbacks=[seen])
    return seen.weights


def test_a_users_hooks_may_change_what_is_saved_and_loaded(pool, tmp_path):
    saved = pool.run(fit, 2, plan_for(2, tmp_path, steps=2, strategy="fsdp"), Grafting, process_group=False)[0][0]
    where = files.newest_complete(tmp_path).path
    stored = json.loads((Path(where) / files.STATE).read_text())["lightning"]["mine"]
    assert stored == {
        "$": "dict",
        "value": [["tensor", stored["value"][0][1]], [5, {"$": "tuple", "value": ["a", None]}]],
    }
    plan = plan_for(2, tmp_path / "b", steps=3, strategy="fsdp")
    for weights in pool.run(start_of, 2, plan, Grafting, where, process_group=False):
        assert torch.equal(weights["layers.0.0.weight"], torch.full((8, 4), 0.125))
        assert torch.equal(weights["layers.1.0.weight"], saved["layers.1.0.weight"])


def test_a_checkpoint_that_isnt_there_is_an_error_in_words(pool, tmp_path):
    with pytest.raises(RanksError, match="is not a checkpoint") as caught:
        pool.run(fit, 1, plan_for(1, tmp_path, steps=2), Mlp, ckpt_path=str(tmp_path / "no"), process_group=False)
    assert caught.value.kind == CheckpointError.__name__
