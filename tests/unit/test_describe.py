"""The start screen, held against frozen texts. After a wanted change run it once with `UPDATE_GOLDEN=1`."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_memory_arithmetic import DDP, FORMATS, FSDP, GPIPE, Chain

from framework.describe import collectives, describe
from framework.plan import BatchSpec, MeshSpec, RunPlan

GOLDEN = Path(__file__).parent / "golden"


def plan(mesh: MeshSpec, batch: BatchSpec, **components: Any) -> RunPlan:
    formats = {"_target_": FORMATS, "option": "bf16-mixed", "compute_dtype": "bfloat16"}
    return RunPlan(
        run_id="r", run_dir="/home/someone/runs/2026-01-01", mesh=mesh, batch=batch, env={"GLOO_SOCKET_IFNAME": "lo"},
        trainer={"gradient_clip_val": 1.0}, components={"precision": formats, **components},
    )  # fmt: skip


PLANS = {
    "one": plan(MeshSpec(), BatchSpec(32, 32)),
    "ddp": plan(MeshSpec(dp_replicate=2), BatchSpec(32, 4, 1, 4, 2, ("accumulation",)), strategy=DDP),
    "pp_fsdp": plan(
        MeshSpec(pp=2, dp_shard=2),
        BatchSpec(32, 4, 4, 1, 2, ("micro_batch_size", "microbatches")),
        strategy=FSDP,
        pp=GPIPE,
        model={"_target_": "my_project.Net", "backbone": {"_target_": "my_project.Backbone"}, "width": 8},
        logger={"csv": {}, "tensorboard": {}},
    ),
    "large": plan(
        MeshSpec(pp=4, dp_replicate=2, dp_shard=8, tp=8), BatchSpec(4096, 4, 8, 8, 16), strategy=FSDP, pp=GPIPE
    ),
}


def screen(name: str, width: int = 80) -> str:
    with torch.device("meta"):
        model = Chain()
    out = io.StringIO()
    Console(file=out, width=width).print(describe(PLANS[name], model))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


@pytest.mark.parametrize("name", PLANS)
def test_screen_is_as_frozen(name: str) -> None:
    file = GOLDEN / f"describe_{name}.txt"
    text = screen(name)
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("name", PLANS)
def test_screen_fits_80_columns_and_has_no_control_characters(name: str) -> None:
    text = screen(name)
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)


def test_every_rank_of_a_small_mesh_is_drawn_once() -> None:
    found = re.findall(r"rank (\d+), d(\d+)", screen("pp_fsdp"))
    mesh = PLANS["pp_fsdp"].mesh
    assert found == [(str(rank), str(mesh.data_rank(rank))) for rank in range(4)]


def test_collectives_count_the_bytes_of_the_largest_stage() -> None:
    with torch.device("meta"):
        model = Chain()
    told = {(axis, what): (times, size) for axis, what, times, size in collectives(PLANS["pp_fsdp"], model)}
    assert told["dp_shard", "all-gather parameters"] == (1, 234 * 4)
    assert told["dp_shard", "reduce-scatter gradients"] == (1, 234 * 4)
    assert told["pp", "send activations to the next stage, their gradients back"] == (4, None)
    told = {(axis, what): (times, size) for axis, what, times, size in collectives(PLANS["ddp"], model)}
    assert told["dp_replicate", "all-reduce gradients"] == (1, 458 * 4)


def test_without_a_model_torch_is_not_imported() -> None:
    code = (
        "import sys; from framework.describe import describe; from framework.plan import RunPlan; "
        "describe(RunPlan(run_id='r', run_dir='/x')); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
