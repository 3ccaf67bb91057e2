"""Discover package plugins, register the chosen components, explain what is there.

A package plugin is a module behind an entry point of the group `framework.plugins`. Each is loaded in isolation: one
that fails is recorded with its distribution, version and cause, and disturbs nobody until something of it is chosen.

Environment:
    FRAMEWORK_DISABLE_PLUGINS: names of entry points or distributions that are not loaded, separated by commas.
    FRAMEWORK_TRACE_HOOKS: `1` prints every hook call and its result to stderr.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, ClassVar

import pluggy
from packaging.requirements import InvalidRequirement, Requirement

from framework.errors import FrameworkError, PluginError
from framework.hookspecs import API_VERSION, PROJECT, SPECS
from framework.plan import RunPlan
from framework.schema import LIST_SLOTS, SLOTS, RunConfig

GROUP = "framework.plugins"
DISTRIBUTION = "lightning-framework"
OBJECT_SLOTS = ("model", "data", *LIST_SLOTS)
"""Slots that hold objects of the user's own classes rather than component plugins."""

COMMANDS = ("train", "validate", "plan", "plugins", "verify", "ledger", "export")
"""Names that a package's command can't have."""


@dataclass(frozen=True)
class Package:
    """One entry point of the group, loaded or not.

    Attributes:
        name: of the entry point.
        distribution: name of the distribution that it comes from; empty if that is unknown.
        version: of the distribution.
        where: module behind the entry point.
        state: `loaded`, `disabled`, `broken` or `conflict`.
        cause: why it isn't loaded, one line.
        module: the module, if it was loaded.
        roots: folders of YAML options that it promises (`pkg://name`).
        groups: concerns that it adds: slot -> one line of help.
        commands: commands that it adds: name -> `module:function`.
    """

    name: str
    distribution: str
    version: str
    where: str
    state: str = "loaded"
    cause: str = ""
    module: ModuleType | None = None
    roots: tuple[str, ...] = ()
    groups: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}".strip() or self.where

    @property
    def top(self) -> str:
        """Import name of the package: classes of component slots must lie below one of these."""
        return self.where.partition(":")[0].partition(".")[0]

    def complaint(self) -> str:
        """One sentence: which plugin isn't there, why, and how to be rid of the message."""
        off = f"FRAMEWORK_DISABLE_PLUGINS={self.distribution or self.name} turns it off"
        return f"Plugin '{self.name}' of {self.label} is not loaded: {self.cause} ({off})."


@dataclass(frozen=True)
class Packages:
    """All package plugins of this environment and what they add together."""

    all: tuple[Package, ...]
    manager: pluggy.PluginManager

    @property
    def loaded(self) -> tuple[Package, ...]:
        """Those that work."""
        return tuple(package for package in self.all if package.state == "loaded")

    @property
    def unusable(self) -> tuple[Package, ...]:
        """Those that are broken or in conflict."""
        return tuple(package for package in self.all if package.state in ("broken", "conflict"))

    @property
    def slots(self) -> dict[str, str]:
        """Every concern, the core's first: slot -> one line of help."""
        return SLOTS | {slot: doc for package in self.loaded for slot, doc in package.groups.items()}

    @property
    def commands(self) -> dict[str, str]:
        """Commands that packages add: name -> `module:function`."""
        return {name: target for package in self.loaded for name, target in package.commands.items()}

    def owner(self, target: str) -> Package | None:
        """Return the package that the class `target` (dotted path) belongs to, or None."""
        return next((package for package in self.loaded if target.partition(".")[0] == package.top), None)


@lru_cache(maxsize=1)
def packages() -> Packages:
    """Return what `discover` finds, once a process."""
    disabled = {name.strip() for name in os.environ.get("FRAMEWORK_DISABLE_PLUGINS", "").split(",") if name.strip()}
    return discover(entry_points(group=GROUP), disabled)


def discover(points: Iterable[EntryPoint], disabled: Iterable[str] = ()) -> Packages:
    """Load every entry point in isolation, in an order that doesn't depend on the import path.

    Two distributions with one name are a conflict, and neither is loaded, except that a bundled name stays ours: a
    stranger can't replace it. `disabled` (names of entry points or distributions) resolves a conflict.
    """
    manager = new_manager()
    by_name: dict[str, list[Package]] = defaultdict(list)
    found: dict[tuple[str, str], EntryPoint] = {}
    for point in points:
        package = _describe(point)
        if (package.name, package.distribution) in found:
            continue
        found[package.name, package.distribution] = point
        by_name[package.name].append(package)
    off = set(disabled)
    result: list[Package] = []
    # Ours first, then by name, so that a clash always has the same loser.
    for name in sorted(by_name, key=lambda name: (all(p.distribution != DISTRIBUTION for p in by_name[name]), name)):
        rivals = sorted(by_name[name], key=lambda p: (p.distribution != DISTRIBUTION, p.distribution))
        dead = [p for p in rivals if {p.name, p.distribution} & off]
        result += [replace(p, state="disabled", cause="named in FRAMEWORK_DISABLE_PLUGINS") for p in dead]
        rivals = [p for p in rivals if p not in dead]
        labels = " and ".join(f"{p.label} ({p.where})" for p in rivals)
        for package in rivals:
            if len(rivals) > 1 and package.distribution != DISTRIBUTION:
                result.append(replace(package, state="conflict", cause=f"{labels} have the same name"))
            else:
                result.append(_load(package, found[name, package.distribution], manager, result))
    return Packages(tuple(result), manager)


def _describe(point: EntryPoint) -> Package:
    """Name the entry point's distribution without importing anything of it."""
    dist = point.dist
    return Package(point.name, dist.name if dist else "", dist.version if dist else "", point.value)


def _load(package: Package, point: EntryPoint, manager: pluggy.PluginManager, earlier: Iterable[Package]) -> Package:
    """Import one package, register it, and ask it what it adds; anything that it raises makes it broken."""
    unmet = _unmet_requirement(point)
    if unmet:
        return replace(package, state="broken", cause=unmet)
    module = None
    try:
        module = point.load()
        needs = getattr(module, "REQUIRES_API", API_VERSION)
        if needs > API_VERSION:
            raise PluginError(f"it needs hook API {needs}, and this framework has {API_VERSION}")
        manager.register(module, name=package.name)
        ask(manager, "add_hookspecs", module, manager=manager)
        manager.check_pending()
        roots, groups, commands = (ask(manager, hook, module) for hook in ("config_roots", "config_groups", "commands"))
        package = replace(
            package, module=module, roots=tuple(roots or ()), groups=dict(groups or {}), commands=dict(commands or {})
        )
        _refuse_clashes(package, [p for p in earlier if p.state == "loaded"])
    except Exception as error:  # whatever a stranger's module raises must not stop the others
        if module is not None and manager.is_registered(module):
            manager.unregister(module)
        return replace(package, state="broken", cause=first_line(error))
    return package


def _unmet_requirement(point: EntryPoint) -> str:
    """Return why this framework is too old or too new for the distribution; empty if it fits."""
    from framework import __version__

    for text in (point.dist.requires or ()) if point.dist else ():
        try:
            need = Requirement(text)
        except InvalidRequirement:
            continue
        if need.name.lower().replace("_", "-") == DISTRIBUTION and not need.specifier.contains(
            __version__, prereleases=True
        ):
            return f"it needs {need.name}{need.specifier}, and this is {DISTRIBUTION} {__version__}"
    return ""


def ask(asked: pluggy.PluginManager, hook: str, plugin: Any, /, **arguments: Any) -> Any:
    """Call one hook of one plugin; None if it doesn't implement it."""
    others = [other for other in asked.get_plugins() if other is not plugin]
    results = asked.subset_hook_caller(hook, others)(**arguments)
    return results[0] if results else None


def _refuse_clashes(package: Package, earlier: Iterable[Package]) -> None:
    """Raise if the package adds a concern or a command that is taken.

    Raises:
        PluginError: naming both.
    """
    reserved = set(SLOTS) | set(RunConfig.__dataclass_fields__) | {"hydra"}
    for slot in package.groups:
        other = next((p.label for p in earlier if slot in p.groups), "the core" if slot in reserved else None)
        if other is not None:
            raise PluginError(f"it adds a concern {slot!r}, which belongs to {other}")
    for name in package.commands:
        other = next((p.label for p in earlier if name in p.commands), "the core" if name in COMMANDS else None)
        if other is not None:
            raise PluginError(f"it adds a command {name!r}, which belongs to {other}")


def first_line(error: BaseException) -> str:
    """Return type and message of an error on one line."""
    text = " ".join(str(error).split())
    if isinstance(error, PluginError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Manager(pluggy.PluginManager):
    """Looks for the hooks of a class or module once: pluggy asks for each attribute of each, thousands a plan."""

    _hooks: ClassVar[dict[type, dict[str, pluggy.HookimplOpts]]] = {}
    _specs: ClassVar[dict[ModuleType | type, dict[str, pluggy.HookspecOpts]]] = {}

    def parse_hookspec_opts(self, module_or_class: ModuleType | type, name: str) -> pluggy.HookspecOpts | None:
        """Return the options of a hook that `module_or_class` specifies under `name`; None = it is no hook."""
        where = module_or_class
        if where not in self._specs:
            found = {name: super(_Manager, self).parse_hookspec_opts(where, name) for name in dir(where)}
            self._specs[where] = {name: options for name, options in found.items() if options is not None}
        return self._specs[where].get(name)

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        """Return the options of a hook that `plugin` implements under `name`; None = it is no hook."""
        cls = type(plugin)
        if cls is ModuleType:
            return super().parse_hookimpl_opts(plugin, name)
        if cls not in self._hooks:
            found = {name: super(_Manager, self).parse_hookimpl_opts(plugin, name) for name in dir(cls)}
            self._hooks[cls] = {name: options for name, options in found.items() if options is not None}
        return self._hooks[cls].get(name)


def new_manager() -> pluggy.PluginManager:
    """Return an empty manager that knows the core's hooks, tracing if the user asked for that."""
    manager = _Manager(PROJECT)
    for spec in SPECS:
        manager.add_hookspecs(spec)
    if os.environ.get("FRAMEWORK_TRACE_HOOKS", "") not in ("", "0"):
        manager.trace.root.setwriter(lambda text: print(text, end="", file=sys.stderr, flush=True))
        manager.enable_tracing()
    return manager


def manager_of(components: Mapping[str, Any]) -> pluggy.PluginManager:
    """Return a manager with the component instances registered under their slots' names, hooks all known.

    Raises:
        PluginError: a component implements a hook that nobody specifies, or with arguments that it doesn't have.
    """
    manager = new_manager()
    for package in packages().loaded:
        _add_specs(package, manager)
    for slot, plugin in components.items():
        try:
            manager.register(plugin, name=slot)
            manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(f"{type(plugin).__module__}.{type(plugin).__qualname__} ({slot}): {error}") from error
    return manager


def _add_specs(package: Package, manager: pluggy.PluginManager) -> None:
    """Let a package add the hooks of its own concern to `manager`."""
    adder = getattr(package.module, "add_hookspecs", None)
    if adder is not None and package.module is not None:
        ask(packages().manager, "add_hookspecs", package.module, manager=manager)


def ask_each(manager: pluggy.PluginManager, hook: str, /, **arguments: Any) -> dict[str, Any]:
    """Call one hook of each plugin: slot -> result, for those that implement it and don't return None.

    Raises:
        PluginError: a plugin raised something that isn't a message for the user; names it.
    """
    results = {}
    for slot, plugin in manager.list_name_plugin():
        try:
            results[slot] = ask(manager, hook, plugin, **arguments)
        except FrameworkError:
            raise
        except Exception as error:
            name = f"{type(plugin).__module__}.{type(plugin).__qualname__}"
            raise PluginError(f"The hook {hook} of {slot} ({name}) failed: {first_line(error)}") from error
    return {slot: result for slot, result in results.items() if result is not None}


def manager_for(plan: RunPlan) -> pluggy.PluginManager:
    """Return a manager with every chosen component of `plan` registered under its slot's name."""
    chosen = {slot: spec for slot, spec in plan.components.items() if slot not in OBJECT_SLOTS and spec is not None}
    return manager_of({slot: component(spec) for slot, spec in chosen.items()})


def component(spec: Any) -> Any:
    """Build one component plugin from its plain description."""
    module, _, name = spec["_target_"].rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    return cls(**{key: value for key, value in spec.items() if key not in ("_target_", "option")})
