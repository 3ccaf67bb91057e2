"""Saved under one mix, gone on with under another: the end is that of one process that was never stopped.

Weights, momentum, learning-rate schedule and data position (shuffled, in the middle of an epoch) all take part: if one
of them were lost, the weights at the end would differ. The campaign runs every ordered pair; the suite a few, drawn by
a seed, in which each mix is saved under and gone on with once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mixes import Mix
from parity import SHAPE, SmallGpt, samples
from resuming import Matrix, scheduled

ZERO = "precision=fp32 strategy=deepspeed strategy.stage="  # its engine has no fp64
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
        return scheduled(super().configure_optimizers())


def on_meta() -> Scheduled:
    with torch.device("meta"):
        return Scheduled(**SHAPE)


MATRIX = Matrix("gpt", MIXES, on_meta, samples, words={f"model.{name}": value for name, value in SHAPE.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.mark.parametrize(("before", "after"), MATRIX.pairs())
def test_a_run_goes_on_under_any_other_mix(pool: Any, folder: Path, before: str, after: str) -> None:
    MATRIX.check(pool, folder, before, after)
