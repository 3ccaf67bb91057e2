"""`launcher=torchrun`: every rank composes, rank 0's plan counts, restarts are torchrun's (P36, P38)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launching import HERE, Launched, bare_plan
from plans import option

from framework.plan import RunPlan

START_UP_S = 150.0


def torchrun(ranks: int, *more: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *more]


def plan_of(tmp_path: Path, ranks: int = 2, **fields: Any) -> RunPlan:
    more = {"launcher": option("launcher", "torchrun"), "checkpoint": {"_target_": "rank_entries.StepFiles"}}
    return bare_plan(tmp_path, ranks, more, **fields)


def test_ranks_of_torchrun_meet_and_train(tmp_path: Path) -> None:
    """Two ranks, one world; nothing is started by us."""
    with Launched(plan_of(tmp_path), "rank_entries:meet", prefix=torchrun(2)) as launched:
        assert launched.wait(START_UP_S) == 0, launched.output()
        lines = [json.loads(line) for line in launched.output().splitlines() if line.startswith("{")]
        told = {rank: value for line in lines for rank, value in line["results"].items()}
        assert {(value["world"], value["sum"]) for value in told.values()} == {(2, 1.0)}
        assert sorted(told) == ["0", "1"]
        launched.no_leftovers()


def test_another_world_size_than_the_plans_is_refused(tmp_path: Path) -> None:
    """P38 c: both numbers named, before anybody connects."""
    with Launched(plan_of(tmp_path, ranks=1), "rank_entries:meet", prefix=torchrun(2)) as launched:
        assert launched.wait(START_UP_S) != 0
        assert "torchrun has started 2 ranks, but the plan has 1" in launched.output()


def test_a_raising_rank_is_named_and_the_others_end(tmp_path: Path) -> None:
    """P36 under torchrun: text, rank and error file, though rank 1 isn't the one that prints."""
    plan = plan_of(tmp_path, facts={"how": "raise", "rank": 1})
    with Launched(plan, "rank_entries:fail", prefix=torchrun(2)) as launched:
        assert launched.wait(START_UP_S) == 1
        assert "Rank 1 failed: ValueError: boom7" in launched.output()
        assert "boom7" in json.loads((tmp_path / "errors" / "rank_1.json").read_text())["message"]
        launched.no_leftovers()


def test_a_restart_by_torchrun_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    """`--max-restarts` restarts; where from is ours to say."""
    plan = plan_of(tmp_path, facts={"steps": 6, "every": 2, "raise_at": [[0, 1, 5]]})
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Launched(plan, "rank_entries:steps", own_store, torchrun(2, "--max-restarts=1")) as launched:
        assert launched.wait(START_UP_S) == 0, launched.output()
        assert [entry["step"] for entry in launched.steps(0) if entry["attempt"] == 1] == [5, 6]
        assert launched.output().count("Restart 1 begins from") == 1
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in launched.output(), "it is set, so nothing is to be said"


def test_ranks_with_different_settings_are_refused_together(tmp_path: Path) -> None:
    """Hosts whose command lines differ: every rank says which setting; nobody is left waiting."""
    plan = plan_of(tmp_path)
    (tmp_path / "plan.json.rank_1").write_text(json.dumps(plan.with_(seed=5).to_dict()))
    with Launched(plan, "rank_entries:meet", prefix=torchrun(2)) as launched:
        assert launched.wait(START_UP_S) == 1
        told = "Rank 1 was given other settings than rank 0 (seed: 5 and 0)"
        assert launched.output().count(told) >= 1
        assert "Connection closed" not in launched.output()
        launched.no_leftovers()


def attempt(plan: RunPlan, counts: Sequence[int]) -> list[int]:
    """Start a rank for each count, as torchrun's process on each of several hosts would; return their exit codes."""
    from framework import process_groups

    file = Path(plan.run_dir) / "plan.json"
    file.write_text(json.dumps(plan.to_dict()))
    meeting = {
        "WORLD_SIZE": str(len(counts)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(process_groups.lasting_port()), "TORCHELASTIC_RUN_ID": "job", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    started = []
    with (Path(plan.run_dir) / "out.txt").open("a") as out:
        for rank, count in enumerate(counts):
            own = {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(count)}
            words = [sys.executable, str(HERE / "launch_driver.py"), str(file), "rank_entries:steps"]
            environ = {**os.environ, **meeting, **own}
            started.append(subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environ))
    return [process.wait(START_UP_S) for process in started]


def noted(plan: RunPlan, rank: int) -> list[tuple[int, int]]:
    lines = (Path(plan.run_dir) / f"steps_{rank}.jsonl").read_text().splitlines()
    return [(entry["attempt"], entry["step"]) for entry in map(json.loads, lines)]


def test_hosts_that_know_of_fewer_restarts_follow_the_others(tmp_path: Path) -> None:
    """Torchrun counts on each host for itself, and doesn't count a restart because a host came."""
    plan = plan_of(tmp_path, facts={"steps": 6, "every": 2, "raise_at": [[n, r, 5] for n in (0, 1) for r in (0, 1)]})
    assert attempt(plan, (0, 0)) == [1, 1]
    assert attempt(plan, (0, 0)) == [1, 1], "not counted at all"
    (tmp_path / "torchrun.json").unlink()  # the counts alone tell
    assert attempt(plan, (2, 0)) == [0, 0], (tmp_path / "out.txt").read_text()
    for rank in (0, 1):
        assert noted(plan, rank) == [*((0, step) for step in (1, 2, 3, 4)), (2, 5), (2, 6)]
