"""Discover package plugins, register the chosen components, explain what is there."""

from __future__ import annotations

import importlib
from typing import Any

import pluggy

from framework.hookspecs import PROJECT, SPECS
from framework.plan import RunPlan
from framework.schema import LIST_SLOTS

OBJECT_SLOTS = ("model", "data", *LIST_SLOTS)
"""Slots that hold objects of the user's own classes rather than component plugins."""


def manager_for(plan: RunPlan) -> pluggy.PluginManager:
    """Return a manager with every chosen component of `plan` registered under its slot's name."""
    manager = pluggy.PluginManager(PROJECT)
    for spec in SPECS:
        manager.add_hookspecs(spec)
    for slot, spec in plan.components.items():
        if slot not in OBJECT_SLOTS and spec is not None:
            manager.register(component(spec), name=slot)
    manager.check_pending()
    return manager


def component(spec: Any) -> Any:
    """Build one component plugin from its plain description."""
    module, _, name = spec["_target_"].rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    return cls(**{key: value for key, value in spec.items() if key not in ("_target_", "option")})
