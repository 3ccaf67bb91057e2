"""The small collectives that Lightning asks its strategy for: metrics, decisions, objects."""

from __future__ import annotations

from abc import ABC
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from framework.errors import RunFailedError
from framework.mesh import Mesh
from framework.plan import RunPlan


class MeshCollectives(ParallelStrategy, ABC):
    """What a strategy over a mesh answers without knowing the module."""

    plan: RunPlan
    _mesh: Mesh | None

    @property
    def mesh(self) -> Mesh:
        """The mesh; exists once the processes are connected."""
        if self._mesh is None:
            raise RunFailedError("The mesh exists only after the processes were connected (in Trainer.fit).")
        return self._mesh

    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a metric over the data axes (ranks that differ on tp or pp hold the same value)."""
        if not isinstance(tensor, Tensor):
            return tensor
        result = tensor.to(self.root_device).clone()
        name = str(reduce_op or "sum").lower().removeprefix("redoptype.")
        name = {"avg": "mean"}.get(name, name)
        op = getattr(dist.ReduceOp, {"mean": "SUM"}.get(name, name.upper()))
        if group is not None:
            dist.all_reduce(result, op, group=group)
            return result / dist.get_world_size(group) if name == "mean" else result
        for axis in ("dp_replicate", "dp_shard", "cp"):
            if self.mesh.size(axis) > 1:
                dist.all_reduce(result, op, group=self.mesh.group(axis))
        return result / (self.plan.mesh.data_ranks * self.plan.mesh.cp) if name == "mean" else result

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all (or any) ranks of the world decided so."""
        flag = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(flag, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag.item())

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from global rank `src` to all."""
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src=src)
        return box[0]
