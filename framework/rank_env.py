"""The environment variables that tell a process which rank it is: read, written and cleaned here only. No torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from framework.errors import Problem, UsageError
from framework.plan import RunPlan

RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
)  # fmt: skip
"""Variables of which a left-over in the user's shell would send a worker to another run's ranks."""


@dataclass(frozen=True)
class ExternalRank:
    """What an external launcher (torchrun) says about this process.

    Attributes:
        rank: global rank.
        local_rank: rank on this host.
        world_size: ranks in all.
        run_id: the same on all ranks and attempts; torchrun's `--rdzv-id`, or the address of its first rank if that
            isn't set (`none`).
        attempt: how often torchrun has restarted the ranks.
    """

    rank: int
    local_rank: int
    world_size: int
    run_id: str
    attempt: int


def external_rank(environ: Mapping[str, str] = os.environ) -> ExternalRank | None:
    """Return which rank torchrun made of this process, or None if it wasn't started by torchrun.

    Raises:
        UsageError: `TORCHELASTIC_RUN_ID` is there but `RANK` or `WORLD_SIZE` isn't a number.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    try:
        rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local, attempt = int(environ.get("LOCAL_RANK", rank)), int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"TORCHELASTIC_RUN_ID is set, so torchrun should have set RANK and WORLD_SIZE to numbers, but: {error!r}. "
            "Type `unset TORCHELASTIC_RUN_ID` if it is left over in your shell."
        ) from error
    run_id = environ["TORCHELASTIC_RUN_ID"]
    if run_id in ("", "none"):
        run_id = f"{environ.get('MASTER_ADDR', 'localhost')}_{environ.get('MASTER_PORT', '0')}"
    return ExternalRank(rank=rank, local_rank=local, world_size=world, run_id=run_id, attempt=attempt)


def name_of_process(pid: int) -> str:
    """Return a name of a living process of this host that no other process has, on any host and at any time."""
    stat, boot = Path(f"/proc/{pid}/stat"), Path("/proc/sys/kernel/random/boot_id")
    began = stat.read_text().rpartition(")")[2].split()[19] if stat.is_file() else ""  # clock ticks since the boot
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.is_file() else ''}/{pid}/{began}"


def set_attempt(number: int) -> None:
    """Note how often the ranks were restarted, as all have agreed: logs and the ledger are told apart by it."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)


def stale_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the rank variables that are set, though no launcher of ours set them: name -> value."""
    return {name: environ[name] for name in RANK_VARIABLES if name in environ}


def worker_environment(
    base: Mapping[str, str],
    extra: Mapping[str, str],
    *,
    rank: int,
    world_size: int,
    run_id: str,
    attempt: int,
    port: int,
) -> dict[str, str]:
    """Return the whole environment of worker `rank` on this host.

    Args:
        base: the launcher's own environment; what is left over of another launcher in it is dropped.
        extra: `plan.env`: what the plugins asked for; a variable that the user exported is in it with the user's value.
        rank: global rank; all ranks are on this host.
        world_size: ranks in all.
        run_id: of the plan.
        attempt: from 0.
        port: where the launcher's store listens on this host.
    """
    env = {name: value for name, value in base.items() if name not in RANK_VARIABLES}
    env |= extra
    # With these Lightning finds a torchelastic environment, so that it starts no process itself.
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    return env


def one_host_problems(plan: RunPlan, option: str) -> list[Problem]:
    """Return why `launcher=<option>`, which starts ranks on this host itself, can't start this plan's."""
    problems = []
    if plan.num_nodes > 1:
        fix = "launcher=torchrun and start it with torchrun on each host"
        problems.append(
            Problem(f"num_nodes={plan.num_nodes}", f"launcher={option} starts ranks on this host only.", fix)
        )
    outside = external_rank()
    if outside is not None:
        reason = (
            f"torchrun has started {outside.world_size} ranks (WORLD_SIZE={outside.world_size}) already, and each of "
            f"them would start the plan's {plan.world_size}."
        )
        problems.append(Problem(f"launcher={option}", reason, f"launcher=torchrun devices={outside.world_size}"))
    return problems
