"""Two runs in one folder: the second is told, before it has written anything."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import Launched, bare_plan, wait_until

from framework.errors import UsageError
from framework.launch import launch
from framework.run_lock import alone_in

TOLD = "another run is writing there"
CODE = """
import sys
from framework.run_lock import alone_in
with alone_in(sys.argv[1]):
    print("held", flush=True)
    input()
"""


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
    with subprocess.Popen(
        [sys.executable, "-c", CODE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match=TOLD), alone_in(str(tmp_path)):
            pytest.fail("two runs in one folder")
        holder.kill()
        holder.wait()
    with alone_in(str(tmp_path)):
        pass


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(9, os.strerror(9))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with alone_in(str(tmp_path)), alone_in(str(tmp_path)):
        pass
