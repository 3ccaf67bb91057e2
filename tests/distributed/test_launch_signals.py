"""Signals and sudden ends: SIGTERM saves once on all ranks, Ctrl-C ends, nothing stays behind (P36, P37)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import Launched, bare_plan, wait_until

START_UP_S = 150.0
"""Importing torch twice, on a busy machine."""


def running(tmp_path: Path, facts: dict[str, Any] | None = None, **fields: Any) -> Launched:
    """Start two ranks that step for ever, and return once both have made a step."""
    plan = bare_plan(tmp_path, 2, facts={"steps": 1_000_000, "step_s": 0.05, **(facts or {})}, **fields)
    launched = Launched(plan, "rank_entries:steps")
    wait_until(lambda: bool(launched.steps(0) and launched.steps(1)), START_UP_S, "both ranks step")
    return launched


def saved(launched: Launched) -> list[tuple[int, int]]:
    """Return (rank, step) of all saves."""
    path = launched.run_dir / "saves.txt"
    return sorted((int(line.split()[0]), int(line.split()[1])) for line in path.read_text().splitlines())


@pytest.mark.parametrize("whom", ["rank 1", "parent", "whole group", "parent and group"])
def test_sigterm_saves_once_at_one_step(tmp_path: Path, whom: str) -> None:
    """P37 a, b: all ranks save at the same step and stop; the exit code says "run it again"."""
    with running(tmp_path) as launched:
        if whom != "whole group":
            os.kill(launched.pid(1) if whom == "rank 1" else launched.process.pid, signal.SIGTERM)
        if "group" in whom:  # `timeout` and schedulers signal the fork server too, some of them the parent twice
            os.killpg(launched.process.pid, signal.SIGTERM)
        assert launched.wait(20) == 75, launched.output()
        (rank_0, step_0), (rank_1, step_1) = saved(launched)
        assert (rank_0, rank_1, step_0) == (0, 1, step_1)
        assert launched.steps(0)[-1]["step"] == launched.steps(1)[-1]["step"] == step_0
        assert f"saved at step {step_0}" in launched.output()
        launched.no_leftovers()


def test_a_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    """P37 c: while a long save goes on."""
    with running(tmp_path, {"save_s": 1000.0}) as launched:
        os.kill(launched.process.pid, signal.SIGTERM)
        wait_until((tmp_path / "saves.txt").exists, 20, "a save has begun")
        time.sleep(0.6)  # signals within half a second count as one
        os.kill(launched.process.pid, signal.SIGTERM)
        assert launched.wait(15) == 143
        assert "second SIGTERM" in launched.output()
        launched.no_leftovers()


def test_sigterm_during_a_save_waits_for_it(tmp_path: Path) -> None:
    """P37 e: the save ends, the next step saves again and stops."""
    with running(tmp_path, {"every": 5, "save_s": 1.0}) as launched:
        wait_until((tmp_path / "saves.txt").exists, 20, "a save has begun")
        os.kill(launched.pid(1), signal.SIGTERM)
        assert launched.wait(20) == 75
        assert len(saved(launched)) % 2 == 0
        launched.no_leftovers()


def test_sigterm_where_nobody_saves_ends_without_claiming_a_save(tmp_path: Path) -> None:
    """143, not 75: the run has to be told from one that saved."""
    with running(tmp_path, {"arm": False}) as launched:
        os.kill(launched.process.pid, signal.SIGTERM)
        assert launched.wait(20) == 143
        assert "without saving" in launched.output()
        launched.no_leftovers()


def test_ctrl_c_ends_within_seconds(tmp_path: Path) -> None:
    """The terminal signals the launcher; 130, no traceback."""
    with running(tmp_path, {"loader": True}) as launched:
        os.killpg(launched.process.pid, signal.SIGINT)
        assert launched.wait(10) == 130
        assert "Traceback" not in launched.output()
        launched.no_leftovers()


@pytest.mark.parametrize("whom", ["parent", "fork server"])
def test_kill_9_of_what_started_them_takes_the_ranks_along(tmp_path: Path, whom: str) -> None:
    """DataLoader workers included, within 5 s."""
    with running(tmp_path, {"loader": True}) as launched:
        assert len(launched.tagged()) >= 7  # launcher, server, 2 ranks with 2 loader workers each
        parent = int(Path(f"/proc/{launched.pid(0)}/stat").read_text().rpartition(")")[2].split()[1])
        victim = launched.process.pid if whom == "parent" else parent
        os.kill(victim, signal.SIGKILL)
        assert launched.wait(15) == (-9 if whom == "parent" else 1)
        launched.no_leftovers()


def test_kill_9_of_a_rank_takes_its_children_along(tmp_path: Path) -> None:
    """DataLoader workers, and a program that a rank has started and that would never end; rank and signal are named."""
    with running(tmp_path, {"loader": True, "child": True}) as launched:
        children = {child.pid for child in psutil.Process(launched.pid(1)).children()}
        assert len(children) == 3
        os.kill(launched.pid(1), signal.SIGKILL)
        assert launched.wait(15) == 1
        assert not children & set(launched.tagged())
        assert "Rank 1 was killed by signal 9 (SIGKILL)" in launched.output()
        launched.no_leftovers()


def test_a_stopped_rank_is_found_by_the_time_limit(tmp_path: Path) -> None:
    """A rank that neither fails nor goes on: the others' time-out ends the run, and the stopped rank with it."""
    with running(tmp_path, timeout_s=3.0) as launched:
        os.kill(launched.pid(1), signal.SIGSTOP)
        assert launched.wait(20) == 1
        assert "Rank 0 failed" in launched.output()
        launched.no_leftovers()
