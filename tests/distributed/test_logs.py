"""`logs=rank_zero` over real processes: one line for all ranks, and nothing lost when one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from framework import RunPlan
from framework.plan import MeshSpec
from framework_plugins.logs.rank_zero import RankZero

PRELUDE = """
import logging, os, signal, sys, time
from framework import RunPlan
from framework.plan import MeshSpec
from framework_plugins.logs.rank_zero import RankZero
run_dir, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
plan = RunPlan(run_id="logs", run_dir=run_dir, mesh=MeshSpec(dp_replicate=world))
plugin = RankZero(flush_seconds={flush_seconds}, flush_entries={flush_entries})
plugin.on_worker_start(plan=plan, rank=rank)
log = logging.getLogger("user")
def wait_for(text, path="global.log"):
    end = time.monotonic() + 20
    while not (os.path.exists(f"{{run_dir}}/{{path}}") and text in open(f"{{run_dir}}/{{path}}").read()):
        assert time.monotonic() < end, f"{{text}} never came"
        time.sleep(0.02)
"""


def start(
    run_dir: Path, rank: int, world: int, body: str, *, attempt: int = 0, flush_seconds: float = 5.0, entries: int = 128
) -> subprocess.Popen[str]:
    script = PRELUDE.format(flush_seconds=flush_seconds, flush_entries=entries) + textwrap.dedent(body)
    env = {**os.environ, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
    command = [sys.executable, "-c", script, str(run_dir), str(rank), str(world)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def consoles(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for all and return what each printed."""
    return ["".join(process.communicate(timeout=30)) for process in processes]


def lines(run_dir: Path) -> list[str]:
    return [line.partition(" ")[2] for line in (run_dir / "global.log").read_text().splitlines()]


def plan_of(run_dir: Path, world: int) -> RunPlan:
    return RunPlan(run_id="logs", run_dir=str(run_dir), mesh=MeshSpec(dp_replicate=world))


def test_p02_info_once_errors_of_any_rank_with_the_rank(tmp_path: Path) -> None:
    body = """
        log.info("hello")
        if rank == 1:
            log.error("rank-one-only")
        wait_for("rank-one-only", "logs/rank_1.log")
        wait_for("hello", f"logs/rank_{1 - rank}.log")
        if rank == 0:
            wait_for("rank-one-only")
        plugin.on_run_end(plan=plan, error=None)
    """
    ranks = [start(tmp_path, rank, 2, body) for rank in range(2)]
    console = "".join(consoles(ranks))
    RankZero().on_run_end(plan_of(tmp_path, 2), None)
    assert [rank.returncode for rank in ranks] == [0, 0], console
    assert console.count("hello") == 1
    assert console.count("rank-one-only") == 1
    assert "ERROR [rank 1] user: rank-one-only" in console
    assert "\x1b" not in console
    assert (tmp_path / "logs" / "rank_1.log").exists()
    assert "INFO user [ranks 0-1] hello" in lines(tmp_path)
    assert "ERROR user [rank 1] rank-one-only" in lines(tmp_path)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_last_line_of_a_killed_rank_is_there(tmp_path: Path, victim: int) -> None:
    """Both flush limits are far away: what a killed rank said a microsecond before lies in no file yet but its own."""
    body = f"""
        log.info("hello")
        wait_for("hello", f"logs/rank_{{1 - rank}}.log")
        if rank == {victim}:
            log.warning("last words")
            os.kill(os.getpid(), signal.SIGKILL)
        log.info("survivor")
        plugin.on_run_end(plan=plan, error=None)
    """
    ranks = [start(tmp_path, rank, 2, body, flush_seconds=600.0) for rank in range(2)]
    consoles(ranks)
    assert ranks[victim].returncode == -signal.SIGKILL
    assert ranks[1 - victim].returncode == 0
    RankZero().on_run_end(plan_of(tmp_path, 2), None)
    assert f"WARNING user [rank {victim}] last words" in lines(tmp_path)
    assert f"INFO user [rank {1 - victim}] survivor" in lines(tmp_path)
    assert lines(tmp_path).count("INFO user [ranks 0-1] hello") == 1


def test_many_lines_of_a_killed_rank_none_lost_none_twice(tmp_path: Path) -> None:
    body = """
        if rank == 1:
            for number in range(100_000):
                log.info("line %d", number)
        wait_for("line 50")
        time.sleep(60)
    """
    ranks = [start(tmp_path, rank, 2, body, flush_seconds=0.2) for rank in range(2)]
    spool = tmp_path / "logs" / "rank_1.log"
    end = time.monotonic() + 20
    while not (spool.exists() and spool.stat().st_size > 100_000):
        assert time.monotonic() < end
        time.sleep(0.01)
    for rank in ranks:
        rank.kill()
    consoles(ranks)
    RankZero().on_run_end(plan_of(tmp_path, 2), None)
    said = [line.rpartition(" ")[2] for line in lines(tmp_path) if "[rank 1] line " in line]
    assert len(said) > 1000
    assert said == [str(number) for number in range(len(said))]


def test_a_second_attempt_goes_on_in_the_same_file(tmp_path: Path) -> None:
    first = 'log.info("step of attempt 0"); os.kill(os.getpid(), signal.SIGKILL)'
    consoles([start(tmp_path, rank, 2, first) for rank in range(2)])
    second = """
        log.info("step of attempt 1")
        wait_for("attempt 1", f"logs/rank_{1 - rank}.log")
        plugin.on_run_end(plan=plan, error=None)
    """
    ranks = [start(tmp_path, rank, 2, second, attempt=1) for rank in range(2)]
    consoles(ranks)
    assert [rank.returncode for rank in ranks] == [0, 0]
    RankZero().on_run_end(plan_of(tmp_path, 2), None)
    said = [line for line in lines(tmp_path) if " user " in line]
    assert said == ["INFO user [ranks 0-1] step of attempt 0", "INFO user [ranks 0-1] step of attempt 1"]


def test_merged_while_the_run_goes_on(tmp_path: Path) -> None:
    """At the entries limit, long before the seconds are over."""
    body = """
        wait_for("started", f"logs/rank_{1 - rank}.log")
        for number in range(8):
            log.info("line %d", number)
        wait_for("line 7")
        plugin.on_run_end(plan=plan, error=None)
    """
    ranks = [start(tmp_path, rank, 2, body, flush_seconds=600.0, entries=8) for rank in range(2)]
    consoles(ranks)
    assert [rank.returncode for rank in ranks] == [0, 0]


def test_forked_loader_workers_write_whole_lines_too(tmp_path: Path) -> None:
    body = """
        import multiprocessing
        def work(number):
            for line in range(200):
                logging.getLogger("loader").info("worker %d line %d", number, line)
        workers = [multiprocessing.get_context("fork").Process(target=work, args=(n,)) for n in range(2)]
        for worker in workers: worker.start()
        for worker in workers: worker.join(20)
        assert [worker.exitcode for worker in workers] == [0, 0]
        plugin.on_run_end(plan=plan, error=None)
    """
    process = start(tmp_path, 0, 1, body)
    (console,) = consoles([process])
    assert process.returncode == 0, console
    RankZero().on_run_end(plan_of(tmp_path, 1), None)
    assert sum(" loader [rank 0] worker " in line for line in lines(tmp_path)) == 400
