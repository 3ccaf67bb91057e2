"""Calls of ranks from several threads: results in order, at once, each with its own ranks; an end that doesn't wait."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from framework.testing import RanksError
from framework.verify.pools import Pools

START_UP_S = 100.0
"""Two sets of processes start meanwhile, perhaps on a busy machine."""


def meet(folder: str, number: int) -> tuple[int, int]:
    """Wait for the other call; the one of number 0 ends last."""
    (Path(folder) / str(number)).touch()
    end = time.monotonic() + START_UP_S
    while not (Path(folder) / str(1 - number)).exists():
        assert time.monotonic() < end, "the other call doesn't begin"
        time.sleep(0.01)
    time.sleep(0.0 if number else 0.5)
    return number, os.getpid()


def wait_or_fail(seconds: float) -> None:
    """Fail at once for a negative time."""
    if seconds < 0:
        raise ValueError(f"{seconds} is negative")
    time.sleep(seconds)


def test_calls_run_at_once_and_results_come_in_order(tmp_path: Path) -> None:
    def call(number: int) -> tuple[int, int]:
        (found,) = pools.run(meet, 1, str(tmp_path), number, timeout=2 * START_UP_S)
        return found

    with Pools() as pools:
        found = list(pools.side_by_side(2, call, range(2)))
    assert [number for number, _ in found] == [0, 1]
    assert len({pid for _, pid in found}) == 2


def test_a_failure_ends_what_nobody_waits_for() -> None:
    """A call that would take ten minutes is under way, and one more would follow."""
    began = time.monotonic()
    with Pools() as pools, pytest.raises(RanksError, match="-1 is negative"):
        list(pools.side_by_side(2, lambda n: pools.run(wait_or_fail, 1, n, timeout=900.0), [-1, 600, 600]))
    assert time.monotonic() - began < 200
