"""A training framework on Lightning: every concern a plugin, any parallelism mix a config choice.

Importing this package imports neither torch nor Lightning; `Trainer` does, when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from framework.errors import FrameworkError, PlanError, PluginError, Problem, UsageError
from framework.hookspecs import API_VERSION, hookimpl
from framework.plan import BatchSpec, MeshSpec, Requirements, RunPlan

if TYPE_CHECKING:
    from framework.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "API_VERSION",
    "BatchSpec",
    "FrameworkError",
    "MeshSpec",
    "PlanError",
    "PluginError",
    "Problem",
    "Requirements",
    "RunPlan",
    "Trainer",
    "UsageError",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from framework.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
