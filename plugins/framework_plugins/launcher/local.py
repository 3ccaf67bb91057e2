"""`launcher=local`: all ranks on this host, forked from a server that has imported torch and Lightning once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from framework.errors import Problem
from framework.hookspecs import hookimpl
from framework.plan import RunPlan
from framework.rank_env import one_host_problems

if TYPE_CHECKING:
    from framework.processes import HostLauncher
    from framework.stopping import TellLauncher


@dataclass(kw_only=True, eq=False)
class Local:
    """Starts a rank in well under a second, restarts included; needs a system with `fork` (Linux, macOS)."""

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """Refuse what one host can't do, and being started by torchrun, once a rank."""
        return one_host_problems(plan, "local")

    @hookimpl
    def make_launcher(self, plan: RunPlan) -> HostLauncher:
        """Return the launcher."""
        from framework.processes import HostLauncher

        return HostLauncher("forkserver")

    @hookimpl
    def make_callbacks(self, plan: RunPlan) -> Sequence[TellLauncher]:
        """Let a failing rank report before its Trainer is torn down."""
        from framework.stopping import TellLauncher

        return [TellLauncher()]
