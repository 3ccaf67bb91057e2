"""Bytes of parameters, gradients and optimizer state on each rank, by arithmetic from a plan and a weightless model.

Nothing is allocated and no process group is needed, so it answers for any number of ranks. `tools/bench.py memory`
holds it against bytes counted from the tensors of real runs. Activations, communication buffers and the allocator's own
overhead aren't in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer

from framework.errors import FrameworkError
from framework.parts import ModelPart, whole
from framework.plan import MeshSpec, RunPlan
from framework.plugin_manager import manager_for
from framework.precision import local
from framework.state import clean


class NoOptimizerError(FrameworkError):
    """The optimizer can't be built without a Trainer, so its state isn't known beforehand."""


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds.

    Attributes:
        parameters: elements, between two steps.
        parameter_bytes: the same in bytes.
        gradient_bytes: after the backward.
        optimizer_bytes: after the first step; None if the optimizer can't be known before a Trainer exists.
        gathered_bytes: what a step holds on top while whole parameters are put together from their shards, at most.
    """

    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None
    gathered_bytes: int

    @property
    def total(self) -> int:
        """Bytes of parameters, gradients and optimizer state together."""
        return self.parameter_bytes + self.gradient_bytes + (self.optimizer_bytes or 0)


@dataclass(frozen=True)
class Share:
    """One parameter on one stage: its name, its size after tensor parallelism, and the unit that it is gathered with.

    Attributes:
        name: global name.
        shape: of the tensor-parallel piece.
        dtype: of the stored weight.
        trainable: whether it gets a gradient.
        unit: block that it belongs to; empty = the rest of the part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    unit: str

    @property
    def bytes(self) -> int:
        """Of the whole tensor-parallel piece."""
        return _numel(self.shape) * self.dtype.itemsize


class Place:
    """Stands in for `framework.mesh.Mesh` where only sizes and coordinates are asked: no process group is behind it."""

    def __init__(self, spec: MeshSpec, rank: int) -> None:
        self.spec = spec
        self._at = spec.coordinate(rank)

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        return int(getattr(self.spec, axis))

    def rank(self, axis: str) -> int:
        """Coordinate on `axis`."""
        return self._at[axis]


def bytes_per_rank(plan: RunPlan, model: LightningModule) -> list[RankBytes]:
    """Return what each rank of `plan` holds of `model`.

    Args:
        plan: mesh, precision and options.
        model: with its parameters on the meta device (or real); it isn't changed.
    """
    states = _optimizer_states(plan, model)
    words = given_words(plan)
    known: dict[tuple[int, ...], RankBytes] = {}
    stages: dict[tuple[int, int], list[Share]] = {}
    result = []
    for rank in range(plan.world_size):
        at = plan.mesh.coordinate(rank)
        shard = at["dp_shard"] * plan.mesh.cp + at["cp"]  # `Mesh.reducing`
        key = (at["pp"], shard, at["tp"])
        if key not in known:
            if (at["pp"], at["tp"]) not in stages:
                stages[at["pp"], at["tp"]] = list(shares(plan, model, rank))
            held = stages[at["pp"], at["tp"]]
            known[key] = _rank_bytes(plan, held, shard, states, words)
        result.append(known[key])
    return result


def given_words(plan: RunPlan) -> frozenset[str]:
    """Return all words that the chosen options give in `requirements`.

    Of these, this module knows `shards_parameters`, `shards_gradients`, `shards_optimizer` (over dp_shard x cp; the
    first implies the others, the second the third) and `frees_blocks` (whole parameters of a block are let go after its
    forward).
    """
    return frozenset(word for words in manager_for(plan).hook.requirements() for word in words.gives)


def stage_parts(plan: RunPlan, model: LightningModule, rank: int) -> list[ModelPart]:
    """Return the parts of `model` that global `rank` runs, cut from a copy on the meta device."""
    twin = copy.deepcopy(model).to("meta")
    place = Place(plan.mesh, rank)
    return manager_for(plan).hook.make_stages(module=twin, mesh=place, plan=plan) or [whole(twin)]


def shares(plan: RunPlan, model: LightningModule, rank: int) -> Iterator[Share]:
    """Yield each parameter of the stages of global `rank`, as large as its tensor-parallel piece there."""
    split = split_dims(plan, model)
    at, size = plan.mesh.coordinate(rank)["tp"], plan.mesh.tp
    precision: Any = manager_for(plan).hook.make_precision(plan=plan)
    for part in stage_parts(plan, model, rank):
        units = {p: name for name, block in part.blocks.items() for p in block.parameters()}
        for name, parameter in part_parameters(part):
            shape = tuple(parameter.shape)
            if name in split:
                shape = chunk(shape, size, at, split[name])
            dtype = parameter.dtype
            if precision is not None and dtype.is_floating_point and precision.param_dtype is not torch.float32:
                dtype = precision.param_dtype
            yield Share(name, shape, dtype, parameter.requires_grad, units.get(parameter, ""))


def part_parameters(part: ModelPart) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter of a part once, with its global name; on the meta device too."""
    with part.view:
        named = list(nn.Module.named_parameters(part.root))
    yield from ((clean(name), parameter) for name, parameter in named if parameter not in part.foreign)


def split_dims(plan: RunPlan, model: LightningModule) -> dict[str, int]:
    """Return which dim of which parameter is split over axis tp: global name -> dim; others are whole on each rank."""
    merged: dict[str, int] = {}
    for dims in manager_for(plan).hook.split_dims(plan=plan, model=model):
        merged |= dims
    return merged


def chunk(shape: Sequence[int], pieces: int, index: int, dim: int = 0) -> tuple[int, ...]:
    """Return the shape of piece `index` of a tensor cut into `pieces` along `dim`, as torch.chunk does."""
    step = -(-shape[dim] // pieces)
    left = max(0, min(step, shape[dim] - index * step))
    return (*shape[:dim], left, *shape[dim + 1 :])


def _rank_bytes(
    plan: RunPlan,
    held: Sequence[Share],
    shard: int,
    states: Mapping[str, StateBytes] | None,
    words: frozenset[str],
) -> RankBytes:
    """Add up what one rank holds of its shares.

    Args:
        plan: the run.
        held: its parameters after pipeline and tensor parallelism.
        shard: its coordinate on dp_shard, grown by cp.
        states: parameter name -> bytes of optimizer state; None = unknown.
        words: what the chosen options give.
    """
    shards = plan.mesh.dp_shard * plan.mesh.cp
    parameters_cut = shards if "shards_parameters" in words else 1
    gradients_cut = shards if parameters_cut > 1 or "shards_gradients" in words else 1
    optimizer_cut = shards if gradients_cut > 1 or "shards_optimizer" in words else 1
    elements = parameter_bytes = gradient_bytes = 0
    optimizer_bytes = 0.0
    units: dict[str, int] = {}
    for share in held:
        size = share.dtype.itemsize
        mine = _local(share, parameters_cut, shard)
        elements += mine
        parameter_bytes += mine * size
        units[share.unit] = units.get(share.unit, 0) + share.bytes
        if share.trainable:
            gradient_bytes += _local(share, gradients_cut, shard) * size
            if states is not None and share.name in states:
                optimizer_bytes += states[share.name](_local(share, optimizer_cut, shard))
    return RankBytes(
        parameters=elements,
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=None if states is None else round(optimizer_bytes),
        gathered_bytes=_gathered(units, words, plan) if parameters_cut > 1 else 0,
    )


def _local(share: Share, shards: int, index: int) -> int:
    if shards == 1:
        return _numel(share.shape)
    return _numel(chunk(share.shape or (1,), shards, index))


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _gathered(units: Mapping[str, int], words: frozenset[str], plan: RunPlan) -> int:
    """Whole parameters at their most: all units, or the root and two blocks (one runs, the next is fetched)."""
    if "frees_blocks" not in words or plan.mesh.pp > 1:
        return sum(units.values())
    blocks = sorted((size for name, size in units.items() if name), reverse=True)
    return units.get("", 0) + sum(blocks[:2])


# -- optimizer --------------------------------------------------------------------------------------------------------


StateBytes = Callable[[int], float]
"""Elements of a parameter that a rank holds -> bytes of their optimizer state."""


def _optimizer_states(plan: RunPlan, model: LightningModule) -> dict[str, StateBytes] | None:
    """Return the bytes of state by parameter name; None if it can't be known."""
    try:
        optimizers = optimizers_of(plan, model)
    except NoOptimizerError:
        return None
    precision: Any = manager_for(plan).hook.make_precision(plan=plan)
    names = {parameter: name for name, parameter in model.named_parameters()}
    states = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            per_dtype: dict[torch.dtype, StateBytes] = {}
            for parameter in group["params"]:
                dtype = parameter.dtype
                if precision is not None and precision.param_dtype is not torch.float32:
                    dtype = precision.param_dtype
                if dtype not in per_dtype:
                    per_dtype[dtype] = _state_bytes(optimizer, group, dtype)
                states[names[parameter]] = per_dtype[dtype]
    return states


def _state_bytes(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> StateBytes:
    known = getattr(optimizer, "state_bytes", None)  # `framework.state.OwnFormat`
    if known is not None:
        return lambda elements: float(known(elements, dtype.itemsize))
    element, tensor = probe(optimizer, group, dtype)
    return lambda elements: elements * element + tensor


def optimizers_of(plan: RunPlan, model: LightningModule) -> list[Optimizer]:
    """Build the run's optimizers over the parameters of `model`; their state doesn't exist before a first step.

    Raises:
        NoOptimizerError: `configure_optimizers` asks for something that only a Trainer has.
    """
    made: Any = manager_for(plan).hook.make_optimizer(module=model, plan=plan)
    if made is None:
        try:
            made = model.configure_optimizers()
        except (RuntimeError, AttributeError) as error:
            raise NoOptimizerError(f"configure_optimizers can't run without a Trainer: {error}") from error
    return list(_optimizers_in(made))


def _optimizers_in(made: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in whatever `configure_optimizers` may return."""
    if isinstance(made, Optimizer):
        yield made
    elif isinstance(made, Mapping):
        yield from _optimizers_in(made.get("optimizer"))
    elif isinstance(made, (list, tuple)):
        for entry in made:
            yield from _optimizers_in(entry)


def held_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a rank holds of a tensor; of one that is made of others (shards, 8 bits) those of all."""
    piece = local(tensor)
    made_of = getattr(piece, "__tensor_flatten__", None)
    if made_of is None:
        return piece.numel() * piece.element_size()
    return sum(held_bytes(getattr(piece, name)) for name in made_of()[0])


def probe(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> tuple[float, int]:
    """Find out what state an optimizer keeps, by one step of its class on a small tensor with the group's settings.

    Returns:
        Bytes an element of the parameter, and bytes a tensor (step counts).
    """
    small = nn.Parameter(torch.zeros(8, 8, dtype=dtype))
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
    twin = type(optimizer)([{**settings, "params": [small]}], **_required(optimizer))
    small.grad = torch.zeros_like(small)
    twin.step()
    element, tensor = 0.0, 0
    for value in twin.state[small].values():
        if isinstance(value, torch.Tensor):
            if value.numel() >= small.numel():
                element += value.numel() * value.element_size() / small.numel()
            else:
                tensor += value.numel() * value.element_size()
    return element, tensor


def _required(optimizer: Optimizer) -> dict[str, Any]:
    """Arguments without a default (`lr` of some optimizers) must be given to the constructor too."""
    import inspect

    parameters = inspect.signature(type(optimizer)).parameters.values()
    needed = [p.name for p in list(parameters)[1:] if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return {name: optimizer.defaults[name] for name in needed if name in optimizer.defaults}
