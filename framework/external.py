"""Be one rank of a launcher of somebody else's (torchrun): `launch` runs in every rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from framework import preemption, process_groups, worker
from framework.agreement import gather
from framework.errors import UsageError
from framework.failures import write_error_file
from framework.launch import Attempt, Outcome
from framework.plan import RunPlan
from framework.rank_env import ExternalRank

log = logging.getLogger(__name__)

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Set to 1 for torchrun, it gives each attempt a store of its own. Measured with torch 2.13 without it: 5 of 8 jobs
with one killed rank lost a further restart or never trained again; with it, none of 4."""

OWN = ("run_id", "run_dir", "facts", "env")
"""Fields in which plans composed by several processes of one run may differ (time stamps, hosts): rank 0's count."""


class ExternalLauncher:
    """Runs this process's rank in this process: a `framework.launch.Launcher`.

    Args:
        outside: who torchrun says this is.
    """

    def __init__(self, outside: ExternalRank) -> None:
        self.outside = outside
        self.leads = outside.rank == 0
        self.external_attempt = outside.attempt

    def run(self, attempt: Attempt) -> Outcome:
        """Connect, agree on rank 0's plan, run the entry; return this rank's own outcome."""
        rank = self.outside.rank
        if self.leads and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            _advise()
        worker.end_with_parent()
        preemption.reset()
        plan = self._join(attempt.plan)
        ended = worker.work(plan, rank, attempt.entry)
        if ended.error is None:
            return Outcome("finished", results={rank: ended.content})
        if ended.kind == "preempted":
            return Outcome("preempted", note=ended.content)
        write_error_file(plan.run_dir, ended.content, attempt.number)
        _tell_torchrun(ended.error)
        return Outcome("failed", failures=(ended.content,))

    def _join(self, plan: RunPlan) -> RunPlan:
        """Make the process group from torchrun's environment and return the plan of rank 0.

        Raises:
            UsageError: on all ranks, if one composed another plan.
        """
        limit = timedelta(seconds=plan.timeout_s)
        process_groups.use_timeout(limit)
        dist.init_process_group(process_groups.backend_for(plan.accelerator), timeout=limit)
        first, *others = (RunPlan.from_dict(values) for values in gather(plan.to_dict()))
        for rank, other in enumerate(others, start=1):
            if replace(other, **{name: getattr(first, name) for name in OWN}) != first:
                named = ", ".join(_differences(other.to_dict(), first.to_dict()))
                raise UsageError(
                    f"Rank {rank} was given other settings than rank 0 ({named}); start all with one command line."
                )
        return replace(first, env=plan.env)


def _advise() -> None:
    """Say what torchrun needs for restarts that work; it is read by torchrun itself, so it can't be set from here."""
    if os.environ.get(OWN_STORE) != "1":
        log.warning(
            "torchrun may lose restarts or hang in them as long as its agent shares its store with the ranks; "
            "type `%s=1 torchrun ...`.",
            OWN_STORE,
        )


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [f"{key}: {one[key]!r} and {other[key]!r}" for key in one if key not in OWN and one[key] != other[key]]


def _tell_torchrun(error: BaseException) -> None:
    """Write torchrun's own error file (if it asked for one), so that its report names the cause and the rank."""

    @record
    def raise_again() -> None:
        raise error

    try:
        raise_again()
    except type(error):
        return
