"""Recovery by tier: from asking for the newest checkpoint until every rank has its state, every hash checked.

`memory` is this host's; for `peer` a keeper in a process and a folder of its own serves over a socket of this machine;
`disk` is read from the page cache, as after a restart; `remote` is the S3 protocol, served by moto on this machine. So
figures of peer and remote are those of the program, without a network.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint import state_of
from benchmarks.telling import told

BARS = {"memory": 0.3, "peer": 2.0}
STEP = 8


def save(path: str, megabytes: int, folder: str, peers: list[str], run: str) -> None:
    """As one rank: save the state, and send it to the peers."""
    from framework.versions import Clock
    from framework_plugins.checkpoint.peers import Peers
    from framework_plugins.checkpoint.store import ShardedStore

    torch.set_num_threads(1)
    ShardedStore().save(path, state_of(megabytes), {"step": STEP, "clock": Clock(1, (STEP,)).to_dict()})
    if peers:
        Peers(peers, run, folder, 0).send(Path(path), None)


def load(path: str, megabytes: int) -> float:
    """As one rank: load the state; return the seconds."""
    from framework_plugins.checkpoint.store import ShardedStore

    torch.set_num_threads(1)
    state = state_of(megabytes)
    for tensor in state.values():
        tensor.fill_(-1.0)
    dist.barrier()
    began = time.perf_counter()
    ShardedStore().load(path, state)
    took = time.perf_counter() - began
    for number, tensor in enumerate(state.values()):
        assert bool((tensor.to_local() == float(number)).all())  # type: ignore[attr-defined]
    return took


@contextmanager
def _server(*words: str) -> Iterator[str]:
    """Run a process that prints one line when it is ready; yield that line."""
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline()
        finally:
            process.terminate()


S3 = (
    "from moto.server import ThreadedMotoServer; import logging, threading;"
    "logging.getLogger('werkzeug').setLevel(logging.ERROR);"
    "s = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False); s.start();"
    "print(s.get_host_and_port()[1], flush=True); threading.Event().wait()"
)


def measure(megabytes: int, ranks: int, rounds: int) -> dict[str, Any]:
    """Return for each tier the median seconds for finding (with fetching), loading, and both."""
    from framework.plan import RunPlan
    from framework.testing import WorkerPool
    from framework_plugins.checkpoint import memory, tiers
    from framework_plugins.checkpoint.copier import Remote
    from framework_plugins.checkpoint.dcp import DCP

    os.environ.setdefault("FRAMEWORK_PEER_KEY", secrets.token_hex(16))
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as disk, tempfile.TemporaryDirectory(
        prefix="bench-", dir=memory.SYSTEM
    ) as shm, WorkerPool() as pool:  # fmt: skip
        keeper_folder = Path(shm) / "keeper"
        keeper_folder.mkdir()
        keep = ("-m", "framework", "keep", "127.0.0.1:0", "--folder", str(keeper_folder), "--free", "0")
        with _server(*keep) as line, _server("-c", S3) as port:
            peer = line.partition("[")[2].partition(",")[0]
            for name, value in {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port.strip()}", "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench",
            }.items():  # fmt: skip
                os.environ[name] = value
            for tier in told(("memory", "peer", "disk", "remote")):
                run, host = Path(disk) / tier, str(Path(shm) / f"host-{tier}")
                run.mkdir()
                settings = DCP(memory_dir=host, peers=[peer] if tier == "peer" else [],
                               remote="s3://bench/runs" if tier == "remote" else None)  # fmt: skip
                root = memory.make(str(run), host) if tier in ("memory", "peer") else run
                at = root / "checkpoints" / f"step-{STEP:06d}"
                pool.run(save, ranks, str(at), megabytes, host, list(settings.peers), memory.name_of(str(run)) or "",
                         timeout=300.0)  # fmt: skip
                if tier == "remote":
                    to = Remote(str(settings.remote), 1, RunPlan(run_id=tier, run_dir=str(run)))
                    to.send(at)
                    while not to.idle:
                        time.sleep(0.05)
                    shutil.rmtree(at)
                found_s, load_s = [], []
                for _ in range(rounds):
                    if tier == "peer":
                        shutil.rmtree(root)  # the host is gone
                    if tier == "remote":
                        shutil.rmtree(run / "remote", ignore_errors=True)
                    found = tiers.newest(str(run), settings)
                    assert found is not None
                    assert found.tier == tier
                    found_s.append(found.found_s)
                    load_s.append(max(pool.run(load, ranks, found.path, megabytes, timeout=300.0)))
                pick = rounds // 2
                rows[tier] = {"found_s": sorted(found_s)[pick], "load_s": sorted(load_s)[pick]}
                rows[tier]["total_s"] = rows[tier]["found_s"] + rows[tier]["load_s"]
                shutil.rmtree(host, ignore_errors=True)
    return {"megabytes": megabytes, "ranks": ranks, "tiers": rows}


def table(report: Mapping[str, Any]) -> Any:
    """Return the figures, a row a tier."""
    from rich.table import Table

    title = f"Recovery of {report['megabytes']} MB on {report['ranks']} ranks, every hash checked"
    shown = Table(title=title)
    for name in ("tier", "find and fetch s", "load s", "both s", "bar s"):
        shown.add_column(name, justify="left" if name == "tier" else "right")
    for tier, row in report["tiers"].items():
        bar = f"{BARS[tier]:g}" if tier in BARS else ""
        shown.add_row(tier, f"{row['found_s']:.2f}", f"{row['load_s']:.2f}", f"{row['total_s']:.2f}", bar)
    return shown
