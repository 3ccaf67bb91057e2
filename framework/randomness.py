"""Random numbers of the micro-steps (dropout, a user's own draws): who draws alike, and the same after a restart.

Ranks that differ only on axis tp must draw alike, since they compute the same thing; ranks that see other samples,
other positions or other layers must not. And a run that was resumed must draw what the uninterrupted one would have
drawn. So every micro-step starts from a key of its own, made of the run's seed, the rank's place on all axes but tp,
and the number of the micro-step; no generator's state has to be saved.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from framework import counter
from framework.plan import RunPlan


class MicroStepSeeds:
    """Seeds the generators of Python, NumPy and torch (CPU, and this rank's GPU) for one micro-step of training.

    Args:
        plan: gives seed and mesh.
        rank: global rank.
    """

    def __init__(self, plan: RunPlan, rank: int) -> None:
        place = [number for axis, number in plan.mesh.coordinate(rank).items() if axis != "tp"]
        self._key: tuple[int | str, ...] = ("micro-step", plan.seed, *place)
        self._on_gpu = plan.accelerator == "cuda"

    def __call__(self, step: int, micro_step: int) -> None:
        """Seed for a micro-step of the optimizer step that comes after `step` of them; both count from 0."""
        key = counter.derive(*self._key, step, micro_step)
        seed(key)
        if self._on_gpu:
            torch.cuda.manual_seed(key >> 1)


def seed(key: int) -> None:
    """Seed the generators of Python, NumPy and torch's CPU with 64 bits."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    # not `torch.manual_seed`: it takes 115 us, which is much beside a step of a small model; this takes 1
    torch.default_generator.manual_seed(key >> 1)


def states() -> tuple[Any, Any, torch.Tensor]:
    """Return the states of Python's, NumPy's and torch's CPU generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_states(kept: tuple[Any, Any, torch.Tensor]) -> None:
    """Put the generators back to what `states` returned."""
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


@contextmanager
def random_numbers(key: int) -> Generator[None, None, None]:
    """Seed Python's, NumPy's and torch's CPU generators inside, and put them back as they were."""
    kept = states()
    seed(key)
    try:
        yield
    finally:
        set_states(kept)
