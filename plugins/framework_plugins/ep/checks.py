"""Every reason why a model's experts can't be spread as a plan says, by name of the module."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches

from torch import nn

from framework.errors import Problem
from framework.patterns import matches


def problems(model: nn.Module, patterns: Sequence[str] | None, size: int, tensor: Collection[str]) -> list[Problem]:
    """Return all complaints about spreading the experts of `model` over `size` ranks.

    Args:
        model: whole; on the meta device or real.
        patterns: that name the modules of experts; None = there are none.
        size: ranks on axis ep, at least 2.
        tensor: patterns of the plan of tensor parallelism, if that is on.
    """
    if not patterns:
        reason = f"{type(model).__name__} has no attribute `ep_plan` that says which modules hold experts"
        return [Problem("ep=alltoall", reason, "'ep.plan=[<pattern of modules>]', or ep=none")]
    modules = dict(model.named_modules())
    chosen = {name: m for name, m in modules.items() if any(matches(pattern, name) for pattern in patterns)}
    found = [_unmatched(pattern, modules) for pattern in patterns if not any(matches(pattern, name) for name in chosen)]
    found += _alike(problem for name, module in chosen.items() for problem in _stacked(name, module, size))
    spread = {inner for name in chosen for inner in _inside(name, modules)}
    holders: dict[nn.Parameter, str] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            first = holders.setdefault(parameter, name)
            if first != name and {first, name} & spread:
                found.append(Problem("ep=alltoall", f"{first} and {name} share a parameter, which can't be spread"))
    for name in chosen:
        clash = next((one for one in tensor if any(matches(one, inner) for inner in _inside(name, modules))), None)
        if clash is not None:
            reason = f"module {name} is named by tp's plan too ('{clash}'); one of the two can split it"
            found.append(Problem("ep=alltoall", reason, f"a tp.plan without '{clash}', or tp=none"))
    return found


def _inside(name: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    return (inner for inner in modules if inner == name or inner.startswith(f"{name}."))


def _unmatched(pattern: str, modules: Mapping[str, nn.Module]) -> Problem:
    near = get_close_matches(pattern.replace("*", "0"), [name for name in modules if name], 1, 0.0)
    fix = ".".join("*" if part.isdecimal() and "*" in pattern else part for part in near[0].split(".")) if near else ""
    return Problem(f"ep.plan='{pattern}'", "no module of the model has such a name", fix)


def _stacked(name: str, module: nn.Module, size: int) -> Iterator[tuple[str, str, str, str]]:
    """Yield the module's name, setting, what is wrong as it follows the name, and fix."""
    sizes = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    counts = {shape[0] if shape else 0 for shape in sizes.values()}
    if not sizes:
        yield name, "ep=alltoall", "has no parameters", ""
    elif len(counts) > 1:
        told = ", ".join(f"{key} {list(shape)}" for key, shape in sizes.items())
        yield (
            name,
            "ep=alltoall",
            f"must stack its experts along the first dimension of each parameter, but has {told}",
            "",
        )
    elif (count := counts.pop()) % size:
        fit = max(n for n in range(1, size + 1) if count % n == 0)
        yield (
            name,
            f"ep.size={size}",
            f"has {count} experts, which {size} ranks can't share evenly",
            f"ep.size={fit}" if fit > 1 else "ep=none",
        )
    if buffers := [key for key, _ in module.named_buffers()]:
        yield name, "ep=alltoall", f"has buffers ({', '.join(buffers)}); only parameters are spread", ""


def _alike(found: Iterator[tuple[str, str, str, str]]) -> Iterator[Problem]:
    """Yield one complaint for all modules with the same fault."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for name, *fault in found:
        names.setdefault((fault[0], fault[1], fault[2]), []).append(name)
    for (setting, what, fix), modules in names.items():
        more = f" (and {len(modules) - 1} more like it)" if len(modules) > 1 else ""
        yield Problem(setting, f"module {modules[0]}{more} {what}", fix)
