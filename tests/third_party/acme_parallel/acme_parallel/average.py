"""`strategy=acme_average`: each gradient is averaged by an all-reduce of its own, once an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from framework import Requirements, hookimpl


@dataclass(kw_only=True, eq=False)
class Average:
    """One copy a rank.

    Attributes:
        size: number of copies; null = what `devices` leaves.
    """

    size: int | None = None

    @hookimpl
    def mesh_axes(self):
        return {"dp_replicate": self.size}

    @hookimpl
    def requirements(self):
        return Requirements(needs=frozenset({"data_sharding"}), excludes=frozenset({"pp", "tp"}))

    @hookimpl
    def apply_data_parallel(self, part, mesh):
        import torch.distributed as dist

        group, size = mesh.group("dp_replicate"), mesh.size("dp_replicate")

        def average(parameter):
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad.div_(size)

        for parameter in part.parameters():
            parameter.register_post_accumulate_grad_hook(average)
