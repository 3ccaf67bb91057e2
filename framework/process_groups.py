"""Making the process group of a run, with one time limit for it and for every group made later.

Torch gives each new group its library default (30 minutes on gloo, 10 on NCCL), whatever the world group was told. A
hang in a tensor-parallel collective would then outlive the user's setting by far. Here the default itself is set, so
groups of a mesh, of a checkpoint or of a user's own module all have the plan's limit unless their maker passes another.
"""

from __future__ import annotations

import logging
import random
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from framework.adapters import torch_private
from framework.errors import RunFailedError
from framework.plan import RunPlan

log = logging.getLogger(__name__)

TRIED_PORTS = 100

RUN_KEY = "run_id"
"""Key of the launcher's store under which the run's name is found, outside of any attempt's prefix."""


def backend_for(accelerator: str) -> str:
    """Return torch's name of the backends: gloo for CPU tensors always, NCCL for CUDA tensors."""
    return "cpu:gloo,cuda:nccl" if accelerator == "cuda" else "gloo"


def connect(plan: RunPlan, rank: int, attempt: int, port: int) -> None:
    """Join the run's world through the store that the launcher holds on this host.

    Args:
        plan: world size, time limit and run id are taken from it.
        rank: global rank.
        attempt: from 0; ranks of another attempt never meet.
        port: of the launcher's store.

    Raises:
        RunFailedError: the store belongs to another run, or not all ranks came within the time limit.
    """
    limit = timedelta(seconds=plan.timeout_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    host_run = store.get(RUN_KEY).decode()
    if host_run != plan.run_id:
        raise RunFailedError(
            f"Rank {rank} of run '{plan.run_id}' was sent to port {port}, where run '{host_run}' meets: refused."
        )
    use_timeout(limit)
    prefix = dist.PrefixStore(f"{plan.run_id}/{attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend_for(plan.accelerator), store=prefix, rank=rank, world_size=plan.world_size, timeout=limit
    )


def lasting_port() -> int:
    """Return a free port of this host that the system gives to no connection of its own accord.

    A port from the system (`bind` to 0) is freed before the store listens on it, and may be another connection's then.
    """
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(file.read_text().split()[0]) if file.exists() else 32768
    candidates = range(1024, first)
    for port in random.SystemRandom().sample(candidates, min(TRIED_PORTS, len(candidates))):
        with socket.socket() as tried, suppress(OSError):  # in use: another one
            tried.bind(("", port))
            return port
    with socket.socket() as tried:  # the system gives away all there are
        tried.bind(("", 0))
        return int(tried.getsockname()[1])


def use_timeout(limit: timedelta) -> None:
    """Make `limit` the time limit of every group that this process makes from now on and isn't given another."""
    torch_private.set_default_timeout(limit)


def timeouts() -> dict[str, float]:
    """Return the effective time limit of every group that this rank is in: description -> seconds.

    The description is the group's own (`default_pg`, `mesh_tp`), with its number; a group of several backends has one
    entry for each.
    """
    return {name: limit.total_seconds() for name, limit in torch_private.group_timeouts().items()}


def log_timeouts() -> None:
    """Log the effective limits in one line, shortest first."""
    limits = sorted(timeouts().items(), key=lambda item: item[1])
    log.info("Time limits of the process groups: %s.", ", ".join(f"{name} {limit:g} s" for name, limit in limits))
