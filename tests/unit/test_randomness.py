"""Which ranks draw alike, and that a micro-step's numbers depend on nothing else."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything

from framework import worker
from framework.plan import MeshSpec, RunPlan
from framework.randomness import MicroStepSeeds


@pytest.fixture(autouse=True)
def _put_generators_back():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draws(rank: int, step: int = 3, micro_step: int = 0, seed: int = 0) -> tuple[float, ...]:
    mesh = MeshSpec(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)
    MicroStepSeeds(RunPlan(run_id="r", run_dir="/nowhere", seed=seed, mesh=mesh), rank)(step, micro_step)
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_only_tensor_parallel_neighbours_draw_alike() -> None:
    everyone = [draws(rank) for rank in range(32)]
    for rank in range(0, 32, 2):
        assert everyone[rank] == everyone[rank + 1]
    for numbers in zip(*everyone, strict=True):
        assert len(set(numbers)) == 16


def test_each_micro_step_has_its_own_numbers_whatever_was_drawn_before() -> None:
    first = draws(0)
    torch.rand(100)
    assert draws(0) == first
    assert len({first, draws(0, step=4), draws(0, micro_step=1), draws(0, seed=1)}) == 4


def test_a_rank_is_seeded_as_lightning_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)
    seen = []
    for by in (
        lambda: seed_everything(2**32 - 5, workers=True, verbose=False),
        lambda: worker.seed(RunPlan(run_id="r", run_dir="/nowhere", seed=2**32 - 5)),
    ):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        by()
        numbers = float(torch.rand(())), random.random(), float(np.random.rand())
        seen.append((numbers, os.environ.pop("PL_GLOBAL_SEED"), os.environ.pop("PL_SEED_WORKERS")))
    assert seen[0] == seen[1]
