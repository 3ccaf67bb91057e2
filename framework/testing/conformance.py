"""What every option keeps to, as a list of complaints: for the authors of plugins.

In a test of one's own, with the package installed::

    from framework.testing.conformance import check_option

    def test_my_option():
        assert check_option("strategy", "mine") == []

The bundled options are held to the same list.
"""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

import pluggy

from framework.catalog import Option, catalog
from framework.errors import FrameworkError, Problem
from framework.hookspecs import PROJECT
from framework.plan import AXES, Requirements, RunPlan
from framework.plugin_manager import OBJECT_SLOTS, ask, component, manager_of, packages

NOT_AT_THE_TOP = ("torch", "lightning")
"""Packages that the module of a component may import inside functions only: the front end imports the module."""


def check_option(slot: str, name: str) -> list[str]:
    """Return all complaints about option `name` of concern `slot`, as installed here; empty = it conforms."""
    option = catalog().options.get(slot, {}).get(name)
    if option is None:
        known = ", ".join(catalog().of(slot)) if slot in catalog().slots else "no such concern"
        return [f"{slot}={name} isn't in the catalogue ({known})"]
    return list(_file(option)) + list(_objects(option) if slot in OBJECT_SLOTS else _component(option))


def _file(option: Option) -> Iterator[str]:
    """Complaints about the YAML as a page to read."""
    if not option.doc:
        yield f"{option.place}: the first line isn't a comment that says what the option is (`--help` shows it)"
    lines = option.text.splitlines()
    for number, line in enumerate(lines):
        key = line.strip().partition(":")[0]
        if not line.strip() or line.strip().startswith(("#", "-", "_target_")) or line.startswith(" " * 4):
            continue
        opens = line.split("#")[0].rstrip().endswith(":")
        above = number > 0 and lines[number - 1].strip().startswith("#")
        if "#" not in line and not opens and not above:
            yield f"{option.place}: {key} has no comment with its meaning and unit"


def _objects(option: Option) -> Iterator[str]:
    """Complaints about an option that describes objects of any class."""
    from framework import objects

    spec = option.values
    entries = spec if option.slot in ("logger", "callbacks") else {option.name: spec}
    if option.slot in ("logger", "callbacks") and list(entries) != [option.name]:
        yield f"{option.place}: it must hold one key, {option.name}, so that several can be on at once"
    for name, entry in entries.items():
        if not isinstance(entry, Mapping) or "_target_" not in entry:
            yield f"{option.place}: {name} has no _target_"
            continue
        # What is filled in later fits any type; so does an empty mapping.
        known = {key: {} if "${" in str(value) or value == "???" else value for key, value in entry.items()}
        yield from (str(problem) for problem in objects.check(option.slot, known))


def _component(option: Option) -> Iterator[str]:
    """Complaints about an option that is a component plugin."""
    values = option.values
    target = values.get("_target_")
    if not isinstance(target, str):
        yield f"{option.place}: it has no _target_"
        return
    if packages().owner(target) is None:
        yield f"{option.place}: {target} doesn't belong to an installed plugin's package"
        return
    module = target.rpartition(".")[0]
    if heavy := _heavy_imports(module):
        yield f"{module} imports {' and '.join(heavy)} at its top; import inside the methods"
    try:
        instance = component({**values, "option": option.name})
    except (FrameworkError, ImportError, AttributeError, TypeError, ValueError) as error:
        yield f"{option.place}: {target} can't be built from it: {type(error).__name__}: {error}"
        return
    yield from _class(type(instance), values)
    if type(instance).__hash__ is not None:  # pluggy can't register it, which was said
        yield from _hooks(option, instance)
    yield from _pickles(instance)


def _class(cls: type, values: Mapping[str, Any]) -> Iterator[str]:
    """Complaints about the dataclass, and what the YAML leaves out of it."""
    name = cls.__qualname__
    if not is_dataclass(cls):
        yield f"{name} must be a dataclass: it is the schema of its YAML"
        return
    known = [field for field in fields(cls) if field.init]
    if not all(field.kw_only for field in known):
        yield f"{name} must be @dataclass(kw_only=True, eq=False): positional fields can't be added to later"
    if cls.__eq__ is not object.__eq__ or cls.__hash__ is not object.__hash__:
        yield f"{name} must be @dataclass(kw_only=True, eq=False): pluggy refuses equal instances and needs a hash"
    keys = set(values) - {"_target_"}
    if missing := [field.name for field in known if field.name not in keys]:
        yield f"the YAML of {name} leaves out {', '.join(missing)}: it must list every field"
    if extra := sorted(keys - {field.name for field in known}):
        yield f"{name} has no field {', '.join(extra)}, which its YAML sets"
    own = cls.__doc__ or ""
    if own.startswith(f"{name}(") or not own:  # dataclasses write the signature where nothing was written
        yield f"{name} has no docstring"
    doc = "\n".join(base.__doc__ or "" for base in cls.__mro__ if is_dataclass(base))
    for field in known:
        if f"{field.name}:" not in doc and f"`{field.name}`" not in doc:
            yield f"the docstring of {name} doesn't say what {field.name} is (under `Attributes:`)"


def _hooks(option: Option, instance: Any) -> Iterator[str]:
    """Complaints about hooks: unknown names, none at all, and data that the core can't use."""
    marked = [
        name for name in dir(type(instance)) if hasattr(inspect.getattr_static(instance, name), f"{PROJECT}_impl")
    ]
    if not marked:
        yield f"{type(instance).__qualname__} implements no hook: mark its methods with @hookimpl"
        return
    try:
        manager = manager_of({option.slot: instance})
    except FrameworkError as error:
        yield str(error)
        return
    yield from _requirements(manager, instance)
    yield from _axes(manager, instance)
    plan = RunPlan(run_id="conformance", run_dir="/nonexistent", components={option.slot: {"option": option.name}})
    problems = ask(manager, "check_plan", instance, plan=plan) or []
    if not all(isinstance(problem, Problem) for problem in problems):
        yield "check_plan must return framework.Problem objects"
    variables = ask(manager, "process_env", instance, plan=plan) or {}
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in variables.items()):
        yield "process_env must map names to text"


def _requirements(manager: pluggy.PluginManager, instance: Any) -> Iterator[str]:
    need = ask(manager, "requirements", instance)
    if need is None:
        return
    if not isinstance(need, Requirements):
        yield "requirements must return framework.Requirements"
        return
    for name in ("needs", "gives", "excludes"):
        words = getattr(need, name)
        if not isinstance(words, frozenset) or not all(isinstance(word, str) and word.strip() for word in words):
            yield f"requirements().{name} must be a frozenset of words"
            return
    if both := need.needs & need.excludes:
        yield f"requirements: {', '.join(sorted(both))} is needed and excluded"
    if own := need.gives & need.excludes:
        yield f"requirements: {', '.join(sorted(own))} is given and excluded"
    if vain := set(need.why) - need.needs - need.excludes:
        yield f"requirements().why explains {', '.join(sorted(vain))}, which is neither needed nor excluded"


def _axes(manager: pluggy.PluginManager, instance: Any) -> Iterator[str]:
    for axis, size in (ask(manager, "mesh_axes", instance) or {}).items():
        if axis not in (*AXES, "ep"):
            yield f"mesh_axes names an axis {axis!r}; the axes are {', '.join(AXES)}, ep"
        if size is not None and (not isinstance(size, int) or size < 1):
            yield f"mesh_axes gives {axis} the size {size!r}; a whole number from 1, or None"


def _pickles(instance: Any) -> Iterator[str]:
    """Complaints about travelling to a worker."""
    try:
        copy = pickle.loads(pickle.dumps(instance))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        yield f"{type(instance).__qualname__} doesn't pickle: {error}"
        return
    for field in fields(instance):
        if repr(getattr(copy, field.name)) != repr(getattr(instance, field.name)):
            yield f"{field.name} of {type(instance).__qualname__} is another one after pickling"


@lru_cache
def _heavy_imports(module: str) -> list[str]:
    """Import a module in a fresh interpreter; return which heavy packages that pulled in."""
    code = f"import sys, {module}; print(*(name for name in {NOT_AT_THE_TOP!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        return [done.stderr.strip().splitlines()[-1]]
    return done.stdout.split()
