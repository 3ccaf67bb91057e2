"""`Mesh`: the one object that orders the axes; everybody else asks it by name.

The rank list is laid out row-major over `plan.AXES` (pp outermost, tp innermost, so that tensor-parallel neighbours are
nearest). Axes of size 1 exist like any other and need no special case.

With expert parallelism there is a second layout of the same ranks, `plan.EXPERT_AXES`, in which dp_shard is cut into
dp_mod_ep x ep: views that name one of these two come from it.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from framework.adapters.torch_private import flattened
from framework.plan import AXES, EXPERT_AXES, MeshSpec


class Mesh:
    """A `DeviceMesh` over all axes with named views.

    Must be built on all ranks at the same point, after the process group was initialised.

    Args:
        spec: sizes of the axes; their product must be the world size.
        device_type: `cpu` or `cuda`.
    """

    def __init__(self, spec: MeshSpec, device_type: str = "cpu") -> None:
        if dist.get_world_size() != spec.world_size:
            raise ValueError(f"The mesh {spec} has {spec.world_size} ranks, but {dist.get_world_size()} were started")
        self.spec = spec
        self.device_type = device_type
        self.device_mesh: DeviceMesh = init_device_mesh(device_type, spec.shape, mesh_dim_names=AXES)
        self.expert_mesh: DeviceMesh | None = None
        """The layout `EXPERT_AXES`; None without expert parallelism."""
        if spec.ep > 1:
            sizes = tuple(getattr(spec, axis) for axis in EXPERT_AXES)
            self.expert_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=EXPERT_AXES)
        self._views: dict[tuple[str, ...], DeviceMesh] = {}

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """Return the sub-mesh of one axis (1-D) or of several (N-D, in the order of `AXES` or `EXPERT_AXES`)."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        if names not in self._views:
            layout = self.device_mesh if set(names) <= set(AXES) else self.expert_mesh
            if layout is None:
                raise KeyError(f"The mesh {self.spec} has no axes {names}: no expert parallelism is on")
            self._views[names] = layout[names if len(names) > 1 else names[0]]
        return self._views[names]

    def reducing(self, *axes: str) -> DeviceMesh:
        """Return the sub-mesh of data `axes` over which gradients are averaged: the last one grown by cp.

        Ranks that differ on cp have other tokens of the same samples, so their gradients are averaged too, and what is
        sharded may be spread over them. Collective the first time, where both axes are larger than 1.
        """
        *others, last = axes
        if self.size("cp") == 1:
            return self[tuple(axes)]
        if ("reducing", last) not in self._views:
            self._views["reducing", last] = self["cp"] if self.size(last) == 1 else flattened(self[last, "cp"])
        grown = self._views["reducing", last]
        if not others:
            return grown
        assert grown.mesh_dim_names is not None
        return self.device_mesh[(*others, *grown.mesh_dim_names)]

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        return int(getattr(self.spec, axis))

    def rank(self, axis: str) -> int:
        """Coordinate of this rank on `axis`."""
        return int(self[axis].get_local_rank())

    def group(self, axis: str) -> dist.ProcessGroup:
        """Process group of the ranks that differ from this one only on `axis`."""
        return self[axis].get_group()

    @property
    def data_rank(self) -> int:
        """Which share of each batch this rank reads."""
        return self.spec.data_rank(dist.get_rank())
