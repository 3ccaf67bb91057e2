"""Be one rank of a launcher of somebody else's (torchrun): `launch` runs in every rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from framework import preemption, process_groups, worker
from framework.agreement import gather
from framework.checkpoint_files import read_json, write_json
from framework.errors import FrameworkError, RunFailedError, UsageError
from framework.failures import write_error_file
from framework.launch import Attempt, Outcome
from framework.plan import RunPlan
from framework.rank_env import ExternalRank, name_of_process, set_attempt

log = logging.getLogger(__name__)

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Set to 1 for torchrun, it gives each attempt a store of its own. Measured with torch 2.13 without it: 5 of 8 jobs
with one killed rank lost a further restart or never trained again; with it, none of 4."""

OWN = ("run_id", "run_dir", "facts", "env")
"""Fields in which plans composed by several processes of one run may differ (time stamps, hosts): rank 0's count."""

AGENTS = "torchrun.json"
"""File in a run's folder: which processes of torchrun's began the last attempt, and its number."""


class ExternalLauncher:
    """Runs this process's rank in this process: a `framework.launch.Launcher`.

    Args:
        outside: who torchrun says this is.
    """

    def __init__(self, outside: ExternalRank) -> None:
        self.outside = outside
        self.leads = outside.rank == 0
        self.external_attempt = outside.attempt

    def meet(self, plan: RunPlan) -> tuple[int, RunPlan]:
        """Connect; agree on rank 0's plan and on how often the ranks were restarted. Collective.

        torchrun counts restarts on each host for itself: a host that comes back begins at 0, and a restart because a
        host came isn't counted at all. So the highest number counts, and a process of torchrun's that had begun this
        run before has restarted it.

        Raises:
            UsageError: on all ranks, if one composed another plan.
            RunFailedError: on all ranks, if rank 0 can't note who begins.
        """
        if self.leads and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            _advise()
        worker.end_with_parent()
        preemption.reset()
        limit = timedelta(seconds=plan.timeout_s)
        process_groups.use_timeout(limit)
        dist.init_process_group(process_groups.backend_for(plan.accelerator), timeout=limit)
        told = gather((plan.to_dict(), self.external_attempt, name_of_process(os.getppid())))
        first = _alike([RunPlan.from_dict(values) for values, _, _ in told])
        number = max(number for _, number, _ in told)
        noted: int | FrameworkError = number
        if self.leads and plan.command == "fit":
            noted = _note(first.run_dir, [above for _, _, above in told], number)
        noted = gather(noted)[0]
        if isinstance(noted, FrameworkError):
            raise noted
        set_attempt(noted)
        return noted, replace(first, env=plan.env)

    def run(self, attempt: Attempt) -> Outcome:
        """Agree on where the attempt starts, run the entry; return this rank's own outcome."""
        rank = self.outside.rank
        first = _alike([RunPlan.from_dict(values) for values in gather(attempt.plan.to_dict())])
        plan = replace(first, env=attempt.plan.env)
        ended = worker.work(plan, rank, attempt.entry)
        if ended.error is None:
            return Outcome("finished", results={rank: ended.content})
        if ended.kind == "preempted":
            return Outcome("preempted", note=ended.content)
        write_error_file(plan.run_dir, ended.content, attempt.number)
        _tell_torchrun(ended.error)
        return Outcome("failed", failures=(ended.content,))


def _alike(plans: Sequence[RunPlan]) -> RunPlan:
    """Return rank 0's plan; UsageError if another rank's says something else."""
    first, *others = plans
    for rank, other in enumerate(others, start=1):
        if replace(other, **{name: getattr(first, name) for name in OWN}) != first:
            named = ", ".join(_differences(other.to_dict(), first.to_dict()))
            raise UsageError(
                f"Rank {rank} was given other settings than rank 0 ({named}); start all with one command line."
            )
    return first


def _note(run_dir: str, agents: Sequence[str], number: int) -> int | FrameworkError:
    """Note who begins an attempt; return its number: after the last one's, if one of them had begun that.

    Args:
        run_dir: of the run.
        agents: torchrun's process above each rank.
        number: the highest number of restarts that a host knows of.
    """
    file, me = Path(run_dir) / AGENTS, name_of_process(os.getpid())
    try:
        known = read_json(file) if file.is_file() else {}
        # A program that trains twice in one process hasn't been restarted.
        if set(known.get("agents", ())) & set(agents) and known["leader"] != me:
            number = max(number, int(known["attempt"]) + 1)
        write_json(file, {"agents": sorted(set(agents)), "leader": me, "attempt": number})
    except (OSError, ValueError) as error:
        return RunFailedError(f"{file} can't be kept, by which a restart is known from a new run: {error}")
    return number


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
