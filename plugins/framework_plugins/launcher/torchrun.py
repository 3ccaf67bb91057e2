"""`launcher=torchrun`: torchrun has started the ranks; every rank composes the same plan, rank 0 writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from framework.errors import PlanError, Problem
from framework.hookspecs import hookimpl
from framework.plan import RunPlan
from framework.rank_env import external_rank

if TYPE_CHECKING:
    from framework.external import ExternalLauncher


@dataclass(kw_only=True, eq=False)
class Torchrun:
    """Start it as `torchrun --nproc-per-node N -m framework launcher=torchrun ...`, on each host if there are several.

    Restarts are torchrun's (`--max-restarts`); each begins from the newest complete checkpoint of the run.
    """

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """Compare what torchrun has started with what the plan needs, before anybody connects."""
        outside = external_rank()
        start = f"torchrun --nproc-per-node {plan.local_world_size} -m framework launcher=torchrun ..."
        if outside is None:
            return [Problem("launcher=torchrun", "this process wasn't started by torchrun.", f"`{start}`")]
        if outside.world_size != plan.world_size:
            reason = (
                f"torchrun has started {outside.world_size} ranks, but the plan has {plan.world_size}: {plan.mesh}."
            )
            return [Problem("launcher=torchrun", reason, f"devices={outside.world_size}, or `{start}`")]
        return []

    @hookimpl
    def make_launcher(self, plan: RunPlan) -> ExternalLauncher:
        """Return the launcher; PlanError if this isn't the world that the plan needs."""
        from framework.external import ExternalLauncher

        problems = self.check_plan(plan)
        outside = external_rank()
        if problems or outside is None:
            raise PlanError(problems)
        return ExternalLauncher(outside)
