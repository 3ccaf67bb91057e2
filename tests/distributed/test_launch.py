"""Starting ranks from a plan, and telling the cause when one fails (P01, P36, P38)."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
from launching import Launched, bare_plan, warm_up
from plans import option

from framework import processes
from framework.errors import PlanError
from framework.launch import launch
from framework.rank_env import stale_variables


@pytest.fixture(autouse=True, scope="module")
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    warm_up(tmp_path_factory.mktemp("warm"))


def test_every_rank_gets_the_plan_and_meets_the_others(tmp_path: Path) -> None:
    """Ranks are made from the plan alone; threads and seeds are the plan's."""
    plan = bare_plan(tmp_path, 3, threads=2, seed=5, env={"FROM_PLUGIN": "yes"}, ckpt_path="a b/epoch=1-step=2")
    result = launch(plan, "rank_entries:meet")
    assert (result.status, result.exit_code, result.error, result.restarts) == ("finished", 0, None, 0)
    ranks = result.results
    assert sorted(ranks) == [0, 1, 2]
    assert {rank["sum"] for rank in ranks.values()} == {3.0}
    assert {rank["run_id"] for rank in ranks.values()} == {plan.run_id}
    assert {rank["threads"] for rank in ranks.values()} == {2}
    assert len({rank["pid"] for rank in ranks.values()} | {os.getpid()}) == 4
    assert len({(rank["torch_random"], rank["python_random"]) for rank in ranks.values()}) == 1
    assert {rank["env"]["FROM_PLUGIN"] for rank in ranks.values()} == {"yes"}
    assert {rank["ckpt_path"] for rank in ranks.values()} == {"a b/epoch=1-step=2"}
    assert [ranks[r]["env"]["RANK"] for r in range(3)] == ["0", "1", "2"]
    assert result.summary == ranks[0]


def test_a_second_run_in_the_same_process_is_as_clean_as_the_first(tmp_path: Path) -> None:
    """Jobs of a sweep: other world sizes, no group, port or variable left over (P01)."""
    before = dict(os.environ)
    first = launch(bare_plan(tmp_path / "1", 2), "rank_entries:meet")
    second = launch(bare_plan(tmp_path / "2", 3), "rank_entries:meet")
    assert (first.results[0]["world"], second.results[0]["world"]) == (2, 3)
    assert first.results[0]["env"]["MASTER_PORT"] != second.results[0]["env"]["MASTER_PORT"]
    assert dict(os.environ) == before
    assert not stale_variables()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["raise", "raise_and_hang", "loader", "after_barrier", "setup"])
def test_a_raising_rank_is_the_headline(tmp_path: Path, how: str, rank: int) -> None:
    """P36: rank, text and traceback of the first failure, in the result and in a file; the others are ended."""
    more = {"probe": {"_target_": "rank_entries.FailsInSetup", "rank": rank}} if how == "setup" else {}
    plan = bare_plan(tmp_path, 2, more, facts={"how": how, "rank": rank})
    begin = time.monotonic()
    result = launch(plan, "rank_entries:meet" if how == "setup" else "rank_entries:fail")
    assert time.monotonic() - begin < 10
    assert (result.status, result.exit_code) == ("failed", 1)
    assert result.error is not None
    assert result.error.rank == rank
    first_line, *rest = result.describe().splitlines()
    assert first_line.startswith(f"Rank {rank} failed: ValueError: ")
    assert "boom7" in result.error.message
    assert any("Traceback" in line for line in rest)
    told = json.loads((tmp_path / "errors" / f"rank_{rank}.json").read_text())
    assert told["rank"] == rank
    assert "boom7" in told["message"]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("SIGKILL", "was killed by signal 9 (SIGKILL)"),
        ("SIGSEGV", "was killed by signal 11 (SIGSEGV)"),
        ("SIGABRT", "was killed by signal 6 (SIGABRT)"),
        ("exit", "exit code 3"),
        ("early_exit", "exit code 0"),
        ("system_exit", "SystemExit: 4"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_vanishes_is_the_headline(tmp_path: Path, how: str, text: str, rank: int) -> None:
    """A signal is told by number and name; the innocent rank's broken connection never comes first."""
    result = launch(bare_plan(tmp_path, 2, facts={"how": how, "rank": rank}), "rank_entries:fail")
    assert (result.status, result.exit_code) == ("failed", 1)
    assert result.describe().startswith(f"Rank {rank}")
    assert text in result.describe().splitlines()[0]
    assert json.loads((tmp_path / "errors" / f"rank_{rank}.json").read_text())["rank"] == rank


def test_a_result_that_does_not_pickle_is_a_failure(tmp_path: Path) -> None:
    """No result, no silence."""
    result = launch(bare_plan(tmp_path, 1), "rank_entries:unpicklable")
    assert result.status == "failed"
    assert "pickle" in result.describe()


def test_a_rank_that_finished_but_stays_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A left-over thread must not keep a finished run alive."""
    monkeypatch.setattr(processes, "EXIT_GRACE_S", 1.0)
    begin = time.monotonic()
    result = launch(bare_plan(tmp_path, 2), "rank_entries:never_exits")
    assert time.monotonic() - begin < 8
    assert result.status == "finished"
    assert result.results == {0: "done", 1: "done"}
    assert "Ranks 1 had finished" in caplog.text


def test_variables_left_over_in_the_shell_are_dropped_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """P38 d: RANK and WORLD_SIZE of another launcher."""
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "9")
    monkeypatch.setenv("MASTER_PORT", "1")
    with caplog.at_level(logging.WARNING):
        result = launch(bare_plan(tmp_path, 2), "rank_entries:meet")
    assert result.status == "finished"
    assert result.results[1]["env"]["RANK"] == "1"
    assert result.results[1]["env"]["WORLD_SIZE"] == "2"
    assert "RANK=7" in caplog.text
    assert "WORLD_SIZE=9" in caplog.text


@pytest.mark.parametrize("value", [-1.0, 0.0, float("inf"), float("nan"), 1e12])
def test_a_senseless_time_limit_is_refused(tmp_path: Path, value: float) -> None:
    """P43: before any process starts."""
    with pytest.raises(PlanError, match="timeout_s="):
        launch(bare_plan(tmp_path, 1, timeout_s=value), "rank_entries:meet")


def test_the_launcher_calls_its_hooks(tmp_path: Path) -> None:
    """on_worker_failure once an attempt, on_run_end once, with the error."""
    journal = tmp_path / "journal"
    more = {"probe": {"_target_": "rank_entries.Journal", "path": str(journal)}}
    launch(bare_plan(tmp_path, 2, more, facts={"how": "raise", "rank": 1}), "rank_entries:fail")
    assert journal.read_text().splitlines() == ["failure of rank 1 in attempt 0", "end: RunFailedError"]
    launch(bare_plan(tmp_path, 2, more), "rank_entries:meet")
    assert journal.read_text().splitlines()[2:] == ["end: NoneType"]


def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    """P38 a: each sees its own world and run id."""
    plans = [bare_plan(tmp_path / str(number), 2) for number in range(2)]
    with Launched(plans[0], "rank_entries:meet") as one, Launched(plans[1], "rank_entries:meet") as two:
        for launched, plan in zip((one, two), plans, strict=True):
            assert launched.wait() == 0, launched.output()
            told = json.loads(launched.output().splitlines()[-1])["results"]
            assert {(rank["world"], rank["run_id"]) for rank in told.values()} == {(2, plan.run_id)}
            launched.no_leftovers()


def test_spawn_does_the_same(tmp_path: Path) -> None:
    """`launcher=spawn`: results and causes are the same."""
    plan = bare_plan(tmp_path, 2, {"launcher": option("launcher", "spawn")}, facts={"how": "raise", "rank": 1})
    result = launch(plan, "rank_entries:fail")
    assert result.describe().startswith("Rank 1 failed: ValueError: boom7")
