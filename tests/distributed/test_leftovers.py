"""A run that ended leaves nothing in its process: no thread of a group, and no model.

A gloo group has three threads that wake up a hundred times a second, and a notebook or a test suite makes many runs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from framework.compose import compose
from framework.testing import WorkerPool
from framework.testing.rank_process import threads
from framework.verify import rank

SMALL = [
    "model.layers=2", "model.width=16", "model.heads=2", "model.hidden=32", "model.context=16", "global_batch_size=8",
    "devices=2", "trainer.max_steps=2",
]  # fmt: skip
SOON_S = 5.0
"""The thread that answers other ranks looks once a second whether its world is still there."""


def parameters() -> int:
    """That are alive."""
    gc.collect()
    return sum(type(thing) is torch.nn.Parameter for thing in gc.get_objects())


@pytest.fixture(scope="module")
def fresh() -> Iterator[WorkerPool]:
    """Processes that have run nothing before: DeepSpeed, for one, keeps the threads of its groups."""
    with WorkerPool() as pool:
        yield pool


@pytest.mark.parametrize(
    "words",
    [
        ["+strategy=ddp"],
        ["+strategy=ddp", "strategy.reduction=overlap"],
        ["+strategy=fsdp"],
        ["+tp=dtensor"],
        ["+cp=ring"],
        ["+pp=1f1b"],
        ["+pp=pipedream"],
    ],
    ids=" ".join,
)
def test_a_run_that_ended_leaves_neither_threads_nor_parameters(
    fresh: WorkerPool, tmp_path: Any, words: list[str]
) -> None:
    plan = compose([*SMALL, *words, f"run_dir={tmp_path}"])
    before = fresh.run(parameters, 2, process_group=False)
    fresh.run(rank.train, 2, plan, 0.1, process_group=False)
    until = time.monotonic() + SOON_S
    while (now := fresh.run(threads, 2, process_group=False)) != [1, 1] and time.monotonic() < until:
        time.sleep(0.2)
    assert now == [1, 1]
    assert fresh.run(parameters, 2, process_group=False) == before
