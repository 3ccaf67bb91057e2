"""Runs of the optimizers with a state of fewer bits, whole and stopped halfway, under six mixes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from framework.compose import compose
from framework.memory import held_bytes
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


@functools.cache
def whole(pool: Any, folder: Path, mix: str, optimizer: str) -> Any:
    """A run that isn't stopped."""
    words = f"optimizer={optimizer} trainer.max_steps={STEPS} checkpoint.save_top_k=0"
    return run(pool, plan_of(mix, folder / f"whole-{mix}-{optimizer}".replace(" ", "_"), words))


@functools.cache
def stopped(pool: Any, folder: Path, mix: str, optimizer: str) -> Path:
    """A run that is saved at its end, in the middle of the other."""
    path = folder / f"half-{mix}-{optimizer}".replace(" ", "_")
    run(pool, plan_of(mix, path, f"optimizer={optimizer} trainer.max_steps={STOP} checkpoint.every_n_steps={STOP}"))
    return path / "checkpoints" / f"step-{STOP:06d}"


def gone_on(pool: Any, folder: Path, before: str, after: str, optimizer: str) -> Any:
    """The rest of a run that was stopped under mix `before`, under mix `after`."""
    start = stopped(pool, folder, before, optimizer)
    words = f"optimizer={optimizer} trainer.max_steps={STEPS} checkpoint.save_top_k=0 ckpt_path={start}"
    return run(pool, plan_of(after, folder / f"{before}-{after}-{optimizer}".replace(" ", "_"), words))


def goes_on_to_the_bit(pool: Any, folder: Path, mix: str, optimizer: str) -> None:
    """Assert that a run that is stopped and goes on under the same mix is the one that isn't stopped."""
    again, want = gone_on(pool, folder, mix, mix, optimizer)[0], whole(pool, folder, mix, optimizer)[0]
    assert again[0] == want[0][STOP:]
    assert again[2].keys() == want[2].keys()
    for name, tensor in want[2].items():
        assert torch.equal(again[2][name], tensor), name
