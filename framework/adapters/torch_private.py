"""Private names of torch, each with the reason; `tests/contract/test_private_apis.py` notices when one moves."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed._composable.replicate_with_fsdp import replicate as _replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def set_default_timeout(limit: timedelta) -> None:
    """Set the time limit of groups whose maker gives none.

    `new_group` and `init_device_mesh` read these two module globals when they are called; torch has no setter.
    """
    distributed_c10d.default_pg_timeout = limit
    distributed_c10d.default_pg_nccl_timeout = limit


def group_timeouts() -> dict[str, timedelta]:
    """Return the time limit of every group of this process: `<description> <number>`, ` on <device>` if several."""
    result = {}
    for group in distributed_c10d._world.pg_map:
        if not isinstance(group, distributed_c10d.ProcessGroup):
            continue  # a group that this rank isn't in
        devices = sorted(group._device_types, key=str)
        backends = {device: group._get_backend(torch.device(device)) for device in devices}
        for device, backend in backends.items():
            name = f"{group.group_desc} {group.group_name}"
            if len({id(other) for other in backends.values()}) > 1:
                name += f" on {device.type}"
            result[name] = backend.options._timeout
    return result


@contextmanager
def zero_leaf_gradients(loss: Tensor) -> Generator[None, None, None]:
    """Backward of `loss` inside gives every leaf a zero gradient of the right shape, whatever the graph computes.

    Used where a micro-batch has no valid token: its mean is 0 / 0, yet the rank has to take part in the reductions.
    The leaves' `AccumulateGrad` nodes are reached through the graph, so it works under any wrapper.
    """
    handles = []
    seen: set[Any] = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            handles.append(node.register_prehook(lambda gradients: tuple(_zeros(g) for g in gradients)))
        todo += [following for following, _ in node.next_functions]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zeros(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else torch.zeros_like(gradient)


def replicate(module: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
    """Replicate `module` over the 1-D `mesh`, in place; composes with tensor and pipeline parallelism.

    The public `torch.distributed._composable.replicate` is the one on DDP's reducer, which doesn't compose; torchtitan
    uses this one too.
    """
    _replicate(module, mesh=mesh, ignored_params=ignored)


class RepeatableReplay(AbstractContextManager["RepeatableReplay"]):
    """Lets a selectively checkpointed region be recomputed more than once.

    A pipeline that splits backward into gradients of inputs and of weights (zero-bubble schedules) runs two graph tasks
    over a block, and each recomputes it; torch hands out a kept output once only ("Trying to backward an extra time").
    The kept outputs live until the block's graph is freed.

    Args:
        replay: the second of the two contexts of `create_selective_checkpoint_contexts`.
    """

    def __init__(self, replay: Any) -> None:
        self.replay = replay
        self.kept: dict[Any, dict[int, Any]] | None = None

    def __enter__(self) -> RepeatableReplay:
        if self.kept is None:
            self.kept = {operator: dict(outputs) for operator, outputs in self.replay.storage.items()}
        for operator, outputs in self.kept.items():
            self.replay.storage[operator].update(outputs)
        self.replay.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.replay.__exit__(*error)


@contextmanager
def swapped_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> Generator[None, None, None]:
    """Inside, `module.<name>` is the given tensor (any tensor) instead of the parameter, for direct parameters only.

    `torch.func.functional_call` does the same around a call of the whole module; this works inside its `forward`.
    """
    before = {name: module._parameters[name] for name in tensors}
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(before)


def forget_meshes() -> None:
    """Clear what DTensor remembers about meshes: for a process that makes a new process group after destroying one.

    Results of sharding propagation and redistribution plans are kept by mesh layout and hold the first mesh of that layout;
    in a new world its groups no longer exist ("Could not resolve the process group registered under the name 6").
    """
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _clear_sharding_prop_cache()
