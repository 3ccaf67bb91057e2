"""Initial weights that don't depend on the mix.

A module that has a method `init_weights()` is built on the meta device, where a parameter has a shape but no memory.
Before anything is cut or split, its initialisation is *recorded*: every `reset_parameters()` of its sub-modules, then
`init_weights()`, run on the meta parameters, and what they do to each is noted (`normal_(0, 0.02)`, then `mul_(0.5)`).
After the surgery each rank *replays* the notes on the pieces that it holds. A random number there is a function of the
run's seed, the parameter's global name, the number of the draw and the element's position in the whole parameter
(`framework.counter`), so that the pieces of any mix put together are the same weights, to the last bit.

A module without `init_weights` is built with its weights on every rank, from the same seed, before the surgery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from framework import counter
from framework.adapters import torch_private
from framework.errors import RunFailedError, UsageError
from framework.state import clean

CHUNK = 1 << 16
"""Elements filled at once: bounds the memory for positions and 64-bit values."""

REPLAYED = frozenset(
    {
        "fill_", "zero_", "copy_", "add_", "sub_", "mul_", "div_", "neg_", "abs_", "pow_", "exp_", "log_", "sqrt_",
        "rsqrt_", "reciprocal_", "clamp_", "clamp_min_", "clamp_max_", "erfinv_", "sin_", "cos_", "tanh_", "sigmoid_",
    }
)  # fmt: skip
"""In-place operations that act on each element alone."""

DRAWS = frozenset({"normal_", "uniform_", "trunc_normal_", "exponential_", "bernoulli_"})


@dataclass(frozen=True)
class Step:
    """One noted operation on a parameter or on a region of it.

    Attributes:
        name: of the operation, `normal_`.
        replay: `(values, draw) -> None` changes float64 values in place; `draw()` gives a uniform number for each.
        region: positions (int64, sorted) in the flat parameter that the operation is applied to; None = all.
        source: what is copied, float64 and flat, in the order of `region`; None unless `name` is `copy_`.
    """

    name: str
    replay: Callable[[Tensor, Callable[[], Tensor]], None]
    region: Tensor | None = None
    source: Tensor | None = None


@dataclass
class Origin:
    """What surgery would lose: which names are one parameter, and how each is initialised.

    Attributes:
        ties: groups of names of one and the same parameter, in the order of registration.
        steps: name (the first of a group) -> its noted initialisation; only names on the meta device.
        missed: names on the meta device that no initialisation touched.
    """

    ties: list[tuple[str, ...]] = field(default_factory=list)
    steps: dict[str, list[Step]] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)

    def first(self, name: str) -> str:
        """Return the first name of the parameter that is called `name`."""
        return next((group[0] for group in self.ties if name in group), name)


def origin(module: nn.Module) -> Origin:
    """Note ties and initialisation of a module as its author wrote it; call before anything is cut or split.

    Raises:
        UsageError: `init_weights` does something that can't be replayed on a piece of a parameter, or leaves some of
            the parameters and buffers on the meta device as they are.
    """
    result = Origin(ties=_ties(module))
    named = [*module.named_parameters(), *module.named_buffers()]
    meta = {clean(name): tensor for name, tensor in named if tensor.is_meta}
    if meta:
        result.steps = _record(module, meta)
        result.missed = [name for name in meta if not result.steps[name]]
    if result.missed:
        some = ", ".join(result.missed[:3]) + (f" and {len(result.missed) - 3} more" if len(result.missed) > 3 else "")
        raise UsageError(
            f"{type(module).__name__}.init_weights leaves {some} as they are, but the module is built without weights: "
            "set every parameter and buffer there, or remove init_weights so that the module is built with its weights."
        )
    return result


def _ties(module: nn.Module) -> list[tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean(name))
    return [tuple(group) for group in names.values() if len(group) > 1]


# -- recording ---------------------------------------------------------------------------------------------------------
def _record(module: nn.Module, meta: dict[str, Tensor]) -> dict[str, list[Step]]:
    init_weights = getattr(module, "init_weights", None)
    if not callable(init_weights):
        raise UsageError(
            f"{type(module).__name__} has parameters on the meta device but no method init_weights to set them: "
            "build it with its weights."
        )
    recorder = _Recorder(type(module).__name__, meta)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), recorder.recording():
        for child in module.modules():
            reset = getattr(child, "reset_parameters", None)
            if callable(reset) and any(t.is_meta for t in [*child.parameters(False), *child.buffers(False)]):
                reset()
        init_weights()
    return recorder.steps


class _Recorder:
    """Notes in-place operations on the tensors of `meta`, found by their storage, so through views and `.data` too."""

    def __init__(self, owner: str, meta: dict[str, Tensor]) -> None:
        self.owner = owner
        self.names = {torch_private.storage_id(tensor): name for name, tensor in meta.items()}
        self.tensors = meta
        self.steps: dict[str, list[Step]] = {name: [] for name in meta}

    def recording(self) -> Any:
        return torch_private.in_place_operations(self._see, self._see_trunc_normal)

    def _see(self, name: str, target: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """One in-place operation is about to run on `target`."""
        parameter = self.names.get(torch_private.storage_id(target)) if target.is_meta else None
        if parameter is None:
            return
        region = _region(self.tensors[parameter], target)
        kwargs = {key: value for key, value in kwargs.items() if key not in ("generator", "non_blocking")}
        arguments = dict(zip(_NAMES.get(name, ()), args, strict=False)) | kwargs
        if name in DRAWS:
            self._note(parameter, Step(name, _draw(name, arguments), region))
        elif name == "copy_" and isinstance(args[0], Tensor) and not args[0].is_meta:
            source = args[0].detach().expand(target.shape).to("cpu", torch.float64).reshape(-1)
            order = None if region is None else torch.argsort(_positions(target))
            self._note(parameter, Step(name, _nothing, region, source if order is None else source[order]))
        elif name in REPLAYED and not any(_is_unknown(arg) for arg in (*args, *kwargs.values())):
            self._note(parameter, Step(name, _apply(name, tuple(args), kwargs), region))
        else:
            raise UsageError(
                f"{self.owner}.init_weights sets {parameter} by {name}, which can't be replayed on a piece of it: use "
                "torch.nn.init's normal_, uniform_, trunc_normal_, xavier, kaiming, constants, or remove init_weights "
                "so that the module is built with its weights."
            )

    def _see_trunc_normal(self, target: Tensor, mean: float, std: float, a: float, b: float) -> bool:
        if not target.is_meta or torch_private.storage_id(target) not in self.names:
            return False
        self._see("trunc_normal_", target, (mean, std, a, b), {})
        return True

    def _note(self, parameter: str, step: Step) -> None:
        steps = self.steps[parameter]
        if step.region is None and (step.name in DRAWS or step.name in ("fill_", "zero_", "copy_")):
            steps.clear()  # what was there is overwritten
        steps.append(step)


_NAMES = {
    "normal_": ("mean", "std"),
    "uniform_": ("from", "to"),
    "trunc_normal_": ("mean", "std", "a", "b"),
    "exponential_": ("lambd",),
    "bernoulli_": ("p",),
}


def _is_unknown(argument: Any) -> bool:
    """Whether an operand can't be replayed: it has no values, or one for each element."""
    return isinstance(argument, Tensor) and (argument.is_meta or argument.ndim > 0)


def _nothing(values: Tensor, draw: Callable[[], Tensor]) -> None:
    pass


def _apply(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor, Callable[[], Tensor]], None]:
    return lambda values, draw: getattr(values, name)(*args, **kwargs)


def _draw(name: str, arguments: dict[str, Any]) -> Callable[[Tensor, Callable[[], Tensor]], None]:
    """Return what sets values to random ones, by the inverse distribution function of a uniform number."""

    def replay(values: Tensor, draw: Callable[[], Tensor]) -> None:
        u = draw()
        if name == "normal_":
            u = torch.special.ndtri(u) * arguments.get("std", 1.0) + arguments.get("mean", 0.0)
        elif name == "uniform_":
            low, high = arguments.get("from", 0.0), arguments.get("to", 1.0)
            u = u * (high - low) + low
        elif name == "trunc_normal_":
            mean, std, a, b = (float(arguments[key]) for key in ("mean", "std", "a", "b"))
            ends = torch.special.ndtr(torch.tensor([(a - mean) / std, (b - mean) / std], dtype=torch.float64))
            low, high = float(ends[0]), float(ends[1])
            u = (torch.special.ndtri(u * (high - low) + low) * std + mean).clamp_(a, b)
        elif name == "exponential_":
            u = -torch.log1p(-u) / arguments.get("lambd", 1.0)
        else:
            u = (u < float(arguments.get("p", 0.5))).double()
        values.copy_(u)

    return replay


def _positions(view: Tensor) -> Tensor:
    """Return the positions in its storage of a view's elements, in the view's order."""
    positions = torch.tensor(int(view.storage_offset()))
    for size, stride in zip(view.shape, view.stride(), strict=True):
        positions = positions.unsqueeze(-1) + torch.arange(size) * stride
    return positions.reshape(-1)


def _region(whole: Tensor, view: Tensor) -> Tensor | None:
    if view.numel() == whole.numel() and view.shape == whole.shape and view.stride() == whole.stride():
        return None
    return _positions(view).sort().values


# -- replaying ---------------------------------------------------------------------------------------------------------
def materialize(
    module: nn.Module,
    device: torch.device,
    seed: int,
    origin: Origin,
    parameters_on: torch.device | None = None,
    each: Callable[[nn.Parameter], None] | None = None,
) -> None:
    """Give every parameter and buffer on the meta device memory and its initial values, in place.

    Call after the surgery. What another stage owns must not be reachable from `module`.

    Args:
        module: the user's module; its parameters are plain tensors or DTensors of any layout.
        device: where the run computes; what has memory already is moved there too.
        seed: of the run.
        origin: from before the surgery.
        parameters_on: where the new parameters live; None = `device`. With offloading that is the host.
        each: called with each new parameter before the next one is made.
    """
    made: dict[str, nn.Parameter] = {}
    before: dict[str, nn.Parameter] = {}

    def draw(first: str) -> None:
        fill(made[first], origin.steps[first], counter.derive("weights", seed, first))
        if each is not None:
            each(made[first])

    with torch.no_grad():
        for name, holder, key in _named(module, "_parameters"):
            parameter = holder._parameters[key]
            if parameter is not None and parameter.is_meta:
                first = origin.first(name)
                if first not in made:
                    # a new object: FSDP takes note of it when it first runs
                    empty = torch.empty_like(parameter, device=parameters_on or device)
                    made[first] = nn.Parameter(empty, parameter.requires_grad)
                    made[first].__dict__.update(parameter.__dict__)  # what its author or a plugin noted on it
                    before[first] = parameter
                    if each is not None:
                        draw(first)
                _check_alike(first, before[first], name, parameter)
                holder._parameters[key] = made[first]
            elif parameter is not None and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(device)
        if each is None:
            for first in made:  # all have their memory by now: what drawing needs for a moment leaves no holes between
                draw(first)
        for name, holder, key in _named(module, "_buffers"):
            buffer = holder._buffers[key]
            if buffer is not None and buffer.is_meta:
                filled = torch.empty_like(buffer, device=device)
                fill(filled, origin.steps[name], counter.derive("weights", seed, name))
                holder._buffers[key] = filled
            elif buffer is not None:
                holder._buffers[key] = buffer.to(device)


def retie(module: nn.Module, origin: Origin) -> None:
    """Make names that were one parameter before the surgery one parameter again, in place (P20).

    Call after layers were split and before parameters are sharded. Names that this rank doesn't hold are left out.

    Raises:
        RunFailedError: the pieces are laid out differently, so they can't be one.
    """
    made: dict[str, nn.Parameter] = {}
    for name, holder, key in _named(module, "_parameters"):
        parameter = holder._parameters[key]
        if parameter is not None:
            first = origin.first(name)
            made.setdefault(first, parameter)
            _check_alike(first, made[first], name, parameter)
            holder._parameters[key] = made[first]


def _check_alike(first: str, one: Tensor, name: str, other: Tensor) -> None:
    layouts = [(t.shape, (t.placements, t.device_mesh) if isinstance(t, DTensor) else None) for t in (one, other)]
    if layouts[0] != layouts[1]:
        raise RunFailedError(
            f"{name} and {first} are one parameter, but were split in different ways ("
            f"{getattr(other, 'placements', 'whole')} and {getattr(one, 'placements', 'whole')}): split both alike."
        )


def _named(module: nn.Module, kind: str) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield global name, holder and key of each parameter or buffer, as often as it is registered."""
    for prefix, holder in list(module.named_modules()):
        for key in list(getattr(holder, kind)):
            yield clean(f"{prefix}.{key}".lstrip(".")), holder, key


def fill(tensor: Tensor, steps: Sequence[Step], key: int) -> None:
    """Set this rank's piece of `tensor` (plain, or a DTensor of any layout) to its initial values, in place.

    Args:
        tensor: with memory.
        steps: how it is initialised.
        key: of its random numbers.
    """
    axes = (
        torch_private.global_indices(tensor) if isinstance(tensor, DTensor) else [torch.arange(n) for n in tensor.shape]
    )
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    strides = torch.empty(tensor.shape, device="meta").stride()  # of the whole, contiguous
    axes = [axis.to(local.device) * stride for axis, stride in zip(axes, strides, strict=True)]
    flat = torch.empty(local.shape, dtype=local.dtype, device=local.device) if not local.is_contiguous() else local
    values = flat.view(-1)
    for start in range(0, values.numel(), CHUNK):
        stop = min(start + CHUNK, values.numel())
        values[start:stop] = _values(_offsets(axes, start, stop, local.device), steps, key).to(values.dtype)
    if flat is not local:
        local.copy_(flat)


def _offsets(axes: Sequence[Tensor], start: int, stop: int, device: torch.device) -> Tensor:
    """Return the positions in the whole of the elements `start` to `stop` of a piece, counted row by row."""
    rest = torch.arange(start, stop, device=device)
    offsets = torch.zeros_like(rest)
    for axis in reversed(axes):
        offsets += axis[rest % len(axis)]
        rest = rest // len(axis)
    return offsets


def _values(positions: Tensor, steps: Sequence[Step], key: int) -> Tensor:
    values = torch.zeros(positions.shape, dtype=torch.float64, device=positions.device)
    for number, step in enumerate(steps):
        where, chosen, at = None, positions, positions
        if step.region is not None:
            region = step.region.to(positions.device)
            at = torch.searchsorted(region, positions).clamp_(max=len(region) - 1)
            where = region[at] == positions
            chosen, at = positions[where], at[where]
        if step.source is not None:
            some = step.source.to(positions.device)[at]
        else:
            some = values if where is None else values[where]
            step.replay(some, lambda: counter.uniform(counter.derive(key, number), chosen))  # noqa: B023 - called at once
        if where is None:
            values = some
        else:
            values[where] = some
    return values
