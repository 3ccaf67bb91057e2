"""`strategy=ddp`: one copy of the model a rank, gradients averaged by all-reduce (Li et al., 2020).

Standing alone it is torch's DistributedDataParallel. Its wrapper doesn't compose with tensor or pipeline parallelism,
so there the composable `replicate` does the same; settings that only the wrapper has are then refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework import Problem, Requirements, RunPlan, hookimpl

if TYPE_CHECKING:
    from framework.mesh import Mesh
    from framework.parts import ModelPart


@dataclass(kw_only=True, eq=False)
class DDP:
    """Distributed data parallel.

    Attributes:
        size: number of copies; null = what `devices` leaves.
        find_unused_parameters: search the graph for parameters that get no gradient in a step (slower); needed where
            some are unused in some step.
        gradient_as_bucket_view: gradients are views of the communication buckets: one copy less.
        static_graph: the same parameters are used in every step: allows more overlap.
        bucket_cap_mb: size of a communication bucket, MB; null = torch's default (25).
        broadcast_buffers: copy buffers (BatchNorm statistics) from rank 0 before each forward.
    """

    size: int | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    bucket_cap_mb: float | None = None
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        if self.bucket_cap_mb is not None and self.bucket_cap_mb <= 0:
            raise ValueError(f"strategy.bucket_cap_mb={self.bucket_cap_mb} must be positive.")

    @hookimpl
    def mesh_axes(self) -> Mapping[str, int | None]:
        """Copies on `dp_replicate`."""
        return {"dp_replicate": self.size}

    @hookimpl
    def requirements(self) -> Requirements:
        """Gives data parallelism; needs a sampler that shards."""
        return Requirements(
            needs=frozenset({"data_sharding"}),
            gives=frozenset({"data_parallel", "reduces_over_context"}),
            why={"data_sharding": "ranks would train on the same samples"},
        )

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """Settings of the wrapper can't be had where the composable form stands in for it."""
        if not _composed(plan):
            return []
        other = " and ".join(axis for axis in ("tp", "pp") if getattr(plan.mesh, axis) > 1)
        defaults = DDP()
        return [
            Problem(
                f"strategy.{name}={getattr(self, name)}",
                f"only torch's DDP wrapper has it, and that doesn't work with {other}",
                f"strategy.{name}={getattr(defaults, name)}".replace("None", "null"),
            )
            for name in ("find_unused_parameters", "static_graph", "bucket_cap_mb")
            if getattr(self, name) != getattr(defaults, name)
        ]

    @hookimpl
    def apply_data_parallel(self, part: ModelPart, mesh: Mesh, plan: RunPlan) -> None:
        """Wrap the model, or replicate each block and then the rest."""
        if _composed(plan):
            from framework.adapters.torch_private import replicate

            for block_or_root in (*part.blocks.values(), part.module):
                replicate(block_or_root, mesh.reducing("dp_replicate"), part.foreign)
            return
        import inspect

        from torch.nn.parallel import DistributedDataParallel

        if not any(parameter.requires_grad for parameter in part.parameters()):
            return  # torch refuses; there is nothing to reduce
        settings: dict[str, Any] = {} if self.bucket_cap_mb is None else {"bucket_cap_mb": self.bucket_cap_mb}
        # torch 2.13 has a new name for it, and warns of the old one
        new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        settings["forward_sync_buffers" if new else "broadcast_buffers"] = self.broadcast_buffers
        part.module = DistributedDataParallel(
            part.module,
            process_group=mesh.reducing("dp_replicate").get_group(),
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            **settings,
        )


def _composed(plan: RunPlan) -> bool:
    return plan.mesh.tp > 1 or plan.mesh.pp > 1
