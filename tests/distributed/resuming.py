"""All pairs of mixes: saved under one, gone on with under another, compared with one process that was never stopped."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import fit
from lightning.pytorch import Callback
from mixes import Mix
from torch import Tensor
from torch.utils.data import Dataset

from framework.plan import RunPlan
from framework.testing import plan

BOUNDS = {"fp64": 1e-12, "fp32": 1e-6}
"""How far weights may be from those of the run that was never stopped, norm by norm."""


@dataclass(frozen=True)
class Matrix:
    """What is trained, and the mixes whose ordered pairs are gone through.

    Attributes:
        name: of a folder.
        mixes: by name.
        module: makes the module, called on every rank.
        samples: makes the dataset.
        words: more overrides.
        stop: optimizer steps before the save, in the middle of an epoch.
        steps: optimizer steps in all.
        loss: name under which the module logs its loss.
        watch: makes more callbacks; tensors that they keep in `found`, by name, are compared as weights are.
    """

    name: str
    mixes: dict[str, Mix]
    module: Callable[[], Any]
    samples: Callable[[], Dataset[Any]]
    words: dict[str, Any] = field(default_factory=dict)
    stop: int = 3
    steps: int = 6
    loss: str = "train_loss"
    watch: Callable[[], Sequence[Callback]] = tuple

    def __hash__(self) -> int:
        return hash(self.name)

    def pairs(self) -> list[Any]:
        """Return all ordered pairs; those outside of the sample belong to the campaign."""
        names = list(self.mixes)
        order = random.Random(0).sample(names, len(names))
        sample = {(one, order[(at + 1) % len(order)]) for at, one in enumerate(order)}
        campaign = pytest.mark.campaign
        return [pytest.param(*pair, marks=() if pair in sample else campaign) for pair in product(names, names)]

    def plan_of(self, mix: Mix, steps: int, run_dir: Path) -> RunPlan:
        """Compose a run of `steps` steps; nothing is saved during it."""
        words = {
            "sampler.shuffle": "true",
            "trainer.max_steps": steps,
            "trainer.enable_progress_bar": "false",
            "threads": 1,
            "run_dir": run_dir,
            "checkpoint.save_top_k": 0,
            **self.words,
            **dict.fromkeys(("logs", "recovery", "logger"), "none"),
        }
        return plan(*mix.overrides, *(f"{key}={value}" for key, value in words.items()))

    def run(self, pool: Any, mix: Mix, steps: int, folder: Path, *, save: Path | None = None, start: Any = None) -> Any:
        """Train; what rank 0 saw."""
        paths = [None if path is None else str(path) for path in (save, start)]
        made = self.plan_of(mix, steps, folder)
        how = (self.module, self.samples, self.loss, self.watch, *paths)
        return pool.run(end_of, mix.ranks, made, *how, process_group=False, timeout=90)[0]

    def check(self, pool: Any, folder: Path, before: str, after: str) -> None:
        """Fail unless a run that was saved under one mix and went on under another ends where one process ends."""
        whole, losses, rates, _ = uninterrupted(pool, self, folder)
        start = saved(pool, self, before, folder)
        weights, later, later_rates, steps = self.run(pool, self.mixes[after], self.steps, folder, start=start)
        assert steps == self.steps
        precisions = {self.mixes[name].settings["precision"] for name in (before, after)}
        lowest = "fp32" if "fp32" in precisions else "fp64"
        assert later == pytest.approx(losses[self.stop :], rel={"fp64": 1e-9, "fp32": 1e-5}[lowest])
        assert later_rates == rates[self.stop * len(rates) // self.steps :], "learning rates are exact under every mix"
        assert weights.keys() == whole.keys()
        for name, tensor in whole.items():
            distance = float((weights[name].double() - tensor).norm() / tensor.norm())
            assert distance <= BOUNDS[lowest], f"{name}: {distance:.1e}"


def end_of(
    plan: RunPlan,
    module: Callable[[], Any],
    samples: Callable[[], Dataset[Any]],
    loss: str,
    watch: Callable[[], Sequence[Callback]],
    save_to: str | None,
    ckpt_path: str | None,
) -> tuple[dict[str, Tensor], list[float], list[float], int]:
    """Called on every rank: weights at the end, losses, learning rates, optimizer steps done."""
    watching = watch()
    seen = fit(plan, module, samples(), save_to=save_to, ckpt_path=ckpt_path, loss=loss, callbacks=watching)
    for one in watching:
        seen.final |= getattr(one, "found", {})
    return seen.final, seen.losses, seen.rates, seen.global_step


@functools.cache
def uninterrupted(pool: Any, matrix: Matrix, folder: Path) -> Any:
    """What one process sees that is never stopped."""
    return matrix.run(pool, Mix("one process", 1), matrix.steps, folder)


@functools.cache
def saved(pool: Any, matrix: Matrix, name: str, folder: Path) -> Path:
    """A checkpoint of step `stop`, written under one mix."""
    path = folder / f"step-{matrix.stop}-{list(matrix.mixes).index(name)}"
    matrix.run(pool, matrix.mixes[name], matrix.stop, folder, save=path)
    return path


def scheduled(optimizer: torch.optim.Optimizer) -> Any:
    """What `configure_optimizers` returns for a learning rate that falls with each step."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
