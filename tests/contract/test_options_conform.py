"""Every option of the catalogue keeps to what is asked of plugin authors; and each complaint of that list is heard."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from framework import Requirements, hookimpl
from framework.catalog import Option, catalog
from framework.testing import conformance
from framework.testing.conformance import check_option

OPTIONS = [(slot, name) for slot, options in catalog().options.items() for name in options]


@pytest.mark.parametrize(("slot", "name"), OPTIONS, ids=[f"{slot}={name}" for slot, name in OPTIONS])
def test_option(slot: str, name: str) -> None:
    assert check_option(slot, name) == []


def test_no_complaint_about_the_catalogue() -> None:
    assert catalog().warnings == []


def test_every_yaml_file_is_an_option() -> None:
    conf = Path(__file__).parents[2] / "conf"
    files = {(file.parent.name, file.stem) for file in conf.glob("*/*.yaml")}
    assert files == set(OPTIONS)


@dataclass(kw_only=True, eq=False)
class Good:
    """Does nothing well.

    Attributes:
        size: ranks.
    """

    size: int = 1

    @hookimpl
    def requirements(self) -> Requirements:
        return Requirements(needs=frozenset({"a"}), why={"a": "b"})

    @hookimpl
    def mesh_axes(self) -> dict[str, int | None]:
        return {"tp": None}


@dataclass
class Positional(Good):
    """An `size`, but positional and comparable."""

    other: int = 1


@dataclass(kw_only=True, eq=False)
class Undocumented(Good):
    """Says nothing of its second field, but of `size`."""

    other: int = 1


@dataclass(kw_only=True, eq=False)
class NoHooks:
    """Has a `size`."""

    size: int = 1


@dataclass(kw_only=True, eq=False)
class UnknownHook(Good):
    """Has a `size`."""

    @hookimpl
    def make_coffee(self) -> None:
        """Nobody calls it."""


@dataclass(kw_only=True, eq=False)
class Contradiction(Good):
    """Has a `size`."""

    @hookimpl
    def requirements(self) -> Requirements:
        return Requirements(needs=frozenset({"a"}), excludes=frozenset({"a"}), why={"b": "?"})

    @hookimpl
    def mesh_axes(self) -> dict[str, int | None]:
        return {"dp": 0}


@dataclass(kw_only=True, eq=False)
class Stuck(Good):
    """Has a `size`, and a function that can't travel."""

    size: int = 1

    def __post_init__(self) -> None:
        self.function: Callable[[], int] = lambda: self.size


@dataclass(kw_only=True, eq=False)
class Fussy(Good):
    """Has a `size` that is never right."""

    numbers: list[int] = field(default_factory=list)
    """Documented here, but not where it is looked for: `numbers`."""

    def __post_init__(self) -> None:
        raise ValueError("never")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that puts an option into the catalogue and checks it."""
    module = types.ModuleType("framework_plugins.fake")
    monkeypatch.setitem(sys.modules, "framework_plugins.fake", module)
    monkeypatch.setattr(conformance, "_heavy_imports", lambda module: [])

    def check(cls: type, text: str | None = None) -> list[str]:
        setattr(module, cls.__name__, cls)
        text = text or f"# Something\n_target_: framework_plugins.fake.{cls.__name__}\nsize: 1  # ranks\n"
        option = Option("tp", "fake", "bundled", "fake.yaml", text)
        monkeypatch.setitem(catalog().options["tp"], "fake", option)
        return check_option("tp", "fake")

    return check


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Good, []),
        (Positional, ["positional fields", "equal instances", "leaves out other", "what other is"]),
        (Undocumented, ["leaves out other", "what other is"]),
        (NoHooks, ["implements no hook"]),
        (UnknownHook, ["make_coffee"]),
        (Contradiction, ["a is needed and excluded", "explains b", "axis 'dp'", "size 0"]),
        (Stuck, ["doesn't pickle"]),
        (Fussy, ["ValueError: never"]),
    ],
)
def test_complaints_about_the_class(written: Callable[..., list[str]], cls: type, words: list[str]) -> None:
    found = written(cls)
    assert len(found) == len(words), found
    for word in words:
        assert any(word in complaint for complaint in found), (word, found)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("_target_: framework_plugins.fake.Good\nsize: 1  # ranks\n", "first line isn't a comment"),
        ("# Something\n_target_: framework_plugins.fake.Good\nsize: 1\n", "size has no comment"),
        ("# Something\n_target_: framework_plugins.fake.Good\nsize: 1  # a\nsiez: 1  # b\n", "siez"),
        ("# Something\nsize: 1  # ranks\n", "no _target_"),
        ("# Something\n_target_: collections.Counter\n", "doesn't belong to an installed plugin"),
    ],
)
def test_complaints_about_the_file(written: Callable[..., list[str]], text: str, word: str) -> None:
    found = written(Good, text)
    assert len(found) == 1, found
    assert word in found[0]


def test_an_option_that_is_not_there() -> None:
    assert "isn't in the catalogue" in check_option("tp", "nosuch")[0]
    assert "no such concern" in check_option("nosuch", "nosuch")[0]


def test_heavy_imports_are_found() -> None:
    assert conformance._heavy_imports("torch.version") == ["torch"]
    assert conformance._heavy_imports("framework_plugins") == []
    assert "ModuleNotFoundError" in conformance._heavy_imports("framework_plugins.nosuch")[0]
