"""Every hook stands in `docs/hooks.md` and in the drawing of a run, has words that say when it is called, and is."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from framework import hookspecs
from framework.hookspecs import SPECS

ROOT = Path(__file__).parents[2]


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hook_docs", ROOT / "tools" / "hook_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = {name: function for spec in SPECS for name, function, _ in tool().hooks(spec)}
SOURCES = {file: file.read_text() for file in (ROOT / "framework").rglob("*.py") if file.name != "hookspecs.py"}


def test_there_are_hooks() -> None:
    assert len(HOOKS) > 25


def test_hooks_md_is_up_to_date() -> None:
    assert (ROOT / "docs" / "hooks.md").read_text() == tool().page(), "type: python tools/hook_docs.py"


@pytest.mark.parametrize("name", HOOKS)
def test_hook(name: str) -> None:
    doc = inspect.getdoc(HOOKS[name])
    assert doc, f"{name} has no docstring"
    assert len(doc) > 20
    assert hookspecs.__doc__ is not None
    assert name in hookspecs.__doc__ or name in ("add_hookspecs",), f"{name} isn't in the drawing of a run"


@pytest.mark.parametrize("name", HOOKS)
def test_hook_is_called_by_the_core(name: str) -> None:
    called = re.compile(rf"hook\.{name}\(|hook, \"{name}\"|\(\w+, \"{name}\"|\"{name}\"")
    assert any(called.search(text) for text in SOURCES.values()), f"nothing in framework/ calls the hook {name}"


@pytest.mark.parametrize("name", HOOKS)
def test_verb_tells_how_it_is_called(name: str) -> None:
    first = HOOKS[name].framework_spec["firstresult"]
    verb = name.partition("_")[0]
    if verb in ("apply", "on"):
        assert not first
    if first:
        assert verb in ("make", "newest", "fetch", "shard"), (
            f"{name}: only hooks that build or find one thing stop at a result"
        )


ARGUMENTS = {
    1: {
        "config_roots": "", "config_groups": "", "add_hookspecs": "manager", "commands": "", "mesh_axes": "",
        "requirements": "", "check_plan": "plan", "check_model": "plan model", "plan_notes": "plan",
        "split_dims": "plan model",
        "process_env": "plan", "make_launcher": "plan", "make_restart_policy": "plan",
        "on_worker_failure": "plan failure attempt", "newest_complete": "plan",
        "fetch_checkpoint": "plan url", "on_run_end": "plan error",
        "on_worker_start": "plan rank", "make_precision": "plan", "make_checkpoint_io": "plan", "make_strategy": "plan",
        "make_loggers": "plan", "make_callbacks": "plan", "make_stages": "module mesh plan",
        "apply_tensor_parallel": "part mesh plan", "apply_expert_parallel": "part mesh plan",
        "apply_context_parallel": "part mesh plan", "apply_activation_checkpointing": "part mesh plan",
        "apply_compile": "part mesh plan", "apply_data_parallel": "part mesh plan",
        "make_schedule": "parts mesh plan", "make_optimizer": "module plan",
        "make_sampler": "dataset plan data_rank shuffle train", "shard_iterable": "dataset plan data_rank",
        "on_checkpoint_saved": "path step",
    },
}  # fmt: skip
"""What plugins written for each version of the hook API may rely on. A new hook or argument needs no new version."""


def test_nothing_that_plugins_rely_on_is_gone() -> None:
    """Renaming or removing a hook or an argument breaks plugins: raise API_VERSION and state the new set here."""
    now = {name: set(inspect.signature(function).parameters) - {"self"} for name, function in HOOKS.items()}
    for name, arguments in ARGUMENTS[hookspecs.API_VERSION].items():
        assert name in now, f"the hook {name} is gone"
        assert set(arguments.split()) <= now[name], f"an argument of {name} is gone"


def test_promises_cover_every_hook() -> None:
    assert set(ARGUMENTS[hookspecs.API_VERSION]) == set(HOOKS)
