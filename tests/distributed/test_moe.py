"""Mixtures of experts: each mix gives the numbers of one process, whatever the routing; a checkpoint fits every mix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from experts import (
    BALANCE_WEIGHT,
    SHAPE,
    SILENT,
    STEPS,
    global_batches,
    initial_of,
    objective,
    on_meta,
    outcomes_of,
    plan_of,
    real,
    reference_of,
    run,
    samples,
)
from fitting import fit
from lightning.pytorch import Callback
from mixes import ACC2, CLIP, CLIP_INF, FSDP, GLOBAL_BATCH, M2, M4, SGO, TP, Mix
from torch import Tensor
from torch.distributed.tensor import DTensor

from framework.testing import WorkerPool
from framework.verify.reference import Bounds, disagreements, global_norm

EP = f"{FSDP} ep=alltoall"
ROWS: list[tuple[Mix, dict[str, Any]]] = [
    (Mix("single, capacity", 1), {"capacity_factor": 0.75}),
    (Mix("ddp2, top 1, accumulation", 2, f"strategy=ddp {ACC2}"), {"top_k": 1}),
    (Mix("gpipe2 x full_shard2, capacity", 4, f"{FSDP} pp=gpipe {M2}"), {"capacity_factor": 0.75}),
    (Mix("ep2, accumulation, clip", 2, f"{EP} {ACC2} {CLIP}"), {}),
    (Mix("ep2 x 2, top 1, full AC, clip inf", 4, f"{EP} activation=full {CLIP_INF}"), {"top_k": 1}),
    (Mix("ep4, capacity", 4, f"{SGO} ep=alltoall ep.size=4"), {"capacity_factor": 0.75}),
    (Mix("ep2 x hybrid, clip", 4, f"{EP} strategy.replicas=2 {CLIP}"), {"top_k": 1}),
    (Mix("ep2 x 2, fewer experts than ranks", 4, f"{EP} strategy.cpu_offload=true"), {"experts": 2}),
    (Mix("ep2 x tp2, accumulation", 4, f"{EP} {TP} {ACC2}"), {}),
    (Mix("ep2 x zero_bubble2, full AC, clip", 4, f"{EP} pp=zero_bubble {M4} activation=full {CLIP}"), {}),
]


@pytest.mark.parametrize(("mix", "shape"), ROWS, ids=lambda value: value.name if isinstance(value, Mix) else "")
def test_mix_equals_the_reference(pool: WorkerPool, mix: Mix, shape: dict[str, Any]) -> None:
    want = reference_of(pool, mix, **shape)
    outcomes = outcomes_of(pool, mix, **shape)
    for rank, outcome in enumerate(outcomes):
        assert disagreements(outcome.result, want, Bounds()) == [], f"rank {rank}"
    start = initial_of(pool, shape.get("experts", SHAPE["experts"]))
    assert {name for name, tensor in outcomes[0].initial.items() if not torch.equal(tensor, start[name])} == set()
    assert set(outcomes[0].initial) == set(start)


@torch.no_grad()
def test_routing_of_these_rows_is_uneven(pool: WorkerPool) -> None:
    """Some expert gets no token of one rank, and some others more than half of another's."""
    counts: list[list[int]] = []
    model = real(pool, top_k=1)
    for layer in model.layers:
        layer.feed_forward.experts.register_forward_pre_hook(lambda _, inputs: counts.append(inputs[1].tolist()))
    for at in range(0, GLOBAL_BATCH, 4):  # the shares of four data ranks
        model(samples().columns["inputs"][at : at + 4])
    assert any(0 in found for found in counts)
    assert any(max(found) > sum(found) / 2 for found in counts)


@torch.no_grad()
def test_dropless_and_dropping_rows_differ(pool: WorkerPool) -> None:
    """What never happens would prove nothing."""
    dropped = real(pool, capacity_factor=0.75).loss(global_batches()[0])["dropped"]
    assert 0.1 < float(dropped) < 0.9
    assert float(real(pool).loss(global_batches()[0])["dropped"]) == 0.0


def test_the_rows_clip_and_have_a_silent_micro_batch(pool: WorkerPool) -> None:
    """What never happens would prove nothing."""
    for mix, shape in ROWS:
        if mix.clip[0] is not None and mix.clip[1] == "norm":
            assert min(reference_of(pool, Mix("", 1), **shape).grad_norms) > mix.clip[0]
    assert not (samples().columns["targets"][list(SILENT)] != -100).any()


def test_the_balance_loss_teaches_the_router(pool: WorkerPool) -> None:
    """So much that forgetting it would exceed the bounds of the rows by far."""
    model, batch = real(pool), global_batches()[0]
    gradients = []
    for part in (objective(model, batch)[0], model.loss(batch)["loss"]):
        gradients.append(torch.autograd.grad(part, model.layers[0].feed_forward.router.weight)[0])
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) > 1e-3
    assert BALANCE_WEIGHT > 0


LAYOUTS = {
    mix.name: mix
    for mix in (
        Mix("ep2", 2, EP),
        Mix("no ep, ddp2", 2, "strategy=ddp"),
        Mix("ep4", 4, f"{EP} ep.size=4"),
        Mix("ep2 x 2", 4, EP),
    )
}


def test_a_run_goes_on_under_other_mixes(pool: WorkerPool, tmp_path: Path) -> None:
    """One step under each layout in turn, momentum included, ends where one process ends; names are the model's own."""
    start = None
    for step, mix in enumerate(LAYOUTS.values(), start=1):
        assert step <= STEPS
        to = str(tmp_path / f"{step}")
        plan = plan_of(mix, {}, tmp_path, steps=step)
        found = pool.run(run, mix.ranks, plan, {}, to, start, process_group=False, timeout=90)
        start, final = to, found[0][1]
    model = real(pool)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    want = reference_of(pool, Mix("", 1))
    assert final.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(final[name], tensor + want.updates[name], rtol=1e-9, atol=1e-12, msg=name)


def layout_of_experts(plan: Any) -> dict[str, Any]:
    """Called on every rank: how an expert weight lies, and the share of all expert weights that the rank holds."""
    found: dict[str, Any] = {}

    class Watch(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            weight = pl_module.layers[0].feed_forward.experts.w1
            assert isinstance(weight, DTensor)
            found["axes"] = weight.device_mesh.mesh_dim_names
            found["share"] = weight.to_local().numel() / weight.numel()
            found["rank"] = dist.get_rank()

    fit(plan, on_meta, samples(), callbacks=[Watch()], loss="objective", tensors=False)
    return found


def test_a_rank_holds_its_experts_only(pool: WorkerPool) -> None:
    plan = plan_of(Mix("", 4, EP), {}, steps=1)
    for rank, found in enumerate(pool.run(layout_of_experts, 4, plan, process_group=False, timeout=90)):
        assert found == {"axes": ("dp_mod_ep", "ep"), "share": 0.25, "rank": rank}


def test_gradients_are_those_of_samples_that_count(pool: WorkerPool) -> None:
    """The reference itself: cutting a batch changes nothing, so balance and capacity see a sequence at a time."""
    batch = global_batches()[0]
    for shape in ({}, {"capacity_factor": 0.75, "top_k": 1}):
        whole, cut = real(pool, **shape), real(pool, **shape)
        objective(whole, batch)[0].backward()
        total = int((batch["targets"] != -100).sum())
        for at in range(0, GLOBAL_BATCH, 2):
            loss, weight = objective(cut, {name: column[at : at + 2] for name, column in batch.items()})
            (loss * weight / total).backward()
        assert distance(cut, whole) < 1e-12


def distance(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """Of all gradients together, relative."""

    def gradients(model: torch.nn.Module) -> list[Tensor]:
        return [p.grad for p in model.parameters() if p.grad is not None]

    differences = [a - b for a, b in zip(gradients(one), gradients(other), strict=True)]
    return global_norm(differences) / global_norm(gradients(other))
