"""Find a plan where the user gave none: trace blocks with torch.fx, look for column-then-row pairs of linear layers.

Every linear layer is supposed to be cut by columns; what that does to its output is followed through the graph
(`reading.py`). Where all that a linear layer gets is cut along its last dimension, that one is cut by rows and what it
gets by columns, as in Shoeybi et al. (2019). Between the two only elementwise operations, reshapes into heads and
attention are understood; anything else keeps the layers whole. So a plan that is found is right, but may leave out
layers that a plan written by hand would cut.

Activations are taken as [samples, positions, width], and what enters a cut region from outside (angles, masks) as
something that doesn't learn; `guard_` holds the first forward to both.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from framework.errors import UsageError
from framework.parts import find_blocks
from framework.patterns import matches
from framework_plugins.tp.layout import HEAD_COUNTS, parent
from framework_plugins.tp.reading import RANK, Reading


@dataclass
class Found:
    """What tracing found.

    Attributes:
        words: a plan; empty if no pair of linear layers was found.
        whole: module name -> why it couldn't be looked into.
        columns: names of layers that are cut by columns.
        sides: traced module -> names of those of its arguments that enter a cut region from outside.
        defaults: traced module -> optional arguments, with the values that they were traced with.
    """

    words: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    sides: dict[str, frozenset[str]] = field(default_factory=dict)
    defaults: dict[str, dict[str, Any]] = field(default_factory=dict)


CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules that are never called themselves."""


def find(model: nn.Module) -> Found:
    """Trace `model` (weights real or on the meta device; nothing is computed or changed) and return what was found."""
    found = Found()
    blocks = find_blocks(model)
    words: dict[str, str] = {}
    for name, module in _units(model, "", blocks):
        _look(module, name, name in blocks, words, found)
    if words:
        words |= _vocabulary(model, blocks, words)
    found.words = _patterns(words, [name for name, _ in model.named_modules()])
    return found


def _units(module: nn.Module, name: str, blocks: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules that lie within one block, or hold none."""
    if name in blocks or not any(f"{one}.".startswith(f"{name}." if name else "") for one in blocks):
        yield name, module
        return
    for key, child in module.named_children():
        yield from _units(child, f"{name}.{key}" if name else key, blocks)


def _look(module: nn.Module, name: str, block: bool, words: dict[str, str], found: Found) -> None:
    """Trace one module, or if that can't be done its children; add to `words` and `found`."""
    if sum(type(one) is nn.Linear for one in module.modules()) < 2:
        return
    if isinstance(module, CONTAINERS):
        _look_inside(module, name, block, words, found)
        return
    # a forward may keep what it is given; weights aren't copied
    twin = copy.deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})
    defaults = _defaults(twin)
    try:
        if not name and defaults:
            raise TypeError("its forward has optional arguments")
        reading = read(twin, defaults)
    except Exception as error:  # whatever a user's forward raises when it is given no values
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        found.whole[name or type(module).__name__] = f"can't be traced ({reason})"
        _look_inside(module, name, block, words, found)
        return
    prefix = f"{name}." if name else ""
    for row, columns in reading.pairs():
        if not block and {parent(row)} != {parent(column) for column in columns}:
            continue  # nothing would end their region
        divided = _divided(twin, defaults, reading, columns)
        if divided is None:
            found.whole[prefix + row] = "its number of heads comes from no attribute that could be divided"
            continue
        outside = frozenset().union(*(reading.sides.get(column, ()) for column in columns))
        if not name and outside:
            found.whole[row] = f"{', '.join(sorted(outside))} of the model's own forward would enter split layers"
            continue
        # in one order on all ranks, which split their weights together
        words |= {prefix + column: "colwise" for column in sorted(columns)} | {prefix + row: "rowwise"}
        words |= {prefix + attribute: "divide" for attribute in divided}
        words |= {prefix + norm: "shared" for norm in reading.norms_between(columns)}
        found.columns += [prefix + column for column in sorted(columns)]
        found.sides[name] = found.sides.get(name, frozenset()) | outside
        found.defaults[name] = defaults
    for column, by in reading.spoiled.items():
        if prefix + column not in words:
            found.whole.setdefault(prefix + column, f"its output goes through {by}, which isn't understood there")
    split = {parent(one) for one, word in words.items() if word in ("colwise", "rowwise") and one.startswith(prefix)}
    for child, one in module.named_modules(prefix=name):
        beside = parent(child) in split and any(True for _ in one.parameters(recurse=False))
        if child != name and beside and child not in words:
            words[child] = "copied"  # all that it gets is whole, else its neighbours wouldn't be cut


def _look_inside(module: nn.Module, name: str, block: bool, words: dict[str, str], found: Found) -> None:
    for key, child in module.named_children():
        _look(child, f"{name}.{key}" if name else key, block, words, found)


class _Tracer(fx.Tracer):
    """Knows how many numbers `x.shape[:-1]` has, so that they may be passed one by one."""

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **options: Any) -> Any:
        """Record an operation; sizes of all dims but the last come apart."""
        if target is operator.getitem and isinstance(args[1], slice) and args[1] == slice(None, -1):
            node = args[0].node
            if node.args[1:] == ("shape",) or (node.target == "size" and len(node.args) == 1):
                return tuple(args[0][at] for at in range(RANK - 1))
        return super().create_proxy(kind, target, args, kwargs, *more, **options)


def _defaults(module: nn.Module) -> dict[str, Any]:
    """Return the optional arguments of `forward` that a trace can be told."""
    return {
        name: argument.default
        for name, argument in inspect.signature(module.forward).parameters.items()
        if argument.default is None or isinstance(argument.default, (bool, int, float))
    }


def read(module: nn.Module, defaults: dict[str, Any]) -> Reading:
    """Trace `module` with its optional arguments at `defaults`, and follow what cutting its linear layers would do."""
    graph = _Tracer().trace(module, concrete_args=defaults or None)
    reading = Reading(dict(module.named_modules()))
    reading.read(graph)
    return reading


def _divided(twin: nn.Module, defaults: dict[str, Any], reading: Reading, columns: frozenset[str]) -> list[str] | None:
    """Return the attributes of `twin` that hold the numbers of heads which views of `columns` write out.

    They are tried: with twice the number there, those views change with it and nothing else does. None = not so.
    """
    counts = {line: said for line, said in reading.counts.items() if said[0] & columns}
    attributes: dict[tuple[str, str], int] = {}
    for sources, count in counts.values():
        for owner in sorted({parent(source) for source in sources}):
            holder = twin.get_submodule(owner)
            attributes |= {
                (owner, name): count
                for name in HEAD_COUNTS
                if type(getattr(holder, name, None)) is int and getattr(holder, name) == count
            }
    if not counts:
        return []
    try:
        for (owner, name), count in attributes.items():
            setattr(twin.get_submodule(owner), name, 2 * count)
        again = read(twin, defaults)
    finally:
        for (owner, name), count in attributes.items():
            setattr(twin.get_submodule(owner), name, count)
    follow = all(again.counts.get(line) == (sources, 2 * count) for line, (sources, count) in counts.items())
    changed = {line for line, (one, other) in enumerate(zip(reading.lines, again.lines, strict=False)) if one != other}
    if not follow or len(again.lines) != len(reading.lines) or not changed <= counts.keys():
        return None
    return [f"{owner}.{name}" if owner else name for owner, name in attributes]


def _vocabulary(model: nn.Module, blocks: Mapping[str, nn.Module], words: Mapping[str, str]) -> dict[str, str]:
    """Return words for embeddings outside blocks, and for linear layers back to the largest of them."""
    outside = {
        name: module
        for name, module in model.named_modules()
        if name not in words and not any(f"{name}.".startswith(f"{block}.") for block in blocks)
    }
    tables = {
        name: module
        for name, module in outside.items()
        if type(module) is nn.Embedding
        and not (module.max_norm is not None or module.scale_grad_by_freq or module.sparse)
    }
    vocabulary = max((table.num_embeddings for table in tables.values()), default=None)
    weights = {table.weight for table in tables.values()}
    heads = [
        name
        for name, module in outside.items()
        if type(module) is nn.Linear and (module.out_features == vocabulary or module.weight in weights)
    ]
    return dict.fromkeys(tables, "embedding") | dict.fromkeys(heads, "head")


def _patterns(words: Mapping[str, str], names: list[str]) -> dict[str, str]:
    """Return `words` with stars for numbers where all that a pattern names has the same word."""
    plan: dict[str, str] = {}
    for name, word in words.items():
        pattern = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        owner, _, attribute = pattern.rpartition(".")
        named = [f"{one}.{attribute}" for one in names if matches(owner, one)] if word == "divide" else names
        alike = all(words.get(one) == word for one in named if matches(pattern, one))
        plan[pattern if alike else name] = word
    return plan


def guard_(owned: Mapping[str, nn.Module], found: Found) -> None:
    """Hold the first forward that learns to what tracing took for granted, then go out of the way.

    Args:
        owned: modules of one stage by name.
        found: what the plan was found from.
    """
    for name in found.columns:
        if name in owned:
            _once(owned[name], partial(_check_rank, name))
    for name, sides in found.sides.items():
        if name in owned and (sides or found.defaults[name]):
            _once(owned[name], partial(_check_arguments, name, sides, found.defaults[name]))


def _once(module: nn.Module, check: Callable[[nn.Module, Any, Any], None]) -> None:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            check(module, args, kwargs)
            handle.remove()

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)


def _check_rank(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = [*args, *kwargs.values()][0]
    if x.ndim != RANK:
        raise UsageError(
            f"The tp plan was found by tracing, which takes activations as [samples, positions, width], but {name} got"
            f" {list(x.shape)}; type tp.plan={{...}}, or give the model a tp_plan."
        )


def _check_arguments(
    name: str, sides: frozenset[str], defaults: Mapping[str, Any], module: nn.Module, args: Any, kwargs: Any
) -> None:
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    for argument, value in given.items():
        if argument in sides and isinstance(value, torch.Tensor) and value.requires_grad:
            raise UsageError(
                f"The tp plan was found by tracing, but argument {argument} of {name} enters split layers and learns,"
                " so each rank would have a part of its gradient; type tp.plan={...}, or tp=none."
            )
        if argument in defaults and not _same(value, defaults[argument]):
            raise UsageError(
                f"The tp plan was found by tracing {name} with {argument}={defaults[argument]}, but it is given another"
                " value; type tp.plan={...}, or give the model a tp_plan."
            )


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))
