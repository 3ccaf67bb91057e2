"""Initial weights of every layout, put together, are those of one process, to the last bit (P20, P32)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from framework import initialize
from framework.testing import WorkerPool
from framework_plugins.model.gpt import GPT

SHAPE: dict[str, Any] = {"vocab_size": 13, "width": 12, "layers": 2, "heads": 2, "hidden": 20}
"""Sizes that two and four don't divide are among them."""


def model(tied: bool = False) -> GPT:
    with torch.device("meta"):
        return GPT(**SHAPE, tied=tied)


def alone(tied: bool = False) -> dict[str, Tensor]:
    made = model(tied)
    initialize.materialize(made, torch.device("cpu"), 5, initialize.origin(made))
    return {name: parameter.detach() for name, parameter in made.named_parameters()}


def split(made: GPT, mesh: Any) -> None:
    for layer in made.layers:
        plan = {
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
            **{name: RowwiseParallel() for name in ("attention.wo", "feed_forward.w2")},
        }
        parallelize_module(layer, mesh, plan)


def build(layout: str, tied: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Return the whole parameters, this rank's pieces, and whether tokens and output are one parameter."""
    world = dist.get_world_size()
    made = model(tied)
    origin = initialize.origin(made)
    if "tp" in layout:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        split(made, mesh["tp"])
        initialize.retie(made, origin)
        shards = mesh["dp"]
    elif "hybrid" in layout:
        shards = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        shards = init_device_mesh("cpu", (world,))
    if "fsdp" in layout:
        for layer in made.layers:
            fully_shard(layer, mesh=shards)
        fully_shard(made, mesh=shards)
    initialize.materialize(made, torch.device("cpu"), 5, origin)
    one = made.output.weight is made.tokens.weight
    if "fsdp" in layout:  # the padding and the references that FSDP keeps of its own are right too
        ids = torch.arange(4).reshape(1, 4)
        made.loss({"inputs": ids, "targets": ids})["loss"].backward()
    pieces = {n: p.to_local() if isinstance(p, DTensor) else p.detach() for n, p in made.named_parameters()}
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in made.named_parameters()}
    return {n: p.detach().clone() for n, p in whole.items()}, {n: p.detach().clone() for n, p in pieces.items()}, one


@pytest.mark.parametrize(("layout", "world"), [("fsdp", 2), ("fsdp", 4), ("tp", 2), ("hybrid fsdp", 4), ("tp fsdp", 4)])
def test_pieces_make_the_weights_of_one_process(pool: WorkerPool, layout: str, world: int) -> None:
    expected = alone()
    for whole, _, _ in pool.run(build, world, layout):
        assert set(whole) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(whole[name], tensor), (layout, name)


@pytest.mark.parametrize(("layout", "world"), [("fsdp", 2), ("tp fsdp", 4)])
def test_p20_tied_weights_stay_one_parameter(pool: WorkerPool, layout: str, world: int) -> None:
    expected = alone(tied=True)
    for whole, _, one in pool.run(build, world, layout, True):
        assert one
        assert "output.weight" not in whole
        assert torch.equal(whole["tokens.weight"], expected["tokens.weight"])


def test_p32_shards_are_distinct_and_unsplit_layers_equal(pool: WorkerPool) -> None:
    (_, first, _), (_, second, _) = pool.run(build, 2, "tp")
    for name in first:
        split_layer = "attention.w" in name or "feed_forward.w" in name
        assert torch.equal(first[name], second[name]) != split_layer, name


def pieces_of_2d() -> bool:
    """Shard x Shard on two dims, and on one dim twice, both uneven: the pieces are those that DTensor itself cuts."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = nn.Parameter(torch.empty(7, 5, device="meta"))
    holder = nn.Module()
    holder.w = whole
    holder.init_weights = lambda: nn.init.normal_(whole)  # type: ignore[assignment]
    steps = initialize.origin(holder).steps["w"]
    expected = torch.empty(7, 5)
    initialize.fill(expected, steps, 9)
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]):
        cut = distribute_tensor(expected, mesh, placements, src_data_rank=None)
        mine = distribute_tensor(torch.zeros(7, 5), mesh, placements, src_data_rank=None)
        initialize.fill(mine, steps, 9)
        if not torch.equal(mine.to_local(), cut.to_local()):
            return False
    return True


def test_two_dimensional_uneven_shards(pool: WorkerPool) -> None:
    assert pool.run(pieces_of_2d, 4) == [True] * 4
