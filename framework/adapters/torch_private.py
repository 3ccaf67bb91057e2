"""Private names of torch, each with the reason; `tests/contract/test_private_apis.py` notices when one moves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor, Shard, _collective_utils, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as _data_worker


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


def begun_collectives(groups: Sequence[Any]) -> dict[str, int]:
    """Return how many collectives this process has begun in each group, by its name; may be asked from any thread."""
    return {group.group_name: group._get_sequence_number_for_group() for group in groups}


def store_of_the_world() -> Any:
    """Return a connection of one's own to the store (a `Store`) through which the default group met."""
    store: Any = distributed_c10d._get_default_store()
    return store.clone()


@contextmanager
def zero_leaf_gradients(loss: Tensor) -> Generator[None, None, None]:
    """Backward of `loss` inside gives every leaf a zero gradient of the right shape, whatever the graph computes.

    Used where a micro-batch has no valid token: its mean is 0 / 0, yet the rank has to take part in the reductions.
    What is hooked are the nodes before the leaves, reached through the graph: it works under any wrapper, and a
    pipeline's other micro-batches, which share the leaves' `AccumulateGrad` nodes, keep their gradients.

    An autograd function whose backward sends gradients to other ranks, and gets theirs, says so by
    `ctx.crosses_ranks = True`. It is given zeros to send, and what lies behind it is left alone, for there gradients of
    losses that are valid arrive.
    """
    nodes = _reached([loss.grad_fn])
    crossing = {node for node in nodes if getattr(node, "crosses_ranks", False)}
    behind = _reached([following for node in crossing for following, _ in node.next_functions])
    handles = []
    for node in nodes - behind:
        if node in crossing:
            handles.append(node.register_prehook(lambda gradients: tuple(_zeros(g) for g in gradients)))
            continue
        ends = [one in behind or type(one).__name__ == "AccumulateGrad" for one, _ in node.next_functions]
        if any(ends):
            handles.append(node.register_hook(_zeros_at(ends)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _reached(start: Sequence[Any]) -> set[Any]:
    """Return the nodes of an autograd graph that gradients flow through from those of `start`, themselves included."""
    seen: set[Any] = set()
    todo = list(start)
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return seen


def leaves_of(loss: Tensor) -> set[int] | None:
    """Return the `id` of every tensor that the backward of `loss` will give a gradient.

    None: the graph doesn't show it, since a part of it is only built in backward (reentrant checkpointing).
    """
    found = set()
    for node in _reached([loss.grad_fn]):
        kind = type(node).__name__
        if kind == "CheckpointFunctionBackward":
            return None
        if kind == "AccumulateGrad":
            found.add(id(node.variable))
    return found


def _zeros_at(chosen: Sequence[bool]) -> Callable[[Sequence[Tensor | None], Any], tuple[Tensor | None, ...]]:
    """Return a hook of a node that replaces the chosen gradients of its inputs."""

    def hook(gradients: Sequence[Tensor | None], _: Any) -> tuple[Tensor | None, ...]:
        return tuple(_zeros(g) if zero else g for g, zero in zip(gradients, chosen, strict=True))

    return hook


def _zeros(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else torch.zeros_like(gradient)


@dataclass(frozen=True)
class UnitParameter:
    """A trainable parameter of a unit of FSDP2, when the unit's backward has run.

    Attributes:
        owner: module that it hangs on.
        key: its name there.
        parameter: this rank's shard.
        has_gradient: whether this rank has one, from this or an earlier micro-step of the window.
    """

    owner: nn.Module
    key: str
    parameter: nn.Parameter
    has_gradient: bool


def watch_unit(
    module: nn.Module, before_forward: Callable[[], None], before_reduction: Callable[[list[UnitParameter]], None]
) -> None:
    """Be told before a unit of FSDP2 is gathered for a forward, and before its gradients are reduced.

    FSDP2's public hooks are called with the reduced gradients, or with one message of all, and not at all by a rank
    that has none; a rank that disagrees with the others must know before its message is on the way.

    Args:
        module: that `fully_shard` was applied to.
        before_forward: called in each forward, also where parameters are still gathered.
        before_reduction: called after each backward that reduces.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:  # type: ignore[operator]
        _tell_before(group, before_forward, before_reduction)


def _tell_before(group: Any, before_forward: Any, before_reduction: Any) -> None:
    pre_forward, post_backward = group.pre_forward, group.post_backward

    def forward(*args: Any) -> Any:
        before_forward()
        return pre_forward(*args)

    def backward(*args: Any) -> None:
        if group.reduce_grads:
            before_reduction([
                UnitParameter(
                    one._module_info.module,
                    one._module_info.param_name,
                    one.sharded_param,
                    one.unsharded_accumulated_grad is not None or one.unsharded_param.grad is not None,
                )
                for one in group.fsdp_params
                if one.sharded_param.requires_grad and hasattr(one, "_unsharded_param")
            ])  # fmt: skip
        post_backward(*args)

    group.pre_forward, group.post_backward = forward, backward


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


def schedule_of_actions(
    rows: Sequence[Sequence[str]], stages: Sequence[Any], microbatches: int, loss_fn: Callable[..., Any]
) -> Any:
    """Return torch's pipeline runtime for a compute-only table of actions: a row a rank, as in its CSV files.

    Torch adds sends, receives and, for FSDP, gathers. Its own `_load_csv` does the same from a file's name, which every
    rank would have to read again; both are private.
    """
    make: Any = _PipelineScheduleRuntime
    runtime = make(list(stages), microbatches, loss_fn=loss_fn, scale_grads=False)
    runtime._prepare_schedule_with_comms(
        {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}, format="compute_only"
    )
    return runtime


def in_backward() -> bool:
    """Whether this thread runs a backward: a forward is then a recomputation."""
    return torch._C._current_graph_task_id() != -1


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return the 1-D mesh over all ranks of `mesh`, known to its root by a name of its own; collective."""
    return mesh._flatten()


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


def is_view(tensor: Tensor) -> bool:
    """Whether autograd takes a tensor for a view of another, which then can't be detached in place."""
    return bool(tensor._is_view())


def keep_saved_buffers() -> None:
    """Let what a compiled forward saved be read by more than one backward.

    Compiled backwards take over the memory of saved tensors ("donated buffers"), and a zero-bubble schedule runs one
    backward for the inputs and another for the weights.
    """
    functorch_config.donated_buffer = False


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
    leaves: list[Any] = []
    _gather_leaves(tree, leaves)
    return leaves


_LEAVES = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.Size})
"""What hangs in nearly all trees; torch asks each value whether it is one of dozens of containers."""


def _gather_leaves(tree: Any, leaves: list[Any]) -> None:
    kind = type(tree)
    if kind in _LEAVES:
        leaves.append(tree)
    elif kind is tuple or kind is list:
        for child in tree:
            _gather_leaves(child, leaves)
    elif kind is dict:
        for child in tree.values():
            _gather_leaves(child, leaves)
    else:
        leaves.extend(_pytree.tree_leaves(tree))


def tree_map(function: Callable[..., Any], tree: Any) -> Any:
    """Return the same nested containers with `function` applied to each leaf."""
    kind = type(tree)
    if kind in _LEAVES:
        return function(tree)
    if kind is tuple or kind is list:
        return kind([tree_map(function, child) for child in tree])
    if kind is dict:
        return {name: tree_map(function, child) for name, child in tree.items()}
    return _pytree.tree_map(function, tree)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over `group`, as a new tensor.

    By the operators that DTensor uses: compilation and selective checkpointing know these by name.
    """
    return _done(torch.ops._c10d_functional.all_reduce(tensor.contiguous(), "sum", group.group_name))


def all_gather(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the equal-sized tensors of all ranks of `group`, one after the other along `dim`."""
    size = group.size()
    gathered = _done(
        torch.ops._c10d_functional.all_gather_into_tensor(tensor.contiguous(), size, group.group_name)
    )  # along the first dim
    return torch.cat(gathered.chunk(size), dim)


def reduce_scatter(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's piece along `dim`, which the size of `group` divides, of the sum over `group`."""
    size = group.size()
    pieces = torch.cat(tensor.chunk(size, dim))
    return _done(torch.ops._c10d_functional.reduce_scatter_tensor(pieces, "sum", size, group.group_name))


def _done(pending: Tensor) -> Tensor:
    result: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return result


_worker: tuple[int, int] | None = None


def take_worker() -> tuple[int, int] | None:
    """Return which DataLoader worker this process is, of how many; None = none.

    From then on torch denies that it is one, so that a dataset that asks yields all of itself and not a share.
    """
    global _worker  # noqa: PLW0603 - one process is one worker
    info = get_worker_info()
    if info is not None:
        _worker = (info.id, info.num_workers)
        _data_worker._worker_info = None
    return _worker
