"""Private names of torch, each with the reason; `tests/contract/test_private_apis.py` notices when one moves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed._composable.replicate_with_fsdp import replicate as _replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, _collective_utils, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


def set_default_timeout(limit: timedelta) -> None:
    """Set the time limit of groups whose maker gives none.

    `new_group` and `init_device_mesh` read these two module globals when they are called; torch has no setter.
    """
    distributed_c10d.default_pg_timeout = limit
    distributed_c10d.default_pg_nccl_timeout = limit  # type: ignore[attr-defined]


def group_timeouts() -> dict[str, timedelta]:
    """Return the time limit of every group of this process: `<description> <number>`, ` on <device>` if several."""
    result = {}
    for group in distributed_c10d._world.pg_map:
        devices = sorted(group._device_types, key=str)
        backends = {device: group._get_backend(torch.device(device)) for device in devices}
        for device, backend in backends.items():
            name = f"{group.group_desc} {group.group_name}"
            if len({id(other) for other in backends.values()}) > 1:
                name += f" on {device.type}"
            result[name] = backend.options._timeout
    return result


def reduction_finished(wrapped: DistributedDataParallel) -> bool:
    """Whether the last backward reduced all gradients of a `DistributedDataParallel`.

    Torch says so only in the forward after, when the step was made with gradients of this rank alone. Its own question
    is the first thing that `_rebuild_buckets` does; that it may then put the buckets into the order in which gradients
    came, as the next forward would do, changes no value.
    """
    try:
        wrapped.reducer._rebuild_buckets()
    except RuntimeError as error:
        if "finished reduction" in str(error):
            return False
        raise
    return True


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

    Sharding propagation and redistribution keep results by mesh layout, with the first mesh of that layout; in a new
    world its groups no longer exist ("Could not resolve the process group registered under the name 6"). Such a mesh
    also keeps the threads of its groups alive, a hundred wake-ups a second each.
    """
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def storage_id(tensor: Tensor) -> int:
    """Return what a tensor and its views (`.data` too) have in common, also on the meta device (no addresses)."""
    return int(tensor.untyped_storage()._cdata)


class _InPlace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, see: Callable[[str, Tensor, Sequence[Any], dict[str, Any]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for index, argument in enumerate(func._schema.arguments):
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                    name = func.overloadpacket.__name__
                    self.see(name if index == 0 else f"{name} ({argument.name}=)", value, args[1:], kwargs)
        return func(*args, **kwargs)


class _NotMeta(TorchFunctionMode):
    """Some functions of `torch.nn.init` do nothing on the meta device, in silence: tell them that it isn't one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = func == torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
        if asks and sys._getframe(1).f_globals.get("__name__") == nn.init.__name__:
            return False
        return func(*args, **(kwargs or {}))


@contextmanager
def in_place_operations(
    see: Callable[[str, Tensor, Sequence[Any], dict[str, Any]], None],
    see_trunc_normal: Callable[[Tensor, float, float, float, float], bool],
) -> Generator[None, None, None]:
    """Inside, `see(name, target, other arguments, keywords)` is told of every in-place operation before it runs.

    `torch.nn.init.trunc_normal_` draws until all values fit, which can't be done without values;
    `see_trunc_normal(tensor, mean, std, a, b)` is asked instead, and the function runs only if that returns False.
    A dispatch mode and not the public function mode: half of `torch.nn.init` is one function to the latter.
    """
    original = nn.init._no_grad_trunc_normal_

    def trunc_normal(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen = see_trunc_normal(tensor, *args[:4])  # (mean, std, a, b), by position from `trunc_normal_`
        return tensor if seen else original(tensor, *args, **kwargs)

    nn.init._no_grad_trunc_normal_ = trunc_normal
    try:
        with _NotMeta(), _InPlace(see):
            yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


def global_indices(tensor: DTensor) -> list[Tensor]:
    """Return for each dim the indices in the whole that this rank's piece holds, in the order in which it holds them.

    Shards are cut as `torch.chunk` does, uneven ones too. A `_StridedShard` (FSDP over a dim that tensor parallelism
    has split) was cut after the mesh axes on its right.

    Raises:
        RuntimeError: the result doesn't have the piece's shape, so the layout isn't one that is known here.
    """
    mesh, local = tensor.device_mesh, tensor.to_local()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    axes = [torch.arange(size) for size in tensor.shape]
    strided = [at for at, placement in enumerate(tensor.placements) if isinstance(placement, _StridedShard)]
    plain = [at for at, placement in enumerate(tensor.placements) if isinstance(placement, Shard) and at not in strided]
    for at in (*plain, *reversed(strided)):
        dim = tensor.placements[at].dim  # type: ignore[attr-defined]
        pieces = axes[dim].chunk(mesh.size(at))
        axes[dim] = pieces[coordinate[at]] if coordinate[at] < len(pieces) else axes[dim][:0]
    if tuple(map(len, axes)) != tuple(local.shape):
        raise RuntimeError(f"Unknown layout {tensor.placements} of a tensor of shape {tuple(tensor.shape)}")
    return axes


def around_calls(module: nn.Module, call: Callable[..., Any]) -> None:
    """Have every call of `module` become `call(run, *args, **kwargs)`, hooks and compilation within `run`.

    The attribute is the one that `Module.compile` sets; a wrapper module instead would change names and types, a hook
    couldn't leave the call out.
    """
    inner = module._compiled_call_impl or module._call_impl
    module._compiled_call_impl = partial(call, inner)


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply all tensors in place, in few kernels; torch's `_foreach` operators have no public name."""
    torch._foreach_mul_(list(tensors), factor)


def foreach_norm(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the norm of each tensor, computed in `dtype` (None = its own)."""
    return list(torch._foreach_norm(list(tensors), order, dtype=dtype))


def foreach_clamp_(tensors: Sequence[Tensor], limit: float) -> None:
    """Clamp all tensors to [-limit, limit] in place."""
    torch._foreach_clamp_min_(list(tensors), -limit)
    torch._foreach_clamp_max_(list(tensors), limit)


def tree_leaves(tree: Any) -> list[Any]:
    """Return what hangs in nested containers, in order."""
    leaves: list[Any] = _pytree.tree_leaves(tree)
    return leaves


def tree_map(function: Callable[..., Any], tree: Any) -> Any:
    """Return the same nested containers with `function` applied to each leaf."""
    return _pytree.tree_map(function, tree)
