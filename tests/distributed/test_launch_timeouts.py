"""One time limit for all process groups, and ranks of other runs kept out (P38, P43)."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from launching import bare_plan, warm_up

from framework import process_groups
from framework.errors import RunFailedError
from framework.launch import launch


@pytest.fixture(autouse=True, scope="module")
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    warm_up(tmp_path_factory.mktemp("warm"))


def test_every_group_has_the_plans_time_limit(tmp_path: Path) -> None:
    """P43: the world, the dimensions of a mesh (of size 1 too), flattened ones, and a user's own group."""
    result = launch(bare_plan(tmp_path, 2, timeout_s=15.0), "rank_entries:group_timeouts")
    for limits in result.results.values():
        assert set(limits.values()) == {15.0}, limits
        named = " ".join(limits)
        assert all(part in named for part in ("default_pg", "mesh_dp", "own", "alone")), named


@pytest.mark.parametrize("group", ["mesh", "new_group"])
def test_a_hang_in_a_sub_group_ends_at_the_limit(tmp_path: Path, group: str) -> None:
    """P43: the run ends soon after the limit, not after torch's half hour."""
    begin = time.monotonic()
    result = launch(bare_plan(tmp_path, 2, timeout_s=3.0, facts={"group": group}), "rank_entries:hang_in_mesh")
    assert 3.0 <= time.monotonic() - begin < 18.0
    assert result.error is not None
    assert result.error.rank == 0
    assert "Timed out" in result.error.message


def test_the_limits_are_logged(tmp_path: Path, caplog: Any) -> None:
    """One line, shortest first."""
    store = dist.HashStore()
    process_groups.use_timeout(timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=20))
    try:
        dist.new_group([0], timeout=timedelta(seconds=5), group_desc="saving")
        with caplog.at_level("INFO"):
            process_groups.log_timeouts()
    finally:
        dist.destroy_process_group()
        process_groups.use_timeout(timedelta(minutes=30))
    (line,) = [record.message for record in caplog.records if "Time limits" in record.message]
    assert line.index("saving") < line.index("default_pg")
    assert "5 s" in line
    assert "20 s" in line


def test_a_rank_of_another_run_is_refused(tmp_path: Path) -> None:
    """P38: a stale port leads to an error that names both runs."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set(process_groups.RUN_KEY, "theirs")
    with pytest.raises(RunFailedError, match=r"(?s)ours.*theirs"):
        process_groups.connect(bare_plan(tmp_path, 1).with_(run_id="ours"), 0, 0, server.port)
    assert not dist.is_initialized()
