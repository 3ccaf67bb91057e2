"""`optimizer=adamw8bit`: learns as AdamW does, with a quarter of its state, which goes on under any other mix."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from framework.compose import compose, model_on_meta
from framework.memory import bytes_per_rank, held_bytes
from framework.objects import build
from framework.plan import RunPlan
from framework.state import full_state_dict
from framework.trainer import Trainer as OurTrainer

COMMON = (
    "logger=none recovery=none logs=none threads=1 trainer.enable_progress_bar=false trainer.limit_val_batches=0 "
    "model.width=64 model.layers=2 model.heads=2 model.context=32 global_batch_size=16 checkpoint.mode=sync "
    "optimizer.lr=0.003 optimizer.warmup_steps=4 trainer.gradient_clip_val=1.0"
)
STOP, STEPS = 20, 40
MIXES = {
    "one": "",
    "ddp": "strategy=ddp devices=2",
    "fsdp": "strategy=fsdp devices=2",
    "tp": "tp=dtensor",
    "pp": "pp=1f1b",
    "fsdp x tp": "strategy=fsdp tp=megatron devices=4",
}
NEAR = 0.04
"""How far losses may be from those of fp32 state (mean of the last ten of 40 steps; measured: 0.023 at most), and
after a change of mix from those of the mix before (each of 20 steps; measured: 0.022)."""


class Watch(Callback):
    """Losses of a rank, and the bytes of its optimizer's state at the end."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.bytes = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        states = trainer.optimizers[0].state.values()
        self.bytes = sum(held_bytes(value) for state in states for value in state.values())


def train(plan: RunPlan) -> tuple[list[float], int, dict[str, Tensor]]:
    """Called on every rank: losses, bytes of state, weights at the end (on rank 0)."""
    watch, module = Watch(), build(plan.components["model"])
    OurTrainer(plan, callbacks=[watch]).fit(module, datamodule=build(plan.components["data"]), ckpt_path=plan.ckpt_path)
    return watch.losses, watch.bytes, full_state_dict(module)


def plan_of(mix: str, folder: Path, words: str) -> RunPlan:
    return compose(f"{COMMON} {MIXES[mix]} run_dir={folder} {words}".split())


def run(pool: Any, plan: RunPlan) -> Any:
    return pool.run(train, plan.world_size, plan, process_group=False, timeout=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bits")


@functools.cache
def whole(pool: Any, folder: Path, mix: str, optimizer: str = "adamw8bit") -> Any:
    """A run that isn't stopped."""
    words = f"optimizer={optimizer} trainer.max_steps={STEPS} checkpoint.save_top_k=0"
    return run(pool, plan_of(mix, folder / f"whole-{mix}-{optimizer}".replace(" ", "_"), words))


@functools.cache
def stopped(pool: Any, folder: Path, mix: str) -> Path:
    """A run that is saved at its end, in the middle of the other."""
    path = folder / f"half-{mix}".replace(" ", "_")
    run(pool, plan_of(mix, path, f"optimizer=adamw8bit trainer.max_steps={STOP} checkpoint.every_n_steps={STOP}"))
    return path / "checkpoints" / f"step-{STOP:06d}"


@pytest.mark.parametrize("mix", MIXES)
def test_it_learns_as_adamw_does_under_every_mix(pool: Any, folder: Path, mix: str) -> None:
    bits, fp32 = whole(pool, folder, mix)[0][0], whole(pool, folder, "one", "adamw")[0][0]
    assert bits[0] == pytest.approx(fp32[0], rel=1e-5)
    assert sum(fp32[-10:]) < 0.85 * 10 * fp32[0]  # so that learning nothing isn't near
    assert sum(bits[-10:]) == pytest.approx(sum(fp32[-10:]), rel=NEAR)


@pytest.mark.parametrize("mix", MIXES)
def test_the_plan_knows_what_the_state_takes(pool: Any, folder: Path, mix: str) -> None:
    plan = plan_of(mix, folder, f"optimizer=adamw8bit trainer.max_steps={STEPS}")
    expected = [rank.optimizer_bytes for rank in bytes_per_rank(plan, model_on_meta(plan.components["model"])[0])]
    assert [held for _, held, _ in whole(pool, folder, mix)] == expected


def test_the_state_is_a_quarter(pool: Any, folder: Path) -> None:
    few, many = whole(pool, folder, "one")[0][1], whole(pool, folder, "one", "adamw")[0][1]
    assert 0.25 < few / many < 0.3  # a scale for 256 numbers, a table for each tensor, and small tensors stay whole


@pytest.mark.parametrize("mix", MIXES)
def test_a_run_goes_on_to_the_bit_under_the_same_mix(pool: Any, folder: Path, mix: str) -> None:
    start = stopped(pool, folder, mix)
    words = f"optimizer=adamw8bit trainer.max_steps={STEPS} checkpoint.save_top_k=0 ckpt_path={start}"
    again = run(pool, plan_of(mix, folder / f"again-{mix}".replace(" ", "_"), words))
    assert again[0][0] == whole(pool, folder, mix)[0][0][STOP:]
    want = whole(pool, folder, mix)[0][2]
    assert again[0][2].keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(again[0][2][name], tensor), name


@pytest.mark.parametrize(
    ("before", "after"),
    [("one", "fsdp"), ("fsdp", "tp"), ("tp", "pp"), ("pp", "fsdp x tp"), ("fsdp x tp", "ddp"), ("ddp", "one")],
)
def test_a_run_goes_on_under_another_mix(pool: Any, folder: Path, before: str, after: str) -> None:
    start = stopped(pool, folder, before)
    words = f"optimizer=adamw8bit trainer.max_steps={STEPS} checkpoint.save_top_k=0 ckpt_path={start}"
    name = f"{before}-{after}".replace(" ", "_")
    losses = run(pool, plan_of(after, folder / name, words))[0][0]
    want = whole(pool, folder, before)[0][0][STOP:]
    assert losses == pytest.approx(want, rel=NEAR)
