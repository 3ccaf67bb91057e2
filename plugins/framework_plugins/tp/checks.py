"""Every reason why a model can't be split as a plan says, by layer name (P29)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from framework.errors import Problem
from framework_plugins.tp.layout import HEAD_COUNTS, SPLIT_WORDS, WORDS, Layout, parent, resolve
from framework_plugins.tp.ranges import every_rank_has_some

if TYPE_CHECKING:
    from framework_plugins.tp.tracing import Found

HEAD_SIZES = ("head_dim", "head_size", "d_head", "dim_head", "attention_head_size", "d_kv")
"""Attributes in which attention modules keep how wide a head is."""


def problems(
    model: nn.Module,
    plan: Mapping[str, str],
    size: int,
    *,
    option: str,
    sequence_parallel: bool,
    loss_parallel: bool,
) -> list[Problem]:
    """Return all complaints about splitting `model` over `size` ranks.

    Args:
        model: whole and not split yet; on the meta device or real.
        plan: pattern -> word.
        size: ranks on axis tp, at least 2.
        option: name of the option, for complaints.
        sequence_parallel: as in `LayerParallel`.
        loss_parallel: as in `LayerParallel`.
    """
    unknown = [_unknown_word(pattern, word) for pattern, word in plan.items() if word not in WORDS]
    known = {pattern: word for pattern, word in plan.items() if word in WORDS}
    modules = dict(model.named_modules())
    layout = resolve(known, modules)
    found = [
        *unknown,
        *(_unmatched(pattern, modules) for pattern in layout.unmatched),
        *(_clash(name, patterns, plan) for name, patterns in layout.clashes.items()),
        *_kinds(modules, layout),
        *_indivisible([*_dimensions(modules, layout, size), *_heads(modules, layout, size)], size),
        *_ties(modules, layout, option),
    ]
    if not unknown and not layout.unmatched:
        found += _left_out(modules, layout, option, sequence_parallel)
    if sequence_parallel and not (layout.named("embedding") and layout.named("head")):
        reason = "the plan needs an `embedding`, where sequences are cut, and a `head`, where they are joined again."
        found.append(Problem("tp.sequence_parallel=true", reason, "tp.sequence_parallel=false"))
    if loss_parallel and not layout.named("head"):
        reason = "the plan has no `head`, so there are no split logits."
        found.append(Problem("tp.loss_parallel=true", reason, "tp.loss_parallel=false"))
    return found


def of_tracing(model: nn.Module, found: Found, option: str, sequence_parallel: bool) -> list[Problem]:
    """Return why a plan can't be had by tracing; empty = `found` has one.

    Args:
        model: has no `tp_plan`, and none was typed.
        found: what tracing found.
        option: name of the option.
        sequence_parallel: as in `LayerParallel`.
    """
    fix = "tp.plan={<layer pattern>:<colwise, rowwise, ...>}, or tp=none"
    if not found.words:
        alike: dict[str, tuple[str, list[str]]] = {}
        for name, why in found.whole.items():
            alike.setdefault(_pattern(name), (why, []))[1].append(name)
        told = "; ".join(f"{_all(names)}: {why}" for why, names in list(alike.values())[:REASONS])
        reason = (
            f"{type(model).__name__} has no attribute `tp_plan` that says which layer is split how, and tracing found"
            " no linear layers that could be split" + (f" ({told})" if told else "")
        )
        return [Problem(f"tp={option}", reason, fix)]
    if sequence_parallel:
        reason = f"the plan was found by tracing, which doesn't tell what gets a piece of the sequence: {found.words}."
        return [Problem("tp.sequence_parallel=true", reason, "tp.plan={...} with `norm` layers too")]
    return []


REASONS = 4
"""How many reasons are told."""


def _unknown_word(pattern: str, word: str) -> Problem:
    near = get_close_matches(str(word), WORDS, 1, 0.0)[0]
    reason = f"'{word}' is no way to split a layer; there are {', '.join(WORDS)}."
    return Problem(f"tp.plan.'{pattern}'={word}", reason, f"{pattern}: {near}")


def _unmatched(pattern: str, modules: Mapping[str, nn.Module]) -> Problem:
    """Name the nearest layer, with the pattern's stars put back where the layer has a number."""
    near = get_close_matches(pattern.replace("*", "0"), [name for name in modules if name], 1, 0.0)
    fix = ".".join("*" if part.isdecimal() and "*" in pattern else part for part in near[0].split(".")) if near else ""
    return Problem(f"tp.plan.'{pattern}'", "no layer of the model has such a name.", fix)


def _clash(name: str, patterns: list[str], plan: Mapping[str, str]) -> Problem:
    said = " and ".join(f"'{pattern}' says {plan[pattern]}" for pattern in patterns)
    return Problem(f"tp.plan.'{patterns[-1]}'", f"layer {name} is named twice: {said}.", "one pattern for each layer")


def _kinds(modules: Mapping[str, nn.Module], layout: Layout) -> Iterator[Problem]:
    """Yield complaints about layers that can't be split at all."""
    for name in layout.named(*SPLIT_WORDS):
        module, word = modules[name], layout.words[name]
        wanted = nn.Embedding if word == "embedding" else nn.Linear
        setting = f"tp.plan '{name}: {word}'"
        if not isinstance(module, wanted) or type(module).forward is not wanted.forward:
            reason = f"layer {name} is a {type(module).__name__}; only torch's {wanted.__name__} can be split so."
            yield Problem(setting, reason)
        elif isinstance(module, nn.Embedding) and (
            module.max_norm is not None or module.scale_grad_by_freq or module.sparse
        ):
            reason = f"layer {name} has max_norm, scale_grad_by_freq or sparse, which see all rows at once."
            yield Problem(setting, reason, f"a plan without '{name}'")
    for name, attribute in layout.divided:
        if not isinstance(getattr(modules[name], attribute, None), int):
            reason = f"layer {name} has no integer attribute '{attribute}'."
            yield Problem(f"tp.plan '{name}.{attribute}: divide'", reason)


def _dimensions(modules: Mapping[str, nn.Module], layout: Layout, size: int) -> Iterator[Uneven]:
    """Yield dimensions of split layers that don't divide; a vocabulary need not, if every rank gets some of it."""
    for name in layout.named(*SPLIT_WORDS):
        module, word = modules[name], layout.words[name]
        if isinstance(module, nn.Embedding):
            if not every_rank_has_some(module.num_embeddings, size):
                yield Uneven(name, "rows", module.num_embeddings)
        elif isinstance(module, nn.Linear):
            if word == "head" and not every_rank_has_some(module.out_features, size):
                yield Uneven(name, "output features", module.out_features)
            if word == "colwise" and module.out_features % size:
                yield Uneven(name, "output features", module.out_features)
            if word == "rowwise" and module.in_features % size:
                yield Uneven(name, "input features", module.in_features)
    for name, attribute in layout.divided:
        value = getattr(modules[name], attribute, None)
        if isinstance(value, int) and value % size:
            yield Uneven(name, attribute, value)


def _pattern(name: str) -> str:
    """Return `name` with a star for each number."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _all(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more like it)" if len(names) > 1 else "")


class Uneven(NamedTuple):
    """Layer `name` has `number` of something that the ranks can't share."""

    name: str
    what: str
    number: int


def _indivisible(found: Iterable[Uneven], size: int) -> Iterator[Problem]:
    """Yield one complaint for all blocks in which the same layer has the same fault."""
    alike: dict[tuple[str, str, int], list[str]] = {}
    for name, what, count in found:
        alike.setdefault((_pattern(name), what, count), []).append(name)
    for (_, what, count), names in alike.items():
        fit = max(n for n in range(1, size + 1) if count % n == 0)
        fix = f"tp.size={fit}" if fit > 1 else "tp=none"
        reason = f"layer {_all(names)} has {count} {what}, which {size} ranks can't share evenly."
        yield Problem(f"tp.size={size}", reason, fix)


def _heads(modules: Mapping[str, nn.Module], layout: Layout, size: int) -> Iterator[Uneven]:
    """Yield numbers of attention heads that a column-split layer would cut in two.

    How many heads a layer has is read from its parent: an attribute of `HEAD_COUNTS` or `HEAD_SIZES`.
    """
    divided = set(layout.divided)
    families: dict[str, list[str]] = {}
    for name in layout.named("colwise"):
        families.setdefault(parent(name), []).append(name)
    for owner, layers in families.items():
        module = modules[owner]
        counts = {attribute: getattr(module, attribute, None) for attribute in HEAD_COUNTS}
        told = False
        for attribute, count in counts.items():
            if isinstance(count, int) and count % size and (owner, attribute) not in divided:
                told = True
                yield Uneven(owner, attribute, count)
        size_name = next((name for name in HEAD_SIZES if isinstance(getattr(module, name, None), int)), None)
        if told or size_name is None:
            continue
        width = getattr(module, size_name)
        for name in layers:
            outputs = getattr(modules[name], "out_features", 0)
            if outputs % width == 0 and outputs % size == 0 and (outputs // width) % size:
                what = f"heads ({outputs} = {outputs // width} x {size_name} {width})"
                yield Uneven(name, what, outputs // width)


def _ties(modules: Mapping[str, nn.Module], layout: Layout, option: str) -> Iterator[Problem]:
    """Yield complaints about one parameter that two layers would hold in different layouts."""
    cuts = {"colwise": "rows", "head": "rows", "embedding": "rows", "rowwise": "columns"}
    holders: dict[nn.Parameter, tuple[str, str]] = {}
    for name, module in modules.items():
        cut = cuts.get(layout.words.get(name, ""), "whole")
        for parameter in module.parameters(recurse=False):
            first, other = holders.setdefault(parameter, (name, cut))
            if other != cut:
                reason = f"layers {first} and {name} share one parameter, but the plan cuts it by {other} and by {cut}."
                yield Problem(f"tp={option}", reason, "a plan that names both layers, as embedding and head say")


def _left_out(modules: Mapping[str, nn.Module], layout: Layout, option: str, sequence_parallel: bool) -> list[Problem]:
    """Complain about layers with parameters that no pattern names where it matters what their input is.

    Beside a `colwise` or `rowwise` layer the input may be split, and with sequence parallelism it may be a piece of the
    sequence; then each rank's gradient is only a part, and nothing else would notice.
    """
    families = {parent(name) for name in layout.named("colwise", "rowwise")}
    alike: dict[str, list[str]] = {}
    for name, module in modules.items():
        inside = any(name == one or name.startswith(f"{one}.") for one in layout.words)
        if not inside and any(True for _ in module.parameters(recurse=False)):
            alike.setdefault(_pattern(name), []).append(name)
    found = []
    for pattern, names in alike.items():
        if names[0] and parent(names[0]) in families:
            reason = f"layer {_all(names)} stands beside split layers; the plan must say what it gets."
            found.append(
                Problem(f"tp={option}", reason, f"{pattern}: shared (split activations), copied (whole) or norm")
            )
        elif sequence_parallel:
            where = _all(names) or "the model itself"
            reason = f"{where} has parameters, but the plan doesn't say whether it gets a piece of the sequence."
            fix = f"{pattern or '<layer>'}: norm (a piece) or copied"
            found.append(Problem("tp.sequence_parallel=true", reason, fix))
    return found
