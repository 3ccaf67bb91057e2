"""The arithmetic of mesh and batch: the rules, the refusals with all their numbers, and a fuzz of both."""

from __future__ import annotations

import random

import pytest

from framework.errors import PlanError
from framework.plan import AXES, MeshSpec
from framework.planner import plan_batch, plan_mesh

DDP = {"dp_replicate": None}
FSDP = {"dp_replicate": 1, "dp_shard": None}
HYBRID = {"dp_replicate": 2, "dp_shard": None}
PP = {"pp": None}
TP = {"tp": None}


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(PlanError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def attempt(function, *args, **kwargs):
    try:
        return function(*args, **kwargs), ""
    except PlanError as error:
        return None, str(error)


@pytest.mark.parametrize(
    ("claims", "devices", "shape"),
    [
        ({}, "auto", {}),
        ({"strategy=ddp": DDP}, "auto", {"dp_replicate": 2}),
        ({"strategy=fsdp": FSDP, "pp=gpipe": PP}, "auto", {"dp_shard": 2, "pp": 2}),
        ({"strategy=fsdp": FSDP, "pp=gpipe": PP, "tp=dtensor": TP}, "auto", {"dp_shard": 2, "pp": 2, "tp": 2}),
        ({"tp=dtensor": {"tp": 4}}, "auto", {"tp": 4}),
        ({"strategy=ddp": DDP}, 1, {"dp_replicate": 1}),
        ({"strategy=ddp": DDP, "pp=gpipe": PP}, 8, {"dp_replicate": 4, "pp": 2}),
        (
            {"strategy=fsdp": {"dp_replicate": 2, "dp_shard": None}, "tp=dtensor": TP},
            8,
            {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
        ),
        ({"strategy=ddp": DDP, "pp=gpipe": PP}, 2, {"dp_replicate": 1, "pp": 2}),
        ({"strategy=fsdp": FSDP, "ep=moe": {"ep": 2}}, 4, {"dp_shard": 4, "ep": 2}),
    ],
)
def test_an_axis_has_its_own_size_two_or_what_is_left(claims, devices, shape):
    assert plan_mesh(claims, devices) == MeshSpec(**shape)


def test_all_gpus_are_used_and_more_are_refused():
    assert plan_mesh({"strategy=ddp": DDP}, "auto", "cuda", 2, 4) == MeshSpec(dp_replicate=8)
    text = refusal(plan_mesh, {"strategy=ddp": DDP}, 16, "cuda", 1, 4)
    assert "devices=16" in text
    assert "4 GPU(s)" in text
    assert "no GPU" in refusal(plan_mesh, {}, "auto", "cuda", 1, 0)


def test_copies_that_nobody_reduces_are_refused_with_the_words_to_add():
    text = refusal(plan_mesh, {}, 4)
    assert "4 copies" in text
    assert "+strategy=ddp" in text
    text = refusal(plan_mesh, {"pp=gpipe": PP}, 4)
    assert "pp 2" in text
    assert "leaves 2 copies" in text
    assert "+strategy=ddp" in text


@pytest.mark.parametrize(
    ("claims", "devices", "numbers"),
    [
        ({"tp=dtensor": TP, "pp=gpipe": PP}, 2, ("devices=2", "pp 2 x tp 2 = 4", "devices=4")),
        ({"tp=dtensor": {"tp": 2}}, 1, ("devices=1", "tp 2", "devices=2")),
        ({"strategy=ddp": DDP, "pp=gpipe": PP}, 5, ("devices=5", "pp 2 = 2", "multiple of 2", "devices=4")),
        ({"strategy=ddp": {"dp_replicate": 4}}, 8, ("devices=8", "dp_replicate 4", "devices=4")),
        ({}, 0, ("devices=0",)),
        ({}, "all", ("devices=all",)),
        ({}, True, ("devices=True",)),
        ({"strategy=fsdp": FSDP, "ep=moe": {"ep": 3}}, 4, ("ep.size=3", "4")),
    ],
)
def test_a_product_that_does_not_match_is_refused_with_its_factors(claims, devices, numbers):
    text = refusal(plan_mesh, claims, devices)
    for number in numbers:
        assert number in text


def test_two_options_that_want_one_axis_are_both_named():
    text = refusal(plan_mesh, {"tp=a": {"tp": 2}, "cp=b": {"tp": 4}}, "auto")
    assert "cp=b" in text
    assert "tp=a" in text
    text = refusal(plan_mesh, {"x=y": {"sp": 2}, "z=w": {"tp": 0}}, "auto")
    assert "'sp'" in text, "both complaints at once"
    assert "size 0" in text


def test_ranks_must_spread_evenly_over_hosts():
    text = refusal(plan_mesh, {"strategy=ddp": {"dp_replicate": 3}}, "auto", "cpu", 2)
    assert "num_nodes=2" in text
    assert "3 ranks" in text


def test_every_mesh_has_as_many_ranks_as_devices_or_is_refused():
    """Fuzz: whatever is chosen, the product is right, sizes that were given are kept, and a refusal names its cause."""
    draw = random.Random(0)
    planned = refused = 0
    for _ in range(4000):
        claims = {}
        for axis in AXES:
            if draw.random() < 0.5:
                claims[f"{axis}=x"] = {axis: draw.choice([None, 1, 2, 3, 4])}
        devices = draw.choice(["auto", *range(1, 17)])
        nodes = draw.choice([1, 1, 1, 2])
        mesh, why_not = attempt(plan_mesh, claims, devices, "cpu", nodes)
        if mesh is None:
            refused += 1
            assert f"={devices}" in why_not or f"num_nodes={nodes}" in why_not
            continue
        planned += 1
        assert devices in ("auto", mesh.world_size)
        assert mesh.world_size % nodes == 0
        for axes in claims.values():
            for axis, size in axes.items():
                assert size in (None, getattr(mesh, axis))
        used = {axis for axes in claims.values() for axis in axes}
        assert all(getattr(mesh, axis) == 1 for axis in AXES if axis not in used)
        assert sorted(mesh.data_rank(rank) for rank in range(mesh.world_size)) == sorted(
            list(range(mesh.data_ranks)) * (mesh.world_size // mesh.data_ranks)
        )
    assert planned > 500
    assert refused > 500


# -- batch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "split"),
    [
        ({"global_batch_size": 32}, (32, 1, 1)),
        ({"global_batch_size": 32, "data_ranks": 4}, (8, 1, 1)),
        ({"global_batch_size": 32, "micro_batch_size": 4}, (4, 1, 8)),
        ({"global_batch_size": 32, "accumulation": 4}, (8, 1, 4)),
        ({"global_batch_size": 32, "pipeline_ranks": 2}, (8, 4, 1)),
        ({"global_batch_size": 32, "data_ranks": 2, "pipeline_ranks": 2}, (4, 4, 1)),
        ({"global_batch_size": 32, "pipeline_ranks": 2, "microbatches": 8}, (4, 8, 1)),
        ({"global_batch_size": 32, "pipeline_ranks": 2, "micro_batch_size": 2}, (2, 4, 4)),
        ({"global_batch_size": 32, "pipeline_ranks": 2, "micro_batch_size": 2, "accumulation": 2}, (2, 8, 2)),
        ({"global_batch_size": 32, "pipeline_ranks": 2, "micro_batch_size": 2, "microbatches": 2}, (2, 2, 8)),
        ({"global_batch_size": 6, "pipeline_ranks": 2}, (3, 2, 1)),
        ({"global_batch_size": 30, "pipeline_ranks": 2, "stages": 4}, (15 // 3, 6, 1)),
        ({"global_batch_size": 2, "data_ranks": 2}, (1, 1, 1)),
    ],
)
def test_what_is_left_open_is_derived(given, split):
    batch = plan_batch(**given)
    assert (batch.micro_batch_size, batch.microbatches, batch.accumulation) == split
    assert set(batch.derived) == {"micro_batch_size", "accumulation", "microbatches"} - given.keys()


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ({"global_batch_size": 33, "data_ranks": 2}, ("33", "2 data ranks", "global_batch_size=32", "=34")),
        ({"global_batch_size": 1, "data_ranks": 2}, ("2 data ranks", "1 samples", "global_batch_size=2")),
        ({"global_batch_size": 8, "pipeline_ranks": 2, "microbatches": 3}, ("pp.microbatches=3", "8 samples")),
        ({"global_batch_size": 2, "pipeline_ranks": 2, "microbatches": 4}, ("pp.microbatches=4", "2 samples")),
        ({"global_batch_size": 32, "accumulation": 5}, ("accumulate_grad_batches=5", "32 samples", "30", "35")),
        (
            {"global_batch_size": 32, "data_ranks": 2, "accumulation": 2, "micro_batch_size": 4},
            ("2 data ranks", "accumulate_grad_batches 2", "micro_batch_size 4", "= 16", "32"),
        ),
        ({"global_batch_size": 2, "pipeline_ranks": 4}, ("2 samples", "4 stages")),
        ({"global_batch_size": 0}, ("global_batch_size=0",)),
        ({"global_batch_size": 8, "micro_batch_size": 0, "accumulation": -1}, ("size=0", "batches=-1")),
    ],
)
def test_what_does_not_divide_is_refused_with_all_the_numbers(given, numbers):
    text = refusal(plan_batch, **given)
    for number in numbers:
        assert number in text


def test_every_split_multiplies_to_the_global_batch():
    """Fuzz: the product is exact, what was given is kept, no derived count of micro-batches starves the pipeline."""
    draw = random.Random(1)
    planned = refused = 0
    for _ in range(6000):
        ranks = draw.choice([1, 1, 2, 4])
        stages = ranks * draw.choice([1, 2]) if ranks > 1 else 1
        given = {
            "micro_batch_size": draw.choice([None, None, 1, 2, 3, 4]),
            "accumulation": draw.choice([None, None, 1, 2, 3]),
            "microbatches": draw.choice([None, None, 1, 2, 4, 6]) if ranks > 1 else None,
        }
        size, data_ranks = draw.randint(1, 64), draw.choice([1, 2, 3, 4])
        batch, why_not = attempt(plan_batch, size, data_ranks, pipeline_ranks=ranks, stages=stages, **given)
        if batch is None:
            refused += 1
            assert str(size) in why_not
            continue
        planned += 1
        assert batch.data_ranks * batch.accumulation * batch.microbatches * batch.micro_batch_size == size
        assert all(getattr(batch, name) == value for name, value in given.items() if value is not None)
        if ranks > 1 and given["microbatches"] is None:
            assert batch.microbatches >= stages
    assert planned > 1000
    assert refused > 1000
