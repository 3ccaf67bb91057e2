"""Two runs in one folder: the second is told, before it has written anything."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launching import HERE, Launched, bare_plan, wait_until
from plans import option

from framework import job
from framework.errors import UsageError
from framework.launch import launch
from framework.run_lock import alone_in

TOLD = "another run is writing there"
CODE = """
import os, sys, time
from framework.run_lock import alone_in
with alone_in(sys.argv[1]):
    print("held", flush=True)
    if len(sys.argv) > 2:
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            time.sleep(1000)
    input()
"""


@contextmanager
def held(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds `folder`."""
    command = [sys.executable, "-c", CODE, str(folder), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield holder


def test_a_second_run_is_refused_and_one_after_it_is_not(tmp_path: Path) -> None:
    plan = bare_plan(tmp_path, 2, facts={"steps": 1_000_000, "step_s": 0.05})
    with Launched(plan, "rank_entries:steps") as run:
        wait_until(lambda: len(run.steps(1)) > 0, 120.0, "a step of the first run")
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(UsageError, match=f"run_dir={tmp_path}: {TOLD}"):
            launch(bare_plan(tmp_path, 1), "rank_entries:meet")
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        run.process.kill()
        run.process.wait()
        assert launch(bare_plan(tmp_path, 1), "rank_entries:meet").status == "finished"


def test_a_dead_process_holds_nothing(tmp_path: Path) -> None:
    with held(tmp_path) as holder:
        with pytest.raises(UsageError, match=TOLD), alone_in(str(tmp_path)):
            pytest.fail("two runs in one folder")
        holder.kill()
        holder.wait()
    with alone_in(str(tmp_path)):
        pass


def test_a_child_of_a_dead_process_holds_nothing(tmp_path: Path) -> None:
    """Under torchrun a rank holds the folder, and its DataLoader workers may outlive it for a moment."""
    with held(tmp_path, "forks") as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            holder.kill()
            holder.wait()
            os.kill(child, 0)  # alive
            with alone_in(str(tmp_path)):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_nothing_is_written_for_a_run_that_is_refused(tmp_path: Path) -> None:
    with held(tmp_path) as holder:
        with pytest.raises(UsageError, match=TOLD):
            job.run(bare_plan(tmp_path, 1), None)
        holder.kill()
    assert not list(tmp_path.iterdir())


def test_under_torchrun_too(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    plan = bare_plan(
        tmp_path, 2, {"launcher": option("launcher", "torchrun")}, facts={"steps": 1_000_000, "step_s": 0.05}
    )
    with Launched(plan, "rank_entries:steps", prefix=torchrun) as run:
        wait_until(lambda: len(run.steps(1)) > 0, 150.0, "a step of the first run")
        before = sorted(path.name for path in tmp_path.iterdir())
        words = [*torchrun, str(HERE / "launch_driver.py"), str(tmp_path / "plan.json"), "rank_entries:steps"]
        second = subprocess.run(
            words, capture_output=True, text=True, timeout=150, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert second.returncode != 0
        assert f"run_dir={tmp_path}: {TOLD}" in second.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        done = len(run.steps(1))
        wait_until(lambda: len(run.steps(1)) > done, 60.0, "a step after the second run's end")


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(9, os.strerror(9))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with alone_in(str(tmp_path)):
        pass
