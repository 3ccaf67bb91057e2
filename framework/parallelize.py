"""The order of model surgery, to be read aloud."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule

from framework import dropout, initialize, same_start
from framework.mesh import Mesh
from framework.parts import ModelPart, whole
from framework.plan import RunPlan

if TYPE_CHECKING:
    from framework.precision import Precision


def parallelize(
    module: LightningModule, hook: Any, mesh: Mesh, plan: RunPlan, precision: Precision, device: torch.device
) -> list[ModelPart]:
    """Turn the user's module into this rank's parts, in place.

    Args:
        module: on the meta device (it has `init_weights`) or built for real; then rank 0's weights are those of all.
        hook: the plugin manager's `hook`.
        mesh: all axes.
        plan: the run.
        precision: converts the weights before anything is split.
        device: of this rank.

    Returns:
        The stages that this rank runs, first to last; one without a pipeline.
    """
    precision.convert_module(module)  # first, so that every later step sees the final dtype
    same_start.take_from_first(module, device)  # while each rank still has the whole module
    masks = dropout.install(module, plan.seed)  # while modules have their names in the whole model
    origin = initialize.origin(module)  # before anything replaces parameters: ties (P20), how each is initialised
    meta = any(parameter.is_meta for parameter in module.parameters())
    parts: list[ModelPart] = hook.make_stages(module=module, mesh=mesh, plan=plan) or [whole(module)]
    for part in parts:
        part.first, part.masks = part is parts[0], masks
    if not meta:
        module.to(device)
    for part in parts:
        with part.view:
            hook.apply_tensor_parallel(part=part, mesh=mesh, plan=plan)  # splits layers; all later see the pieces
            hook.apply_expert_parallel(part=part, mesh=mesh, plan=plan)
            hook.apply_context_parallel(part=part, mesh=mesh, plan=plan)
            hook.apply_activation_checkpointing(part=part, mesh=mesh, plan=plan)  # inside the units of sharding
            hook.apply_compile(part=part, mesh=mesh, plan=plan)  # what is compiled includes the recomputation
    initialize.retie(module, origin)  # splitting gave each name a parameter of its own
    shards = any("shards_parameters" in words.gives for words in hook.requirements())
    if meta and not shards:
        initialize.materialize(module, device, plan.seed, origin)
    for part in parts:
        with part.view:
            hook.apply_data_parallel(part=part, mesh=mesh, plan=plan)  # last: it takes over the parameters
    if meta and shards:
        offloads = any("offloads_parameters" in words.gives for words in hook.requirements())
        host = torch.device("cpu") if offloads else None
        # each rank only its own shards
        initialize.materialize(module, device, plan.seed, origin, host, parts[0].initialised)
    return parts
