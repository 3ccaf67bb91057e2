"""One option as plain data: its values held against its dataclass (or the YAML that lists them), and built."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework import objects
from framework.catalog import NONE, catalog
from framework.errors import FrameworkError, PlanError, Problem, UsageError
from framework.guard import typed, unknown_key
from framework.plugin_manager import OBJECT_SLOTS, component, packages
from framework.schema import LIST_SLOTS


def typeable(slot: str) -> str:
    """Return the options of a slot as words."""
    return " or ".join(f"{slot}={option}" for option in catalog().of(slot) if option != NONE)


def describe_component(slot: str, option: str, value: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Hold an option's fields against its dataclass; return its plain description, and what is wrong."""
    target = str(value["_target_"])
    if packages().owner(target) is None:
        tops = ", ".join(sorted({package.top for package in packages().loaded}))
        reason = f"an option of {slot} must belong to an installed plugin; their packages are {tops}"
        return {}, [Problem(f"{slot}._target_={target}", reason, typeable(slot))]
    try:
        cls = objects.locate(target)
    except UsageError as error:
        return {}, [Problem(f"{slot}={option}", str(error))]
    if not (inspect.isclass(cls) and is_dataclass(cls)):
        return {}, [Problem(f"{slot}={option}", f"{target} must be a dataclass")]
    known = [item.name for item in fields(cls) if item.init]
    given = {str(name): item for name, item in value.items() if name != "_target_"}
    problems = [unknown_key(f"{slot}.{name}", item, slot, known) for name, item in given.items() if name not in known]
    config, more = typed(cls, {name: item for name, item in given.items() if name in known}, f"{slot}.")
    problems += more
    problems += [
        Problem(f"{slot}.{name}", "it must have a value and has none", f"{slot}.{name}=<value>")
        for name in OmegaConf.missing_keys(config)
    ]
    if problems:
        return {}, problems
    plain = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    return {"_target_": target, "option": option, **{name: plain[name] for name in known}}, []


def unknown_arguments(slot: str, spec: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a complaint for each argument that a bundled option's YAML doesn't list, without importing its class.

    Bundled YAML lists every argument (tested). Whatever else a class may say to its arguments is asked later, when all
    that needs no import is right.
    """
    described = {slot: spec} if "_target_" in spec else spec
    for key, entry in described.items():
        option = catalog().options[slot].get(str(spec.get("option", key)))
        if option is None or option.package != "bundled" or not isinstance(entry, Mapping):
            continue
        shipped = option.values if slot not in LIST_SLOTS else option.values.get(key, {})
        if shipped.get("_target_") != entry.get("_target_"):
            continue
        path = slot if slot not in LIST_SLOTS else f"{slot}.{key}"
        known = [name for name in shipped if name not in objects.HYDRA_KEYS]
        for name, value in entry.items():
            if name not in (*known, *objects.HYDRA_KEYS, "option"):
                yield unknown_key(f"{path}.{name}", value, path, known)


def unknown_names(slot: str, option: str, value: Any) -> Iterator[Problem]:
    """Yield a complaint for each key that an option doesn't have, whatever its values are.

    Called for options of which a value is missing or broken, so that the names are still checked.
    """
    if not isinstance(value, Mapping) or not value:
        return
    if slot in OBJECT_SLOTS:
        yield from unknown_arguments(slot, {"option": option, **value})
        return
    known = catalog().options.get(slot, {}).get(option)
    if known is not None and known.values.get("_target_") == value.get("_target_"):
        names = [name for name in known.values if name != "_target_"]
        yield from (
            unknown_key(f"{slot}.{name}", item, slot, names)
            for name, item in value.items()
            if name not in (*names, "_target_")
        )


def instance(slot: str, spec: Mapping[str, Any], problems: list[Problem]) -> Any:
    """Build a component; what its `__post_init__` says is a complaint."""
    try:
        return component(spec)
    except PlanError as error:
        problems += error.problems
    except (FrameworkError, ValueError, TypeError, OmegaConfBaseException) as error:
        problems.append(spoken(slot, error))
    return None


def spoken(slot: str, error: Exception) -> Problem:
    """Turn an error's text into a complaint; a text that begins with a setting keeps it as the setting."""
    found = re.match(rf"({slot}(?:\.[\w.]+)?=[^\s:]+|{slot}\.[\w.]+):? (.+)", str(error), re.DOTALL)
    return Problem(found[1], found[2]) if found else Problem(slot, str(error))
