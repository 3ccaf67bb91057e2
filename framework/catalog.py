"""The catalogue of options: which YAML files there are, in which concern, from which package, with their first line.

Reads files only; nothing of an option is imported, so that `--help` is fast and a broken option disturbs nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from framework import paths
from framework.plugin_manager import Package, Packages, packages

NONE = "none"
"""The option that every concern has: off."""

CUSTOM = "custom"
"""The option behind `model._target_=my.Class`: an empty description, so that nothing of another option is passed on."""


@dataclass(frozen=True)
class Option:
    """One YAML file: `slot` and `name` as typed, the package it comes from, and its text."""

    slot: str
    name: str
    package: str
    place: str
    text: str

    @property
    def words(self) -> str:
        """As typed."""
        return f"{self.slot}={self.name}"

    @property
    def doc(self) -> str:
        """Text of the first comment line; empty if the file doesn't begin with one."""
        lines = (line.strip() for line in self.text.splitlines())
        comments = (line.lstrip("# ") for line in lines if line.startswith("#") and not line.startswith("# @package"))
        return next(comments, "")

    @cached_property
    def values(self) -> dict[str, Any]:
        """The file's content, interpolations unresolved; empty if it isn't a mapping."""
        loaded = yaml.safe_load(self.text)
        return loaded if isinstance(loaded, dict) else {}


@dataclass(frozen=True)
class Catalog:
    """All options, and what is wrong with the folders they come from.

    Attributes:
        slots: every concern -> one line of help.
        options: slot -> name -> option; a name belongs to the first package on the path.
        roots: folders of third parties for Hydra's search path, with the distribution that provides each.
        warnings: complaints, one sentence each, that matter only to who uses the package in question.
    """

    slots: dict[str, str]
    options: dict[str, dict[str, Option]]
    roots: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def of(self, slot: str) -> list[str]:
        """Return the names that can be typed for `slot`, `none` last."""
        return [*sorted(self.options.get(slot, ())), NONE]

    def by_package(self, name: str) -> list[Option]:
        """Return the options that package `name` adds."""
        return [option for group in self.options.values() for option in group.values() if option.package == name]


@lru_cache(maxsize=1)
def catalog() -> Catalog:
    """Return the catalogue of this environment, once a process."""
    return read_catalog(packages())


def read_catalog(installed: Packages) -> Catalog:
    """Read every folder that a loaded package promises; ours first, so that a stranger can't shadow our options."""
    result = Catalog(slots=installed.slots, options={slot: {} for slot in installed.slots})
    ours = paths.conf_dir()
    for package in installed.loaded:
        for root in package.roots:
            folder, why = _folder(root)
            if folder is None:
                result.warnings.append(_missing(package, root, why))
                continue
            if not (isinstance(folder, Path) and folder.resolve() == ours):
                result.roots.append((package.distribution or package.name, root))
            _add(result, package, root, folder)
    return result


def _folder(root: str) -> tuple[Traversable | None, str]:
    """Find a `pkg://name` or `file://path`; return None and the reason if it isn't there."""
    scheme, separator, name = root.partition("://")
    if not separator:
        scheme, name = "file", root
    if scheme == "file":
        return (Path(name), "") if Path(name).is_dir() else (None, "there is no such folder")
    if scheme != "pkg":
        return None, "it must begin with pkg:// or file://"
    module, *rest = name.split("/")
    try:
        folder = files(module).joinpath(*rest)
    except (ImportError, TypeError) as error:
        return None, str(error)
    return (folder, "") if folder.is_dir() else (None, "there is no such folder")


def _missing(package: Package, root: str, why: str) -> str:
    """One sentence on a folder of options that isn't there."""
    return (
        f"Plugin '{package.name}' of {package.label} promises options in {root}, which isn't in its distribution "
        f"({why}): its YAML files were not packaged."
    )


def _add(result: Catalog, package: Package, root: str, folder: Traversable) -> None:
    """Add the options of one folder; a name that is taken stays with its owner, and that is said."""
    found = False
    for slot, entry in _yaml_files(folder):
        found = True
        option = Option(slot, entry.name.removesuffix(".yaml"), package.name, str(entry), entry.read_text("utf-8"))
        if slot not in result.options:
            result.warnings.append(
                f"Plugin '{package.name}' of {package.label} has an option {option.words}, but no concern is called "
                f"{slot!r}: its hook config_groups must add it."
            )
            continue
        taken = result.options[slot].get(option.name)
        if taken is not None or option.name == NONE:
            owner = f"plugin '{taken.package}'" if taken else "the core"
            result.warnings.append(
                f"Plugin '{package.name}' of {package.label} has an option {option.words}, which belongs to {owner}: "
                f"{owner}'s is used; the other must be renamed."
            )
            continue
        result.options[slot][option.name] = option
    if not found:
        result.warnings.append(_missing(package, root, "it holds no YAML file of a concern"))


def _yaml_files(folder: Traversable) -> Iterator[tuple[str, Traversable]]:
    """Yield (name of the folder, file) of every `<slot>/<option>.yaml`."""
    for group in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if group.is_dir() and not group.name.startswith(("_", ".")):
            for entry in sorted(group.iterdir(), key=lambda entry: entry.name):
                if entry.name.endswith(".yaml"):
                    yield group.name, entry


def recipes() -> dict[str, str]:
    """Return the bundled recipes: name -> first comment line."""
    found = sorted(paths.recipes_dir().glob("*.yaml"))
    return {path.stem: Option("", path.stem, "", str(path), path.read_text("utf-8")).doc for path in found}
