"""What `ep=alltoall` refuses before a process starts, and how its ranks are planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from framework.errors import PlanError
from framework.plan import MeshSpec
from framework.planner import plan_mesh
from framework.testing import plan
from framework_plugins.ep.checks import problems
from framework_plugins.model.moe import MoE

SMALL = ["model=moe", "model.layers=2", "model.width=16", "model.heads=2", "model.experts=6"]


class Stack(nn.Module):
    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes)


def model(change: Callable[[Any], None] = lambda model: None, *shapes: tuple[int, ...]) -> LightningModule:
    """A model with two modules of experts of the given shapes."""
    module = LightningModule()
    module.layers = nn.ModuleList(Stack(*(shapes or ((6, 2, 3), (6, 3)))) for _ in range(2))
    change(module)
    return module


def share(model: Any) -> None:
    model.layers[1].weights[0] = model.layers[0].weights[0]


@pytest.mark.parametrize(
    ("made", "patterns", "size", "words"),
    [
        (model(), ["layers.*"], 2, ()),
        (model(), None, 2, ("no attribute `ep_plan`", "ep.plan")),
        (model(), ["layer.*"], 2, ("ep.plan='layer.*'", "no module", "Type layers.*")),
        (model(), ["layers.*"], 4, ("ep.size=4", "layers.0 (and 1 more like it)", "6 experts", "Type ep.size=3")),
        (model(lambda m: None, (6, 2), (5, 2)), ["layers.0"], 2, ("stack", "weights.0 [6, 2], weights.1 [5, 2]")),
        (model(lambda m: m.layers[0].register_buffer("seen", torch.zeros(6))), ["layers.0"], 2, ("buffers (seen)",)),
        (model(share), ["layers.0"], 2, ("share a parameter",)),
    ],
)
def test_complaints(made: LightningModule, patterns: list[str] | None, size: int, words: tuple[str, ...]) -> None:
    found = [str(problem) for problem in problems(made, patterns, size, ())]
    assert len(found) == bool(words), found
    for word in words:
        assert word in found[0]


def test_a_module_that_tp_splits_too() -> None:
    found = problems(model(), ["layers.0"], 2, ["layers.*.weights"])
    assert "named by tp's plan too ('layers.*.weights')" in str(found[0])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["+ep=alltoall"], ["needs expert sharding", "Type +strategy=fsdp strategy.size=2"]),
        (["+strategy=ddp", "+ep=alltoall"], ["needs expert sharding"]),
        (["+strategy=fsdp", "+ep=alltoall", "devices=4", "ep.size=3"], ["ep.size=3", "4 isn't a multiple of 3"]),
        (["+strategy=fsdp", "+ep=alltoall", "ep.size=4"], ["6 experts, which 4 ranks can't share", "ep.size=3"]),
        (["+strategy=fsdp", "+ep=alltoall", "model=gpt"], ["GPT has no attribute `ep_plan`"]),
        (["+strategy=fsdp", "+ep=alltoall", "ep.size=0"], ["ep.size=0"]),
        (["+strategy=fsdp", "+ep=alltoall", "+pp=gpipe", "+activation=selective"], ["Type activation=full"]),
        (["model.top_k=7"], ["top_k=7 must be between 1 and experts=6"]),
        (["model.capacity_factor=0"], ["capacity_factor=0"]),
    ],
)
def test_refused(words: list[str], told: list[str]) -> None:
    small = [
        word for word in SMALL if "model=gpt" not in words or word.partition("=")[0] not in ("model", "model.experts")
    ]
    with pytest.raises(PlanError) as refused:
        plan(*small, *words)
    for text in told:
        assert text in str(refused.value)


def test_the_ranks() -> None:
    axes = {"strategy=fsdp": {"dp_replicate": 1, "dp_shard": None}, "ep=alltoall": {"ep": 4}}
    mesh = plan_mesh(axes)
    assert (mesh.dp_shard, mesh.ep, mesh.dp_mod_ep, mesh.world_size) == (4, 4, 1, 4)
    assert str(MeshSpec(dp_shard=8, ep=2, tp=2)) == "dp_shard 8 (ep 2) x tp 2"
    assert MeshSpec(dp_shard=8).dp_mod_ep == 8


def test_a_stage_that_ran_before_needs_no_values() -> None:
    """Blocks of earlier stages run on the meta device."""
    with torch.device("meta"):
        made = MoE(layers=2, width=16, heads=2, capacity_factor=1.0)
        x, gauges = made.layers[0](torch.empty(3, 8, 16), torch.empty(3, 2), *made.angles(torch.empty(3, 8)))
    assert x.shape == (3, 8, 16)
    assert gauges.shape == (3, 2)
