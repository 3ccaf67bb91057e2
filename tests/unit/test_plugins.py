"""Discovery in isolation, without wheels: entry points made by hand (cases P46, P47)."""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, EntryPoint
from types import ModuleType

import pytest

from framework import hookimpl
from framework.errors import PluginError
from framework.plugin_manager import ask_each, discover, manager_of


class Dist(Distribution):
    def __init__(self, name: str, version: str = "1.0", requires: tuple[str, ...] = ()) -> None:
        self._metadata = {"Name": name, "Version": version}
        self._requires = list(requires)

    @property
    def metadata(self):
        return self._metadata

    @property
    def requires(self):
        return self._requires

    def read_text(self, filename):
        return None

    def locate_file(self, path):
        return path


@pytest.fixture
def point(monkeypatch):
    """Return a function that makes an entry point of a distribution to a module of the given attributes."""

    def make(
        name: str, dist: str, module: str | None = None, requires: tuple[str, ...] = (), **attributes
    ) -> EntryPoint:
        path = module or f"fake_{dist.replace('-', '_')}"
        if module is None:
            fake = ModuleType(path)
            for key, value in attributes.items():
                setattr(fake, key, value)
            monkeypatch.setitem(sys.modules, path, fake)
        made = EntryPoint(name, path, "framework.plugins")
        vars(made)["dist"] = Dist(dist, requires=requires)
        return made

    return make


def states(installed):
    return {(package.name, package.distribution): package.state for package in installed.all}


def test_a_broken_one_disturbs_nobody_and_keeps_its_cause(point):
    def fails():
        raise RuntimeError("first line\nsecond line")

    installed = discover([
        point("a", "a-dist", "no_such_module_anywhere"),
        point("b", "b-dist", REQUIRES_API=2),
        point("c", "c-dist", config_roots=hookimpl(fails)),
        point("d", "d-dist", requires=("lightning-framework>=99", "numpy")),
        point("e", "e-dist", commands=hookimpl(lambda: {"e": "x:y"})),
        point("f", "f-dist", config_groups=hookimpl(lambda wrong: {})),
    ])  # fmt: skip
    assert list(states(installed).values()) == ["broken"] * 4 + ["loaded", "broken"]
    cause = {package.name: package.cause for package in installed.all}
    assert "no_such_module_anywhere" in cause["a"]
    assert "hook API 2" in cause["b"]
    assert cause["c"] == "RuntimeError: first line second line"
    assert ">=99" in cause["d"]
    assert "wrong" in cause["f"]
    assert installed.commands == {"e": "x:y"}
    assert "d-dist 1.0" in installed.all[3].complaint()


def test_one_name_twice_is_a_conflict_and_later_ones_load(point):
    points = [point("twin", "z-dist"), point("twin", "a-dist"), point("zz", "other")]
    expected = {("twin", "a-dist"): "conflict", ("twin", "z-dist"): "conflict", ("zz", "other"): "loaded"}
    assert states(discover(points)) == states(discover(points[::-1])) == expected
    complaint = discover(points).unusable[0].complaint()
    assert "a-dist 1.0 (fake_a_dist) and z-dist 1.0 (fake_z_dist)" in complaint
    assert states(discover(points, ["z-dist"]))["twin", "a-dist"] == "loaded", "turned off by name of distribution"


def test_a_bundled_name_stays_ours(point):
    installed = discover([point("bundled", "stranger"), point("bundled", "lightning-framework")])
    assert states(installed) == {("bundled", "lightning-framework"): "loaded", ("bundled", "stranger"): "conflict"}


def test_one_distribution_seen_twice_on_the_path_is_no_conflict(point):
    assert states(discover([point("x", "x-dist"), point("x", "x-dist")])) == {("x", "x-dist"): "loaded"}


@pytest.mark.parametrize("slot", ["strategy", "trainer", "seed", "hydra"])
def test_a_concern_of_the_core_cant_be_taken(point, slot):
    (package,) = discover([point("x", "x-dist", config_groups=hookimpl(lambda: {slot: "mine"}))]).all
    assert package.state == "broken"
    assert repr(slot) in package.cause
    assert "the core" in package.cause


def test_two_packages_cant_add_one_concern_or_command(point):
    groups = hookimpl(lambda: {"ema": "averages"})
    installed = discover([point("a", "a-dist", config_groups=groups), point("b", "b-dist", config_groups=groups)])
    assert states(installed)["b", "b-dist"] == "broken"
    assert "'ema', which belongs to a-dist 1.0" in installed.all[1].cause
    assert installed.slots["ema"] == "averages"
    (package,) = discover([point("a", "a-dist", commands=hookimpl(lambda: {"train": "x:y"}))]).all
    assert "'train'" in package.cause


class Good:
    @hookimpl
    def mesh_axes(self):
        return {"tp": 2}


class Misspelt:
    @hookimpl
    def mesh_axis(self):
        return {}


class Fails:
    @hookimpl
    def mesh_axes(self):
        raise ZeroDivisionError("by zero")


def test_an_unknown_hook_of_a_component_is_named_with_its_class():
    with pytest.raises(PluginError, match=r"Misspelt \(tp\).*mesh_axis"):
        manager_of({"tp": Misspelt()})


def test_a_hook_that_raises_is_named_with_its_plugin():
    assert ask_each(manager_of({"tp": Good(), "pp": object()}), "mesh_axes") == {"tp": {"tp": 2}}
    with pytest.raises(PluginError, match=r"hook mesh_axes of tp .*Fails\) failed: ZeroDivisionError: by zero"):
        ask_each(manager_of({"tp": Fails()}), "mesh_axes")
