"""`launcher=local`: all ranks on this host, forked from a server that has imported torch and Lightning once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from framework.errors import Problem
from framework.hookspecs import hookimpl
from framework.plan import RunPlan
from framework.rank_env import external_rank

if TYPE_CHECKING:
    from framework.processes import HostLauncher


@dataclass(kw_only=True, eq=False)
class Local:
    """Starts a rank in about half a second, restarts included; needs a system with `fork` (Linux, macOS)."""

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """Refuse what one host can't do, and being started by torchrun, once a rank."""
        return one_host_problems(plan, "local")

    @hookimpl
    def make_launcher(self, plan: RunPlan) -> HostLauncher:
        """Return the launcher."""
        from framework.processes import HostLauncher

        return HostLauncher("forkserver")


def one_host_problems(plan: RunPlan, option: str) -> list[Problem]:
    """Return why `launcher=<option>` can't start this plan's ranks itself, on this host."""
    problems = []
    if plan.num_nodes > 1:
        reason = f"launcher={option} starts ranks on this host only."
        problems.append(
            Problem(f"num_nodes={plan.num_nodes}", reason, "launcher=torchrun and start it with torchrun on each host")
        )
    outside = external_rank()
    if outside is not None:
        reason = (
            f"torchrun has started {outside.world_size} ranks already, and each of them would start "
            f"{plan.world_size} more."
        )
        problems.append(Problem(f"launcher={option}", reason, "launcher=torchrun"))
    return problems
