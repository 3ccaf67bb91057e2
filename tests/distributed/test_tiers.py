"""Hosts that die whole: what their memory held is had again from another host's, and training equals the undisturbed.

Real processes on hosts of their own (`hosts.py`): a network namespace and a memory file system each.
"""

from __future__ import annotations

import re
from pathlib import Path
from subprocess import Popen

import hosts
import kills
import pytest
import torch
from hosts import Host, connect, wait_for

from framework import checkpoint_files as files
from framework_plugins.checkpoint.store import ShardedStore

START_UP_S = 90.0
PORT = 29600
SETTINGS = (
    "model.width=16", "model.layers=2", "model.heads=2", "model.context=16", "global_batch_size=8", "threads=1",
    "trainer.enable_progress_bar=false", "trainer.limit_val_batches=0", "precision=fp64", "optimizer=sgd",
    "checkpoint.every_n_steps=0", "checkpoint.memory_every_n_steps=1", "checkpoint.mode=sync", "timeout_s=60",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    why = hosts.why_not()
    if why is not None:
        pytest.skip(f"no hosts can be made here: {why}")
    monkeypatch.setenv("FRAMEWORK_PEER_KEY", "a key that all hosts of a test share")
    return tmp_path


def keep(host: Host, number: int) -> None:
    name = f"keeper-{number}"
    host.python(name, "-m", "framework", "keep", f"{host.address}:{PORT}", "--free=0.01")
    wait_for(lambda: "Keeping checkpoints" in host.said(name), START_UP_S, host.said(name))


def train(host: Host, name: str, node: int | None, run: Path, steps: int, *more: str) -> Popen[bytes]:
    """Start a run's part on a host; node = number in a run of two hosts, None = the run is on this host alone."""
    words = (*SETTINGS, f"run_dir={run}", f"trainer.max_steps={steps}", *more)
    if node is None:
        return host.python(name, "-m", "framework", *words)
    torchrun = ("-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1")
    meet = ("--master-addr=10.77.0.1", "--master-port=29500", "-m", "framework", "launcher=torchrun", "num_nodes=2")
    return host.python(name, *torchrun, *meet, *words)


def saved(host: Host, name: str, step: int) -> bool:
    return f"{files.step_name(step)}: training waited" in host.said(name)


def undisturbed(host: Host, folder: Path, steps: int) -> Path:
    """Train on one host that nothing happens to."""
    run = folder / "whole"
    process = host.python(
        "undisturbed", "-m", "framework", *SETTINGS, f"run_dir={run}",
        f"trainer.max_steps={steps}",
    )  # fmt: skip
    assert process.wait(START_UP_S) == 0, host.said("undisturbed")
    return run


def state(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Return every tensor of model and optimizer of a checkpoint, whole, whatever mix wrote it."""
    path, store = str(files.folder_of(run) / files.step_name(step)), ShardedStore()
    wanted = {
        name: torch.zeros(shape, dtype=dtype)
        for name, (dtype, shape) in store.entries(path).items()
        if name.startswith(("model.", "optimizer."))
    }
    store.load(path, wanted, ("model.", "optimizer."))
    return wanted


def began_from(text: str) -> tuple[int, str, float]:
    """Return step, tier and seconds of what a run says it began from."""
    found = re.search(r"begins from \S+ \(step (\d+), tier (\w+), found in ([\d.]+) s\)", text)
    assert found is not None, text
    return int(found[1]), found[2], float(found[3])


def test_one_of_two_hosts_dies_with_its_memory(folder: Path) -> None:
    run, peers = folder / "run", f"checkpoint.peers=[10.77.0.1:{PORT},10.77.0.2:{PORT}]"
    with Host(1, folder) as one:
        with Host(2, folder) as two:
            connect(one, two)
            keep(one, 1)
            keep(two, 2)
            parts = [train(host, f"first-{node}", node, run, 5000, "+strategy=fsdp", "devices=2", peers)
                     for node, host in enumerate((one, two))]  # fmt: skip
            wait_for(lambda: saved(one, "first-0", 4), START_UP_S, one.said("first-0"))
            two.destroy()  # in the middle of whatever it was doing
        parts[0].kill()
        one.shell("pkill -9 -f 'launcher=torc[h]run'; true")
        with Host(2, folder) as two:
            connect(one, two)
            keep(two, 3)
            assert two.shell("ls /dev/shm").split() == ["framework-keeper"], "nothing is left of the host that died"
            done = int(re.findall(r"step-(\d+): training waited", one.said("first-0"))[-1])
            again = [train(host, f"second-{node}", node, run, done + 4, "+strategy=fsdp", "devices=2", peers,
                           "ckpt_path=auto") for node, host in enumerate((one, two))]  # fmt: skip
            for node, process in enumerate(again):
                host = (one, two)[node]
                assert process.wait(START_UP_S) == 0, host.said(f"second-{node}")
            here, there = began_from(one.said("second-0")), began_from(two.said("second-1"))
            assert (here[0], here[1]) == (there[0], "memory"), "the host that lived had the other's part, too"
            assert there[1] == "peer"
            assert done - 1 <= there[0] <= done + 1, "the newest that was complete"
            assert not [name for host in (one, two) for name in host.shell("ls /dev/shm").split()
                        if name != "framework-keeper"], "the run is done: the memory is given back"  # fmt: skip
            whole = undisturbed(one, folder, done + 4)
    assert kills.difference(state(run, done + 4), state(whole, done + 4)) < 1e-12
    assert kills.ledger(run, done + 4) == ([], kills.ledger(whole, done + 4)[1])


def test_a_run_whose_only_host_dies_goes_on_elsewhere_under_another_mix(folder: Path) -> None:
    run, peers = folder / "run", f"checkpoint.peers=[10.77.0.2:{PORT}]"
    with Host(2, folder) as keeper:
        with Host(1, folder) as one:
            connect(one, keeper)
            keep(keeper, 1)
            train(one, "first", None, run, 5000, "+strategy=fsdp", "devices=2", peers)
            wait_for(lambda: saved(one, "first", 4), START_UP_S, one.said("first"))
            one.destroy()
        with Host(1, folder) as other:
            connect(other, keeper)
            done = int(re.findall(r"step-(\d+): training waited", other.said("first"))[-1])
            process = train(other, "second", None, run, done + 4, "+pp=gpipe", "devices=2", peers, "ckpt_path=auto")
            assert process.wait(START_UP_S) == 0, other.said("second")
            step, tier, _ = began_from(other.said("second"))
            assert tier == "peer"
            assert done - 1 <= step <= done + 1
            whole = undisturbed(other, folder, done + 4)
    assert kills.difference(state(run, done + 4), state(whole, done + 4)) < 1e-12


def test_training_goes_on_when_the_peer_is_gone(folder: Path) -> None:
    run, peers = folder / "run", f"checkpoint.peers=[10.77.0.2:{PORT}]"
    with Host(1, folder) as one, Host(2, folder) as keeper:
        connect(one, keeper)
        keep(keeper, 1)
        process = train(one, "first", None, run, 300, peers)
        wait_for(lambda: saved(one, "first", 4), START_UP_S, one.said("first"))
        assert "isn't with a peer" not in one.said("first")
        keeper.destroy()
        assert process.wait(START_UP_S) == 0, one.said("first")
        assert "isn't with a peer: rank 0: the keeper at 10.77.0.2:29600 can't be reached" in one.said("first")
        assert files.newest_complete(run) is not None
