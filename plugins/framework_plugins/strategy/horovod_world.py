"""Ranks that torch's process group has brought together meet in Horovod too.

horovodrun would start the processes and, in its own, a server in which they find one another. Here the ranks are there
already, whoever started them: rank 0 holds that server as long as Horovod starts, and tells the others where through
torch's process group. A host is a node of the plan.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from framework.agreement import ranks
from framework.errors import RunFailedError
from framework.plan import RunPlan

LOOPBACK = "127.0.0.1"
RANKS_OWN = (
    "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT",
)  # fmt: skip
"""Variables by which Horovod knows who this process is."""

_size: int | None = None
"""Number of ranks with which Horovod was started in this process; None = it wasn't."""


class HorovodWorld(Callback):
    """Starts Horovod before a training and ends it after, on all ranks together.

    Args:
        plan: of the run.
        shared: variables that Horovod reads when it starts; the plan's, which may be the user's own, win.
    """

    def __init__(self, plan: RunPlan, shared: Mapping[str, str]) -> None:
        self.plan = plan
        self.shared = {name: plan.env.get(name, value) for name, value in shared.items()}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The process group is there, the model isn't set up yet."""
        if stage == "fit":
            start(self.plan, self.shared)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """All gradients have arrived."""
        if stage == "fit":
            stop()


def start(plan: RunPlan, shared: Mapping[str, str]) -> None:
    """Start Horovod in this process, as the rank that it is in torch's process group; collective.

    Args:
        plan: of the run.
        shared: variables that are the same on all ranks.

    Raises:
        RunFailedError: Horovod was built without gloo, it counts other ranks than torch does, or this process was in a
            world of another size before.
    """
    global _size  # noqa: PLW0603 - Horovod is one to a process
    import horovod.torch as hvd

    if hvd.is_initialized():  # by a run that failed in this process
        hvd.shutdown()
    if not hvd.gloo_built():
        raise RunFailedError(
            "Horovod was built without gloo, by which the framework's ranks meet; type make horovod, which builds it "
            "with, or strategy=ddp."
        )
    rank, size = ranks()
    if _size not in (None, size):
        raise RunFailedError(
            f"Horovod 0.28 crashes in a process that had {_size} ranks before and has {size} now; start another "
            "process, as the launchers do."
        )
    _size = size
    node, local_rank = divmod(rank, plan.local_world_size)
    with _rendezvous(plan) as (address, port):
        values = (
            rank, size, local_rank, plan.local_world_size, node, plan.num_nodes, _host(node), address, port
        )  # fmt: skip
        os.environ.update(shared)
        os.environ.update(zip(RANKS_OWN, map(str, values), strict=True))
        os.environ.setdefault("HOROVOD_GLOO_IFACE", _interface(address))
        hvd.init()
        dist.barrier()  # the server is needed until all have met
    if (hvd.rank(), hvd.size()) != (rank, size):
        raise RunFailedError(
            f"Horovod takes this process for rank {hvd.rank()} of {hvd.size()}, and it is {rank} of {size}; "
            "`unset` what is exported as HOROVOD_..., or type strategy=ddp."
        )


def stop() -> None:
    """End Horovod in this process; all ranks do, once each has all its gradients."""
    import horovod.torch as hvd

    if hvd.is_initialized():
        hvd.shutdown()
    for name in RANKS_OWN:
        os.environ.pop(name, None)


@contextmanager
def _rendezvous(plan: RunPlan) -> Iterator[tuple[str, int]]:
    """Hold the server in which Horovod's processes meet, on rank 0; yield its address. Collective.

    On one host only that host can connect.
    """
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server: Any = None
    place: list[Any] = [None]
    if ranks()[0] == 0:
        address = LOOPBACK if plan.num_nodes == 1 else os.environ["MASTER_ADDR"]
        server = RendezvousHTTPServer((LOOPBACK if plan.num_nodes == 1 else "", 0), RendezvousHandler, 0)
        server.daemon_threads = True
        hosts = [HostInfo(_host(node), plan.local_world_size) for node in range(plan.num_nodes)]
        server.init(get_host_assignments(hosts, plan.world_size))
        threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True).start()
        place = [(address, server.server_address[1])]
    try:
        if ranks()[1] > 1:
            dist.broadcast_object_list(place, src=0)
        yield place[0]
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()


def _host(node: int) -> str:
    """Return a name of a node for Horovod, which only compares them."""
    return f"node-{node}"


def _interface(address: str) -> str:
    """Return the network interface by which `address` is reached; what `comm.interface` or the user says, wins."""
    said = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if said:
        return said
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        mine = probe.getsockname()[0]
    found = [name for name, held in psutil.net_if_addrs().items() if any(one.address == mine for one in held)]
    if not found:
        raise RunFailedError(
            f"No network interface of this host has the address {mine}, by which {address} is reached; export "
            "HOROVOD_GLOO_IFACE=<name of the interface>."
        )
    return str(found[0])
