"""The package plugin: where the options are, and which concern and command are new. Imports no torch."""

from __future__ import annotations

from framework import RunPlan, hookimpl
from framework.hookspecs import hookspec

REQUIRES_API = 1


class EmaSpecs:
    """Hooks of the concern `ema`."""

    @hookspec
    def ema_decay(self, step: int) -> float:
        """Return the weight of the old average at `step`."""
        raise AssertionError("a specification")


@hookimpl
def config_roots():
    return ["pkg://acme_parallel.conf"]


@hookimpl
def config_groups():
    return {"ema": "a running average of the weights"}


@hookimpl
def add_hookspecs(manager):
    manager.add_hookspecs(EmaSpecs)


@hookimpl
def commands():
    return {"ranks": "acme_parallel:ranks"}


def ranks(plan: RunPlan) -> int:
    """The command `ranks`: say how many there would be."""
    print(f"acme counts {plan.world_size} ranks")
    return 0
