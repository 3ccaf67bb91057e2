"""Environment variables of the workers: what plugins ask for, what the user exported, and which of both is in effect.

No torch: the front end imports this.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pluggy

from framework.errors import PluginError
from framework.plan import RunPlan
from framework.redaction import MASK, is_secret


@dataclass(frozen=True)
class Variable:
    """One environment variable of the workers.

    Attributes:
        value: what the workers get.
        source: who asked for it: the slot of a plugin (`comm`), or `exported` by the user.
        shadowed: what a plugin asked for and doesn't get, because the user exported another value; None = nothing.
    """

    name: str
    value: str
    source: str
    shadowed: str | None = None

    def __str__(self) -> str:
        """Return a line for the screen; the value of a secret is masked."""
        hide = is_secret(self.name)
        shown = MASK if hide else self.value
        if self.shadowed is None:
            return f"{self.name}={shown} ({self.source})"
        wanted = MASK if hide else self.shadowed
        return f"{self.name}={shown} (exported in your shell; it wins over {wanted} from {self.source})"


def worker_variables(
    manager: pluggy.PluginManager, plan: RunPlan, environ: Mapping[str, str] = os.environ
) -> list[Variable]:
    """Ask every plugin's `process_env`, merge, and let what the user exported win. Sorted by name.

    Put `{v.name: v.value for v in ...}` into `plan.env`, and print the lines.

    Raises:
        PluginError: two plugins want different values; names both.
    """
    wanted: dict[str, tuple[str, str]] = {}
    for implementation in manager.hook.process_env.get_hookimpls():
        owner = implementation.plugin_name
        others = [plugin for name, plugin in manager.list_name_plugin() if name != owner and plugin is not None]
        for part in manager.subset_hook_caller("process_env", others)(plan=plan):
            for name, value in part.items():
                value_before, owner_before = wanted.setdefault(name, (value, owner))
                if value_before != value:
                    raise PluginError(
                        f"{name} can't be both {value_before} (asked for by {owner_before}) and {value} (by {owner}): "
                        f"choose another option for one of the two, or export {name} yourself."
                    )
    return sorted(_effective(wanted, environ), key=lambda variable: variable.name)


def _effective(wanted: Mapping[str, tuple[str, str]], environ: Mapping[str, str]) -> Iterable[Variable]:
    for name, (value, owner) in wanted.items():
        mine = environ.get(name)
        if mine is None:
            yield Variable(name, value, owner)
        elif mine == value:
            yield Variable(name, value, "exported")
        else:
            yield Variable(name, mine, owner, shadowed=value)
