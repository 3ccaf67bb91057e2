"""The optimizers step shards of every layout as they step whole parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plans import make_plan, option
from torch.utils.data import DataLoader
from user_modules import Rows

from framework.plan import RunPlan
from framework.state import full_state_dict
from framework.trainer import Trainer, build_model

GPT = {
    "_target_": "framework_plugins.model.gpt.GPT",
    **{"vocab_size": 12, "width": 16, "layers": 2, "heads": 2, "hidden": 24, "context": 8},
}
STEPS = 4
OPTIMIZERS = {
    "adamw": {"lr": 0.01, "weight_decay": 0.5, "schedule": "cosine", "warmup_steps": 2},
    "sgd": {"lr": 0.3, "weight_decay": 0.1, "nesterov": True, "schedule": "linear"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"world": 2, "strategy": "fsdp", "micro_batch_size": 2},
    "ddp": {"world": 2, "strategy": "ddp", "micro_batch_size": 2},
    "tp": {"world": 2, "tp": 2, "micro_batch_size": 4},
    "fsdp x tp": {"world": 4, "strategy": "fsdp", "tp": 2, "micro_batch_size": 2},
    "pp": {"world": 2, "pp": "1f1b", "microbatches": 2, "micro_batch_size": 2},
}


def run(plan: RunPlan) -> dict[str, torch.Tensor]:
    """Train and return the whole weights, on rank 0."""
    ids = torch.randint(0, 12, (4 * STEPS, 9), generator=torch.Generator().manual_seed(3))
    rows = Rows(inputs=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous())
    module = build_model(plan)
    Trainer(plan).fit(module, DataLoader(rows, batch_size=plan.batch.local_batch_size))
    return full_state_dict(module)


def plan(optimizer: str, world: int = 1, **settings: Any) -> RunPlan:
    components = {"model": GPT, "optimizer": option("optimizer", optimizer, **OPTIMIZERS[optimizer])}
    return make_plan(
        world,
        precision="fp64",
        components=components,
        trainer={"max_steps": STEPS, "max_epochs": -1},
        **{"micro_batch_size": 4, **settings},
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_after_some_steps_are_those_of_one_process(pool: Any, optimizer: str, layout: str) -> None:
    alone = pool.run(run, 1, plan(optimizer), process_group=False)[0]
    sharded = pool.run(run, LAYOUTS[layout]["world"], plan(optimizer, **LAYOUTS[layout]), process_group=False)[0]
    assert set(alone) == set(sharded)
    for name, tensor in alone.items():
        apart = (tensor - sharded[name]).norm() / tensor.norm()
        assert apart < 1e-7, f"{name}: {apart}"  # Adam makes a whole step of a gradient that is 0 but for rounding
