"""Saved under one mix, gone on with under another: the end is that of one process that was never stopped.

Weights, momentum, learning-rate schedule and data position (shuffled, in the middle of an epoch) all take part: if one
of them were lost, the weights at the end would differ. The campaign runs every ordered pair; the suite a few, drawn by
a seed, in which each mix is saved under and gone on with once.
"""

from __future__ import annotations

import functools
import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import fit
from mixes import STEPS, Mix
from parity import SHAPE, SmallGpt, samples
from torch import Tensor

from framework.plan import RunPlan
from framework.testing import plan

STOP = 3
ZERO = "precision=fp32 strategy=deepspeed strategy.stage="  # its engine has no fp64
BOUNDS = {"fp64": 1e-12, "fp32": 1e-6}
"""How far weights may be from those of the run that was never stopped, norm by norm."""
MIXES = {
    mix.name: mix
    for mix in (
        Mix("ddp 2", 2, "strategy=ddp"),
        Mix("fsdp 4", 4, "strategy=fsdp"),
        Mix("tp 2, sequence parallel", 2, "tp=dtensor tp.sequence_parallel=true"),
        Mix("zbv 2", 2, "pp=zbv"),
        Mix("fsdp x tp", 4, "strategy=fsdp tp=dtensor activation=full"),
        Mix("fsdp x gpipe", 4, "strategy=fsdp pp=gpipe"),
        Mix("fsdp x megatron", 4, "strategy=fsdp tp=megatron tp.sequence_parallel=true tp.loss_parallel=true"),
        Mix("one process", 1),
        Mix("hybrid 2 x 2", 4, "strategy=fsdp strategy.replicas=2"),
        Mix("ring x fsdp", 4, "strategy=fsdp cp=ring"),
        Mix("ulysses", 2, "cp=ulysses"),
        Mix("interleaved x ddp", 4, "pp=interleaved_1f1b strategy=ddp"),
        Mix("1f1b x tp x fsdp", 8, "pp=1f1b tp=dtensor strategy=fsdp"),
        Mix("ZeRO 1", 2, f"{ZERO}1"),
        Mix("ZeRO 2", 2, f"{ZERO}2"),
        Mix("ZeRO 3", 2, f"{ZERO}3"),
    )
}


class Scheduled(SmallGpt):
    """Its learning rate falls with each step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def on_meta() -> Scheduled:
    with torch.device("meta"):
        return Scheduled(**SHAPE)


def plan_of(mix: Mix, steps: int, run_dir: Path) -> RunPlan:
    words = {
        "sampler.shuffle": "true",
        "trainer.max_steps": steps,
        "trainer.enable_progress_bar": "false",
        "threads": 1,
        "run_dir": run_dir,
        "checkpoint.save_top_k": 0,
        **{f"model.{name}": value for name, value in SHAPE.items()},
        **dict.fromkeys(("logs", "recovery", "logger"), "none"),
    }
    return plan(*mix.overrides, *(f"{key}={value}" for key, value in words.items()))


def end_of(plan: RunPlan, save_to: str | None, ckpt_path: str | None) -> tuple[dict[str, Tensor], list[float], int]:
    """Called on every rank: weights at the end, losses, optimizer steps done."""
    seen = fit(plan, on_meta, samples(), save_to=save_to, ckpt_path=ckpt_path, tensors=True)
    return seen.final, seen.losses, seen.global_step


def run(pool: Any, mix: Mix, steps: int, folder: Path, save_to: Path | None = None, start: Path | None = None) -> Any:
    paths = [None if path is None else str(path) for path in (save_to, start)]
    return pool.run(end_of, mix.ranks, plan_of(mix, steps, folder), *paths, process_group=False, timeout=90)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@functools.cache
def uninterrupted(pool: Any, folder: Path) -> Any:
    return run(pool, Mix("one process", 1), STEPS, folder)


@functools.cache
def saved(pool: Any, name: str, folder: Path) -> Path:
    path = folder / f"step-{STOP}-{list(MIXES).index(name)}"
    run(pool, MIXES[name], STOP, folder, save_to=path)
    return path


def pairs() -> list[Any]:
    """Return all ordered pairs; those outside of the sample belong to the campaign."""
    order = random.Random(0).sample(list(MIXES), len(MIXES))
    sample = {(one, order[(at + shift) % len(order)]) for at, one in enumerate(order) for shift in (1,)}
    return [pytest.param(*pair, marks=() if pair in sample else pytest.mark.campaign) for pair in product(MIXES, MIXES)]


@pytest.mark.parametrize(("before", "after"), pairs())
def test_a_run_goes_on_under_any_other_mix(pool: Any, folder: Path, before: str, after: str) -> None:
    whole, losses, _ = uninterrupted(pool, folder)
    weights, later, steps = run(pool, MIXES[after], STEPS, folder, start=saved(pool, before, folder))
    assert steps == STEPS
    lowest = "fp32" if "fp32" in {MIXES[name].settings["precision"] for name in (before, after)} else "fp64"
    assert later == pytest.approx(losses[STOP:], rel={"fp64": 1e-9, "fp32": 1e-5}[lowest])
    assert weights.keys() == whole.keys()
    for name, tensor in whole.items():
        distance = float((weights[name].double() - tensor).norm() / tensor.norm())
        assert distance <= BOUNDS[lowest], f"{name}: {distance:.1e}"
