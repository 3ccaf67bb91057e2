"""`strategy=fsdp`: parameters, gradients and optimizer state sharded over ranks with FSDP2 (`fully_shard`).

Zhao et al., PyTorch FSDP (2023); Rajbhandari et al., ZeRO (2020), stage 3 (`full_shard`) or 2 (`shard_grad_op`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework import Problem, Requirements, RunPlan, hookimpl

if TYPE_CHECKING:
    from framework.mesh import Mesh
    from framework.parts import ModelPart

SHARDINGS = ("full_shard", "shard_grad_op")


@dataclass(kw_only=True, eq=False)
class FSDP:
    """Fully sharded data parallel.

    Attributes:
        sharding: `full_shard` frees a block's parameters after its forward and gathers them again for backward; what
            lies outside the blocks stays. `shard_grad_op` keeps all until the backward: a gather less, more memory.
            With a pipeline parameters always stay until the last backward of a step (schedules that split the backward
            would lose gradients).
        replicas: number of sharded copies (hybrid sharding): gradients are also averaged over the copies.
        size: ranks that one copy is sharded over; null = what `devices` leaves.
        cpu_offload: parameters, gradients and optimizer state live in host memory.
        find_unused_parameters: ranks may use different parameters, or leave some out. Everything is then one unit,
            gathered when the forward starts and reduced when the backward ends, since ranks that run different blocks
            have no common order to gather them in: a step needs the memory of whole parameters and gradients.
        replica_check: every how many optimizer steps the copies of hybrid sharding are held against one another;
            null = never.
    """

    sharding: str = "full_shard"
    replicas: int = 1
    size: int | None = None
    cpu_offload: bool = False
    find_unused_parameters: bool = False
    replica_check: int | None = None

    def __post_init__(self) -> None:
        if self.sharding not in SHARDINGS:
            raise ValueError(f"strategy.sharding={self.sharding} is unknown; choose {' or '.join(SHARDINGS)}.")
        if self.replicas < 1:
            raise ValueError(f"strategy.replicas={self.replicas} must be at least 1.")
        if self.replica_check is not None and self.replica_check < 1:
            raise ValueError(f"strategy.replica_check={self.replica_check} must be at least 1 step, or null for never.")

    @hookimpl
    def mesh_axes(self) -> Mapping[str, int | None]:
        """Shards on `dp_shard`, copies on `dp_replicate`."""
        return {"dp_replicate": self.replicas, "dp_shard": self.size}

    @hookimpl
    def requirements(self) -> Requirements:
        """Gives data parallelism and sharded parameters; needs a sampler that shards."""
        frees = {"frees_blocks"} if self.sharding == "full_shard" and not self.find_unused_parameters else set()
        offloads = {"offloads_parameters"} if self.cpu_offload else set()
        return Requirements(
            needs=frozenset({"data_sharding"}),
            gives=frozenset(
                {"data_parallel", "reduces_over_context", "shards_parameters", "expert_sharding", *frees, *offloads}
            ),
            why={"data_sharding": "ranks would train on the same samples"},
            variants=("sharding=shard_grad_op", "replicas=2"),
        )

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """A check of copies needs two of them; experts are units of their own."""
        problems = []
        if self.replica_check and self.replicas == 1:
            reason = "there is one sharded copy, with nothing to hold it against"
            problems.append(Problem(f"strategy.replica_check={self.replica_check}", reason, "strategy.replicas=2"))
        if self.find_unused_parameters and plan.mesh.ep > 1:
            reason = "experts are sharded apart from the rest, and with it everything is one unit"
            problems.append(Problem("strategy.find_unused_parameters=true", reason, "ep=none"))
        return problems

    @hookimpl
    def check_model(self, plan: RunPlan, model: Any) -> Sequence[Problem]:
        """FSDP2 reduces when the wrapped module's forward has ended; manual optimization makes its steps before."""
        if getattr(model, "automatic_optimization", True):
            return []
        reason = (
            "with manual optimization the module makes its optimizer steps while its step method runs, and FSDP "
            "reduces gradients after it"
        )
        return [Problem("strategy=fsdp", reason, "strategy=ddp")]

    @hookimpl
    def make_callbacks(self, plan: RunPlan) -> Sequence[Any]:
        """The replica check, where it is on."""
        if not self.replica_check:
            return []
        from framework_plugins.strategy.replica_check import ReplicaCheck

        return [ReplicaCheck(self.replica_check)]

    @hookimpl
    def apply_data_parallel(self, part: ModelPart, mesh: Mesh, plan: RunPlan) -> None:
        """Shard each module of experts and each block as a unit of its own, then the rest of the part with its root."""
        import torch
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        from framework_plugins.strategy.unused import UnitsAgree, UnusedParameters

        on_gpu = plan.accelerator == "cuda"
        copies = ("dp_replicate",) if mesh.size("dp_replicate") > 1 else ()
        blocks = {} if self.find_unused_parameters else part.blocks
        units = {**part.experts, **blocks, "the rest of the model": part.module}  # experts lie inside of blocks
        for name, unit in units.items():
            fully_shard(
                unit,
                mesh=mesh[*copies, "dp_mod_ep"] if name in part.experts else mesh.reducing(*copies, "dp_shard"),
                # A pipeline runs several forwards before a backward: resharding in between drops zero-bubble gradients.
                # The root's own parameters stay too: a step method may use them after it called the module.
                reshard_after_forward=(self.sharding == "full_shard" and part.stages == 1 and unit is not part.module),
                # gradients are reduced in fp32 (fp64 for fp64), whatever the weights are
                mp_policy=MixedPrecisionPolicy(
                    reduce_dtype=torch.float32 if _lowest(part) in (torch.bfloat16, torch.float16) else None,
                    cast_forward_inputs=False,
                ),
                offload_policy=CPUOffloadPolicy(pin_memory=on_gpu) if self.cpu_offload else OffloadPolicy(),
                ignored_params=part.foreign,
            )
        assert isinstance(part.module, FSDPModule)
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        if self.find_unused_parameters:
            groups = [mesh.reducing("dp_shard").get_group(), mesh.group("dp_replicate")]
            part.reduction = UnusedParameters(part, groups, device)
        else:
            part.reduction = UnitsAgree(part, units, mesh.reducing("dp_shard").get_group(), device)


def _lowest(part: ModelPart) -> object:
    """Return the dtype of the part's first floating-point parameter."""
    return next((p.dtype for p in part.parameters() if p.is_floating_point()), None)
