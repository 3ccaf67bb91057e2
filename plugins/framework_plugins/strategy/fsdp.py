"""`strategy=fsdp`: parameters, gradients and optimizer state sharded over ranks with FSDP2 (`fully_shard`).

Zhao et al., PyTorch FSDP (2023); Rajbhandari et al., ZeRO (2020), stage 3 (`full_shard`) or 2 (`shard_grad_op`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """

    sharding: str = "full_shard"
    replicas: int = 1
    size: int | None = None
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        if self.sharding not in SHARDINGS:
            raise ValueError(f"strategy.sharding={self.sharding} is unknown; choose {' or '.join(SHARDINGS)}.")
        if self.replicas < 1:
            raise ValueError(f"strategy.replicas={self.replicas} must be at least 1.")

    @hookimpl
    def mesh_axes(self) -> Mapping[str, int | None]:
        """Shards on `dp_shard`, copies on `dp_replicate`."""
        return {"dp_replicate": self.replicas, "dp_shard": self.size}

    @hookimpl
    def requirements(self) -> Requirements:
        """Gives data parallelism and sharded parameters; needs a sampler that shards."""
        frees = {"frees_blocks"} if self.sharding == "full_shard" else set()
        offloads = {"offloads_parameters"} if self.cpu_offload else set()
        return Requirements(
            needs=frozenset({"data_sharding"}),
            gives=frozenset({"data_parallel", "shards_parameters", "expert_sharding", *frees, *offloads}),
            why={"data_sharding": "ranks would train on the same samples"},
        )

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """`full_shard` with a pipeline is kept from resharding; say so rather than ignore it."""
        return []

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

        on_gpu = plan.accelerator == "cuda"
        experts = list(part.experts.values())  # inside of blocks, so before them
        for unit in (*experts, *part.blocks.values(), part.module):
            shards = "dp_mod_ep" if unit in experts else "dp_shard"
            fully_shard(
                unit,
                mesh=mesh[("dp_replicate", shards) if mesh.size("dp_replicate") > 1 else shards],
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


def _lowest(part: ModelPart) -> object:
    """Return the dtype of the part's first floating-point parameter."""
    return next((p.dtype for p in part.parameters() if p.is_floating_point()), None)
