"""Tensor parallelism against one process, in double precision (P29 to P32)."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from tp_models import Gpt, Unplanned, batches

from framework.clipping import clip_, total_norm
from framework.mesh import Mesh
from framework.parts import ModelPart, whole
from framework.plan import MeshSpec, RunPlan
from framework.reduction import GradientReduction
from framework.verify.reference import Bounds, Result, disagreements, train
from framework_plugins.activation.full import Full
from framework_plugins.activation.selective import Selective
from framework_plugins.tp.dtensor import DTensorParallel
from framework_plugins.tp.layers import LayerParallel
from framework_plugins.tp.megatron import MegatronParallel

LR, MOMENTUM = 0.1, 0.9
OPTIONS = {"dtensor": DTensorParallel, "megatron": MegatronParallel}


def loss_of(model: Any, piece: dict[str, Tensor]) -> tuple[Tensor, float]:
    output = model.training_step(piece)
    return output["loss"], float(output["weight"])


def truth(
    settings: dict[str, Any], clip: float | None = None, frozen: tuple[str, ...] = (), kind: type[Gpt] = Gpt, **_: Any
) -> Result:
    """One process."""
    steps = [[batch] for batch in batches(vocab=settings.get("vocab", 12))]
    model = kind(**settings).init_weights()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return train(model, steps, loss_of, lr=LR, momentum=MOMENTUM, clip=clip)


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def split(model: Gpt, mesh: Mesh, option: LayerParallel) -> ModelPart:
    plan = RunPlan(run_id="r", run_dir="/nowhere", mesh=mesh.spec)
    assert not option.check_model(plan=plan, model=model)
    part = whole(model)
    option.apply_tensor_parallel(part=part, mesh=mesh)
    return part


def entered(part: ModelPart) -> ExitStack:
    stack = ExitStack()
    for context in part.contexts:
        stack.enter_context(context())
    return stack


def build(
    option: str,
    settings: dict[str, Any],
    words: dict[str, Any],
    mesh: Mesh,
    *,
    meta: bool = False,
    frozen: tuple[str, ...] = (),
    kind: type[Gpt] = Gpt,
    activation: Any = None,
) -> ModelPart:
    """Split, wrap and fill a model; its parameters are those of one process, under the same names."""
    start = kind(**settings).init_weights()
    with torch.device("meta" if meta else "cpu"):
        model = kind(**settings)
    if not meta:
        model.init_weights()
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    part = split(model, mesh, OPTIONS[option](**words))
    if activation is not None:
        activation.apply_activation_checkpointing(part=part)
    if mesh.size("dp_shard") > 1:
        for block in part.blocks.values():
            fully_shard(block, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
    if meta:
        model.to_empty(device="cpu")
        if settings.get("tied"):
            model.head.weight = model.tokens.weight
        for name, parameter in model.named_parameters():
            source = start.get_parameter(name).detach()
            with torch.no_grad():
                if isinstance(parameter, DTensor):
                    source = distribute_tensor(source, parameter.device_mesh, parameter.placements)
                parameter.copy_(source)
    if mesh.size("dp_replicate") > 1:
        parameters = dict(model.named_parameters())
        part.reduction = GradientReduction(parameters, mesh.group("dp_replicate"), bucket_bytes=2**20)
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in start.named_parameters()]
    for name, parameter in start.named_parameters():
        assert torch.equal(full(model.get_parameter(name)), parameter), name
    return part


def run(
    option: str,
    settings: dict[str, Any],
    words: dict[str, Any],
    axes: dict[str, int],
    *,
    clip: float | None = None,
    **options: Any,
) -> Result:
    """A hand-written loop over a split model; every rank returns whole tensors."""
    mesh = Mesh(MeshSpec(**axes))
    part = build(option, settings, words, mesh, **options)
    model = part.root
    before = {name: full(p) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    result = Result()
    ranks = mesh.size("dp_shard") * mesh.size("dp_replicate")
    for step, batch in enumerate(batches(vocab=settings.get("vocab", 12))):
        mine = {name: column.chunk(ranks)[mesh.data_rank] for name, column in batch.items()}
        total = (batch["targets"] != -100).sum()
        optimizer.zero_grad()
        with entered(part):
            output = model.training_step(mine)
            assert type(output["loss"]) is Tensor, "a loss as a user knows it"
            share = output["loss"] * output["weight"] / total
            (share * ranks).backward()
        if part.reduction is not None:
            assert part.reduction.finish() == ()
        logged = share.detach().clone()
        for axis in ("dp_shard", "dp_replicate"):
            dist.all_reduce(logged, group=mesh.group(axis))
        result.losses.append(float(logged))
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor) or "norm" in name or name.startswith("positions"), name
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                assert parameter.grad.placements == parameter.placements, name
        learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert all(p.grad is None for name, p in model.named_parameters() if name not in learning)
        result.grad_norms.append(float(total_norm(learning.values(), mesh)))
        if step == 0:
            result.first_gradients = {name: full(p.grad) for name, p in learning.items()}
        if clip is not None:
            clip_(learning.values(), mesh, clip)
        optimizer.step()
    result.updates = {name: full(p) - before[name] for name, p in model.named_parameters()}
    return result


SP, LP = {"sequence_parallel": True}, {"loss_parallel": True}
SOME_PLAIN = {
    "plan": {
        **{k: v for k, v in Gpt.tp_plan.items() if k not in ("positions", "norm", "layers.*.norm1")},
        "layers.0.norm1": "copied",
    }
}
"""Layers outside the plan: plain parameters beside DTensors."""
FROZEN = ("tokens.weight", "layers.0.mlp.w1.weight", "layers.0.attention.wo.bias", "layers.1.norm2.weight", "head.bias")
ROWS = {
    "tp2": ({}, {}, {"tp": 2}, {}),
    "tp2 without biases": ({"bias": False}, {}, {"tp": 2}, {}),
    "tp2 clip": ({}, {}, {"tp": 2}, {"clip": 0.1}),
    "tp2 sp": ({}, SP, {"tp": 2}, {}),
    "tp2 lp": ({}, LP, {"tp": 2}, {}),
    "tp2 sp lp meta": ({}, {**SP, **LP}, {"tp": 2}, {"meta": True}),
    "tp2 tied": ({"tied": True, "bias": False}, {}, {"tp": 2}, {}),
    "tp2 tied sp lp meta": ({"tied": True, "bias": False}, {**SP, **LP}, {"tp": 2}, {"meta": True}),
    "tp4 sp lp clip": ({"kv_heads": 4}, {**SP, **LP}, {"tp": 4}, {"clip": 0.1}),
    "tp2 full AC": ({}, SP, {"tp": 2}, {"activation": Full()}),
    "tp2 selective AC": ({}, {**SP, **LP}, {"tp": 2}, {"activation": Selective()}),
    "fsdp2 x tp2 clip": ({}, {}, {"dp_shard": 2, "tp": 2}, {"clip": 0.1}),
    "fsdp2 x tp2 sp lp meta full AC": (
        {},
        {**SP, **LP},
        {"dp_shard": 2, "tp": 2},
        {"meta": True, "activation": Full()},
    ),
    "replicate2 x tp2 sp clip": ({}, SP, {"dp_replicate": 2, "tp": 2}, {"clip": 0.1}),
    "tp2 with plain layers, clip": ({}, SOME_PLAIN, {"tp": 2}, {"clip": 0.1}),
    "fsdp2 x tp2 with plain layers, clip": ({}, SOME_PLAIN, {"dp_shard": 2, "tp": 2}, {"clip": 0.1}),
    "replicate2 x tp2 with plain layers, clip": ({}, SOME_PLAIN, {"dp_replicate": 2, "tp": 2}, {"clip": 0.1}),
    "vocabulary 9 on 2": ({"vocab": 9}, {}, {"tp": 2}, {"clip": 0.1}),
    "vocabulary 9 on 2 lp": ({"vocab": 9}, {**SP, **LP}, {"tp": 2}, {"meta": True}),
    "vocabulary 9 on 2 tied, fsdp2": ({"vocab": 9, "tied": True, "bias": False}, LP, {"dp_shard": 2, "tp": 2}, {}),
    "tp2 sp frozen, shapes checked": ({}, {**SP, "check_shapes": True}, {"tp": 2}, {"frozen": FROZEN}),
    "fsdp2 x tp2 shapes checked, full AC": (
        {"vocab": 9},
        {**LP, "check_shapes": True},
        {"dp_shard": 2, "tp": 2},
        {"activation": Full()},
    ),
    "fsdp2 x tp2 lp, plan found by tracing, clip": (
        {"vocab": 9},
        {**LP, "check_shapes": True},
        {"dp_shard": 2, "tp": 2},
        {"kind": Unplanned, "clip": 0.1},
    ),
}
OF_ALL = (
    "tp2 clip", "tp2 sp lp meta", "tp2 tied sp lp meta", "tp4 sp lp clip", "tp2 selective AC", "vocabulary 9 on 2",
    "vocabulary 9 on 2 lp", "tp2 sp frozen, shapes checked", "fsdp2 x tp2 sp lp meta full AC",
    "fsdp2 x tp2 with plain layers, clip", "replicate2 x tp2 sp clip", "fsdp2 x tp2 shapes checked, full AC",
    "fsdp2 x tp2 lp, plan found by tracing, clip",
)  # fmt: skip
"""Rows that each option goes through; the others are about what the options share."""
CASES = [(option, row) for option in OPTIONS for row in ROWS if option == "dtensor" or row in OF_ALL]


@pytest.mark.parametrize(("option", "row"), CASES)
def test_equals_one_process(pool, option: str, row: str) -> None:
    settings, words, axes, options = ROWS[row]
    want = truth(settings, **options)
    for got in pool.run(run, math.prod(axes.values()), option, settings, words, axes, **options):
        assert disagreements(got, want, Bounds()) == []
