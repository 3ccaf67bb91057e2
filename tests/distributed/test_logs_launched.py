"""Logs under the real launcher: what the user sees, and what is kept when a rank is killed and started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launching import Launched, bare_plan
from plans import option


def run(run_dir: Path, **facts: Any) -> tuple[str, list[str]]:
    """Return what the console showed, and global.log without its times."""
    components = {"logs": option("logs", "rank_zero"), "recovery": option("recovery", "restart")}
    with Launched(bare_plan(run_dir, 2, components, facts=facts), "log_entries:chatter") as launched:
        assert launched.process.wait(timeout=100) == 0, (run_dir / "out.txt").read_text()
    lines = (run_dir / "global.log").read_text().splitlines()
    return (run_dir / "out.txt").read_text(), [line.partition(" ")[2] for line in lines]


def test_p02_one_line_for_all_ranks(tmp_path: Path) -> None:
    console, merged = run(tmp_path)
    assert console.count("hello") == 1
    assert console.count("rank-one-only") == 1
    assert "ERROR [rank 1] user: rank-one-only" in console
    assert "\x1b" not in console
    assert merged.count("INFO user [ranks 0-1] hello") == 1
    assert merged.count("ERROR user [rank 1] rank-one-only") == 1
    assert (tmp_path / "logs" / "rank_1.log").exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_and_the_second_attempt(tmp_path: Path, victim: int) -> None:
    console, merged = run(tmp_path, victim=victim)
    assert merged.count("INFO user [ranks 0-1] hello") == 2, "once an attempt"
    last, ended = f"WARNING user [rank {victim}] last words", "ERROR framework.launch [launcher] attempt 0 ended:"
    assert merged.count(last) == 1
    (why,) = [line for line in merged if line.startswith(ended)]
    assert f"rank {victim} was killed by signal 9 (SIGKILL)" in why
    assert merged.index(last) < merged.index(why) < merged.index("INFO user [ranks 0-1] bye")
    assert console.count("last words") == 1, console
    assert console.count("rank-one-only") == 2, console
