"""One clip norm over all axes (P09, P10), on real processes, with the values of the cases."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from framework.clipping import clip_, settle_, total_norm
from framework.mesh import Mesh
from framework.plan import MeshSpec
from framework.verify.reference import global_norm


def parameter(gradient, dtype=torch.float32) -> nn.Parameter:
    """A plain parameter with that gradient (a number or a tensor)."""
    gradient = torch.as_tensor(gradient, dtype=dtype).reshape(-1) if not isinstance(gradient, DTensor) else gradient
    result = nn.Parameter(torch.zeros_like(gradient))
    result.grad = gradient
    return result


def stages(norm_type: float):
    """P09: two pipeline stages with gradients 3 and 4."""
    mesh = Mesh(MeshSpec(pp=2))
    own = [parameter(3.0 if dist.get_rank() == 0 else 4.0)]
    norm = clip_(own, mesh, 1.0, norm_type)
    return float(norm), float(own[0].grad)


@pytest.mark.parametrize(("norm_type", "norm", "clipped"), [(2.0, 5.0, (0.6, 0.8)), (math.inf, 4.0, (0.75, 1.0))])
def test_pipeline_stages_share_one_norm(pool, norm_type, norm, clipped) -> None:
    results = pool.run(stages, 2, norm_type)
    assert [value for value, _ in results] == pytest.approx([norm, norm], rel=1e-6)
    assert [value for _, value in results] == pytest.approx(clipped, rel=1e-5)


def mixed_tp(norm_type: float):
    """P10: a sharded weight with gradients 3 and 0, a copied plain bias with gradient 4 on both."""
    mesh = Mesh(MeshSpec(tp=2))
    piece = torch.tensor([3.0 if dist.get_rank() == 0 else 0.0])
    weight = parameter(DTensor.from_local(piece, mesh["tp"], [Shard(0)]))
    bias = parameter(4.0)
    norm = clip_([weight, bias], mesh, 1.0, norm_type)
    return float(norm), float(weight.grad.full_tensor()[0]), float(bias.grad)


@pytest.mark.parametrize(("norm_type", "want"), [(2.0, (5.0, 0.6, 0.8)), (math.inf, (4.0, 0.75, 1.0))])
def test_sharded_and_copied_parameters_count_once(pool, norm_type, want) -> None:
    assert pool.run(mixed_tp, 2, norm_type) == [pytest.approx(want, rel=1e-5)] * 2


def fsdp_only():
    """P10: FSDP alone, gradients 3 and 4 in two one-element parameters' halves."""
    mesh = Mesh(MeshSpec(dp_shard=2))
    model = nn.Linear(1, 2, bias=False)
    fully_shard(model, mesh=mesh["dp_shard"])
    model.weight.grad = distribute_tensor(torch.tensor([[3.0], [4.0]]), mesh["dp_shard"], [Shard(0)])
    norm = clip_(model.parameters(), mesh, 1.0)
    return float(norm), model.weight.grad.full_tensor().flatten().tolist()


def test_fsdp_shards_are_added_up(pool) -> None:
    for norm, clipped in pool.run(fsdp_only, 2):
        assert norm == pytest.approx(5.0, rel=1e-6)
        assert clipped == pytest.approx([0.6, 0.8], rel=1e-5)


def everything_at_once(norm_type: float, algorithm: str):
    """Eight ranks: pp 2 x dp_shard 2 x tp 2, uneven shards, copies, a Partial gradient, a stage with fewer grads."""
    mesh = Mesh(MeshSpec(pp=2, dp_shard=2, tp=2))
    both, shard, tp = mesh["dp_shard", "tp"], mesh["dp_shard"], mesh["tp"]
    stage = mesh.rank("pp")
    generator = torch.Generator().manual_seed(10 + stage)
    full = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, 6), (3, 3), (7,), (4, 2))]
    layouts = [(both, [Shard(0), Shard(1)]), (shard, [Shard(0)]), (both, [Replicate(), Shard(0)]), (tp, [Replicate()])]
    own = [parameter(distribute_tensor(g, *layout)) for g, layout in zip(full, layouts, strict=True)]
    if stage == 1:
        own[1].grad = None
        full[1] = torch.zeros(0, dtype=torch.float64)
    due = DTensor.from_local(full[3] / 2, tp, [Partial()])
    own[3].grad = due  # what autograd leaves of a copied parameter whose uses are split
    plain = parameter(full[2] * 2, torch.float64)
    full.append(full[2] * 2)
    empty = nn.Parameter(torch.zeros(2))
    everything = [*own, plain, empty]
    norm = clip_(everything, mesh, 0.5, norm_type, algorithm)
    assert own[3].grad.placements == (Replicate(),)
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in everything]
    gradients = [g for g in gradients if g is not None]
    return float(norm), [g for g in full if g.numel()], gradients


@pytest.mark.parametrize(
    ("norm_type", "algorithm"), [(2.0, "norm"), (1.0, "norm"), (3.0, "norm"), (2.0, "inf_norm"), (2.0, "value")]
)
def test_all_axes_uneven_and_missing(pool, norm_type, algorithm) -> None:
    results = pool.run(everything_at_once, 8, norm_type, algorithm)
    logical = [*results[0][1], *results[4][1]]  # one rank of each stage
    flat = torch.cat([g.flatten() for g in logical])
    want = float(torch.linalg.vector_norm(flat, math.inf if algorithm == "inf_norm" else norm_type))
    for number, (norm, _, clipped) in enumerate(results):
        assert norm == pytest.approx(want, rel=1e-6)
        before = results[0 if number < 4 else 4][1]
        for got, full in zip(clipped, before, strict=True):
            bounded = full.clamp(-0.5, 0.5) if algorithm == "value" else full * (0.5 / (want + 1e-6))
            torch.testing.assert_close(got, bounded, rtol=1e-6, atol=1e-9)
    assert len({norm for norm, _, _ in results}) == 1


def hybrid():
    """HSDP: copies over dp_replicate, shards over dp_shard, and a plain parameter of replicas."""
    mesh = Mesh(MeshSpec(dp_replicate=2, dp_shard=2))
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    plain = torch.randn(4, generator=generator, dtype=torch.float64)
    own = parameter(distribute_tensor(full, mesh["dp_replicate", "dp_shard"], [Replicate(), Shard(0)]))
    return float(total_norm([own, parameter(plain, torch.float64)], mesh)), global_norm([full, plain])


def test_copies_of_hsdp_count_once(pool) -> None:
    for got, want in pool.run(hybrid, 4):
        assert got == pytest.approx(want, rel=1e-12)


def bad_value(norm_type: float):
    mesh = Mesh(MeshSpec(pp=2))
    own = [parameter(float("nan") if dist.get_rank() == 1 else 4.0)]
    return float(total_norm(own, mesh, norm_type))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_nan_on_one_rank_is_seen_on_all(pool, norm_type) -> None:
    assert not any(math.isfinite(norm) for norm in pool.run(bad_value, 2, norm_type))


def deferred():
    mesh = Mesh(MeshSpec(tp=2))
    own = parameter(DTensor.from_local(torch.ones(3), mesh["tp"], [Partial()]))
    settle_([own])
    return own.grad.to_local().tolist()


def test_settle_makes_the_sum_that_is_due(pool) -> None:
    assert pool.run(deferred, 2) == [[2.0, 2.0, 2.0]] * 2
