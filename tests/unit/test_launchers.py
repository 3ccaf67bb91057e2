"""Launcher options without processes: refusals and variables (P38); the restart policy; what signals set."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from framework import external, preemption
from framework.errors import EXIT_USAGE, PlanError, RunFailedError, UsageError
from framework.launch import StopSignals, check
from framework.plan import Failure, MeshSpec, RunPlan
from framework.rank_env import external_rank, name_of_process, worker_environment
from framework_plugins.launcher.local import Local
from framework_plugins.launcher.spawn import Spawn
from framework_plugins.launcher.torchrun import Torchrun
from framework_plugins.recovery.restart import Restart

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29501"}


def plan(ranks: int = 2, **fields: Any) -> RunPlan:
    return RunPlan(run_id="r", run_dir="/nowhere", mesh=MeshSpec(dp_replicate=ranks), **fields)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


def test_external_rank() -> None:
    outside = external_rank({**TORCHRUN, "MASTER_ADDR": "host"})
    assert outside is not None
    assert (outside.rank, outside.local_rank, outside.world_size, outside.attempt) == (1, 1, 2, 0)
    assert outside.run_id == "host_29501", "torchrun's own default is the same for all runs"
    assert external_rank({"RANK": "3", "WORLD_SIZE": "4"}) is None, "left over, not torchrun"
    with pytest.raises(UsageError, match="unset TORCHELASTIC_RUN_ID"):
        external_rank({"TORCHELASTIC_RUN_ID": "x"})


def test_a_restart_is_known_by_who_began_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = str(tmp_path)
    assert external._note(run, ["one", "two"], 0) == 0
    assert external._note(run, ["one", "two"], 0) == 0, "a program that trains twice"
    monkeypatch.setattr(external, "name_of_process", lambda pid: f"another rank 0, {pid}")
    assert external._note(run, ["two", "three"], 0) == 1, "one has come, one was there"
    monkeypatch.setattr(external, "name_of_process", lambda pid: f"a third, {pid}")
    assert external._note(run, ["three", "three"], 5) == 5, "a host counts more"
    monkeypatch.setattr(external, "name_of_process", lambda pid: f"a fourth, {pid}")
    assert external._note(run, ["four", "five"], 0) == 0, "another command"
    (tmp_path / "torchrun.json").write_text("nonsense")
    told = external._note(run, ["four", "five"], 0)
    assert isinstance(told, RunFailedError)
    assert "torchrun.json can't be kept" in str(told)


def test_names_of_processes() -> None:
    mine = name_of_process(os.getpid())
    assert mine == name_of_process(os.getpid()) != name_of_process(os.getppid())


@pytest.mark.usefixtures("torchrun")
@pytest.mark.parametrize("option", [Local(), Spawn()])
def test_launchers_of_this_host_refuse_to_run_under_torchrun(option: Local | Spawn) -> None:
    (problem,) = option.check_plan(plan(3))
    assert "2 ranks" in problem.reason
    assert "3" in problem.reason
    assert "launcher=torchrun" in problem.fix


def test_one_host_only() -> None:
    (problem,) = Local().check_plan(plan(4, num_nodes=2))
    assert "num_nodes=2" in problem.setting


def test_torchrun_needs_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    (problem,) = Torchrun().check_plan(plan(2))
    assert "torchrun --nproc-per-node 2" in problem.fix


@pytest.mark.usefixtures("torchrun")
def test_torchrun_names_both_world_sizes() -> None:
    assert not Torchrun().check_plan(plan(2))
    with pytest.raises(PlanError, match=r"started 2 ranks, but the plan has 1"):
        Torchrun().make_launcher(plan(1))


def test_a_workers_environment_is_the_launchers_without_left_overs() -> None:
    base = {"PATH": "/bin", "RANK": "7", "MASTER_PORT": "1", "TORCHELASTIC_ERROR_FILE": "/x", "NODE_RANK": "3"}
    env = worker_environment(base, {"NCCL_DEBUG": "INFO"}, rank=1, world_size=2, run_id="r", attempt=3, port=5)
    assert env == {
        "PATH": "/bin", "NCCL_DEBUG": "INFO", "RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5", "TORCHELASTIC_RUN_ID": "r",
        "TORCHELASTIC_RESTART_COUNT": "3",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "setting"), [({"timeout_s": -1.0}, "timeout_s"), ({"threads": 0}, "threads"), ({"num_nodes": 3}, "num_")]
)
def test_plans_that_cannot_start(fields: dict[str, Any], setting: str) -> None:
    (problem,) = check(plan(4, **fields))
    assert setting in problem.setting


def failure(message: str = "ValueError: boom7", traceback: str = "Traceback", exit_code: int = 1) -> Failure:
    return Failure(rank=1, message=message, exit_code=exit_code, time=0.0, traceback=traceback)


def test_restart_policy() -> None:
    policy = Restart(max_restarts=2)
    killed = failure("killed by signal 9 (SIGKILL)", traceback="", exit_code=-9)
    assert policy.why_not(killed, 0, None, progressed=False) is None
    assert policy.why_not(killed, 1, killed, progressed=False) is None, "kills may repeat"
    assert "max_restarts=2" in str(policy.why_not(killed, 2, killed, progressed=True))
    assert policy.why_not(failure(), 1, failure(), progressed=True) is None
    assert "same error" in str(policy.why_not(failure(), 1, failure(), progressed=False))
    assert "settings" in str(policy.why_not(failure(exit_code=EXIT_USAGE), 0, None, progressed=False))
    with pytest.raises(ValueError, match="max_restarts=-1"):
        Restart(max_restarts=-1)


@pytest.fixture
def sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    preemption.reset()
    yield
    preemption.reset()
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
def test_sigterm_sets_a_flag_only_while_somebody_saves() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    preemption.arm()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # at once: the same notice
    time.sleep(0.01)
    assert preemption.requested()
    assert not preemption.agreed()
    preemption.agree(False)
    assert not preemption.agreed()
    preemption.agree(True)
    preemption.agree(False)
    assert preemption.agreed()
    preemption.disarm()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    preemption.reset()
    assert not preemption.requested()


def test_signals_of_the_launcher() -> None:
    before = signal.getsignal(signal.SIGINT)  # a shell starts what it puts into the background with SIGINT ignored
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.requested, stop.at_once) == (True, False)
        time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.at_once, stop.exit_code) == (True, 143)
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop.at_once, stop.exit_code) == (True, 130)
    assert signal.getsignal(signal.SIGINT) is before
