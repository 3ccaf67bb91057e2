"""Experts in the pairs of `test_resume_matrix.py`: saved under one mix, gone on with under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import experts
import pytest
import torch
from mixes import FSDP, M2, M4, TP, Mix
from resuming import Matrix, scheduled

EP = f"{FSDP} ep=alltoall"
MIXES = {
    mix.name: mix
    for mix in (
        Mix("one process", 1),
        Mix("ddp 2", 2, "strategy=ddp"),
        Mix("fsdp 2", 2, FSDP),
        Mix("ep 2", 2, EP),
        Mix("ep 4, gradients sharded", 4, f"{EP} ep.size=4 strategy.sharding=shard_grad_op"),
        Mix("ep 2 x fsdp 2", 4, EP),
        Mix("ep 2 x hybrid", 4, f"{EP} strategy.replicas=2"),
        Mix("ep 2 x tp 2", 4, f"{EP} {TP}"),
        Mix("ep 2 x zero bubble", 4, f"{EP} pp=zero_bubble {M4}"),
        Mix("tp 2", 2, TP),
        Mix("gpipe x fsdp", 4, f"{FSDP} pp=gpipe {M2}"),
    )
}


class Scheduled(experts.SmallMoE):
    """Its learning rate falls with each step."""

    def configure_optimizers(self) -> Any:
        return scheduled(super().configure_optimizers())


def on_meta() -> Scheduled:
    with torch.device("meta"):
        return Scheduled(**experts.SHAPE, balance_weight=experts.BALANCE_WEIGHT)


MATRIX = Matrix(
    "moe",
    MIXES,
    on_meta,
    experts.samples,
    words={"model": "moe", **{f"model.{name}": value for name, value in experts.SHAPE.items()}},
    stop=2,
    steps=experts.STEPS,
    loss="objective",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume-experts")


@pytest.mark.parametrize(("before", "after"), MATRIX.pairs())
def test_experts_go_on_under_any_other_mix(pool: Any, folder: Path, before: str, after: str) -> None:
    MATRIX.check(pool, folder, before, after)
