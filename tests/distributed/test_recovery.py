"""`recovery=restart` over processes: from where, how often, and when not (P39)."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from launching import bare_plan, warm_up
from plans import option

from framework.errors import UsageError
from framework.launch import RunResult, launch
from framework.plan import RunPlan


@pytest.fixture(autouse=True, scope="module")
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    warm_up(tmp_path_factory.mktemp("warm"))


def plan_of(tmp_path: Path, facts: dict[str, Any], max_restarts: int = 3, **fields: Any) -> RunPlan:
    more = {
        "recovery": option("recovery", "restart", max_restarts=max_restarts),
        "checkpoint": {"_target_": "rank_entries.StepFiles"},
    }
    return bare_plan(tmp_path, 2, more, facts={"steps": 10, "every": 2, **facts}, **fields)


def run(tmp_path: Path, facts: dict[str, Any], **fields: Any) -> RunResult:
    return launch(plan_of(tmp_path, facts, **fields), "rank_entries:steps")


def test_a_restart_goes_on_from_the_newest_checkpoint_of_this_run(tmp_path: Path, caplog: Any) -> None:
    """P39: ckpt_path counts for the first attempt only; one line says which file and why."""
    warm_start = tmp_path / "A"
    warm_start.write_text("2")
    result = run(tmp_path / "run", {"kill_at": [[0, 1, 7]]}, ckpt_path=str(warm_start))
    assert (result.status, result.restarts, result.exit_code) == ("finished", 1, 0)
    assert result.results[0] == result.results[1]
    assert result.results[0]["first"] == 6
    assert result.results[0]["steps"] == [7, 8, 9, 10]
    assert result.resumed_from == str(tmp_path / "run" / "checkpoints" / "step_6")
    lines = [record.message for record in caplog.records if "Restart 1" in record.message]
    assert len(lines) == 1
    assert "step_6 (step 6, tier disk, found in " in lines[0]
    assert "the newest complete checkpoint of this run" in lines[0]
    assert "rank 1 was killed by signal 9 (SIGKILL)" in lines[0].replace("Rank 1", "rank 1")


def test_before_the_first_checkpoint_a_restart_begins_where_the_run_began(tmp_path: Path, caplog: Any) -> None:
    """From the user's file if there is one, else from the start."""
    warm_start = tmp_path / "A"
    warm_start.write_text("4")
    result = run(tmp_path / "1", {"kill_at": [[0, 0, 5]]}, ckpt_path=str(warm_start))
    assert result.results[0]["first"] == 4
    assert "given as ckpt_path" in caplog.text
    result = run(tmp_path / "2", {"kill_at": [[0, 0, 1]]})
    assert result.results[0]["first"] == 0
    assert "no complete checkpoint yet" in caplog.text


def test_one_kill_more_than_allowed_is_a_clear_end(tmp_path: Path) -> None:
    """The bound counts restarts of the whole run, whatever their progress."""
    kills = [[attempt, attempt % 2, 3 + 2 * attempt] for attempt in range(4)]
    assert run(tmp_path / "1", {"kill_at": kills[:3]}).status == "finished"
    result = run(tmp_path / "2", {"kill_at": kills})
    assert (result.status, result.exit_code, result.restarts) == ("failed", 1, 3)
    assert result.describe().startswith("Rank 1 was killed by signal 9 (SIGKILL)")
    assert "recovery.max_restarts=3 is used up" in result.describe()


def test_no_restart_without_recovery_or_with_zero(tmp_path: Path) -> None:
    """`recovery=none`, `recovery.max_restarts=0`."""
    result = launch(bare_plan(tmp_path / "1", 2, facts={"steps": 3, "kill_at": [[0, 1, 2]]}), "rank_entries:steps")
    assert (result.status, result.restarts) == ("failed", 0)
    assert "no recovery is chosen" in result.describe()
    assert run(tmp_path / "2", {"kill_at": [[0, 1, 2]]}, max_restarts=0).restarts == 0


def test_an_error_that_repeats_itself_is_tried_once_more_only(tmp_path: Path) -> None:
    """The same exception without any progress in between; a passing one is survived."""
    result = run(tmp_path / "1", {"always_raise": 1})
    assert (result.status, result.restarts) == ("failed", 1)
    assert "the same error came twice" in result.describe()
    result = run(tmp_path / "2", {"raise_at": [[0, 1, 3], [1, 1, 5], [2, 1, 7]]})
    assert (result.status, result.restarts) == ("finished", 3)


def test_last_means_the_newest_checkpoint_of_the_run_dir(tmp_path: Path) -> None:
    """And is refused before any process starts if there is none."""
    with pytest.raises(UsageError, match="no complete checkpoint"):
        run(tmp_path, {}, ckpt_path="last")
    run(tmp_path, {"steps": 4})
    assert run(tmp_path, {"steps": 6}, ckpt_path="last").results[0]["steps"] == [5, 6]


def test_kills_at_random_moments_are_survived(tmp_path: Path) -> None:
    """A seeded sample: rank, step and number of kills; every step from the last checkpoint on is made again."""
    chance = random.Random(7)
    for number in range(4):
        kills = [[attempt, chance.randrange(2), chance.randint(1, 10)] for attempt in range(chance.randint(1, 3))]
        result = run(tmp_path / str(number), {"kill_at": kills})
        assert result.status == "finished", kills
        assert result.results[0]["steps"][-1] == 10
        assert result.results[0]["first"] % 2 == 0


def test_from_kill_to_the_next_step_takes_little_time(tmp_path: Path) -> None:
    """Well under the 6 s of the whole stack on an idle machine; generous here, since tests share the machine."""
    plan = plan_of(tmp_path, {"kill_at": [[0, 1, 7]]})
    begin = time.monotonic()
    assert launch(plan, "rank_entries:steps").restarts == 1
    assert time.monotonic() - begin < 15
