"""Calls of ranks from several threads: results in order, each call with ranks of its own, an end that doesn't wait."""

from __future__ import annotations

import os
import time

import pytest

from framework.testing import RanksError
from framework.verify.pools import Pools


def slowly(number: int, seconds: float) -> tuple[int, int]:
    time.sleep(seconds)
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number, os.getpid()


def test_results_come_in_order_and_calls_run_at_once() -> None:
    with Pools() as pools:
        list(pools.side_by_side(2, lambda n: pools.run(slowly, 1, n, 0.2), [0, 0]))  # processes start
        began = time.monotonic()
        found = list(pools.side_by_side(2, lambda n: pools.run(slowly, 1, n, 3.0 - n)[0], range(2)))
        assert time.monotonic() - began < 4.5  # 5 s one after the other
    assert [number for number, _ in found] == [0, 1]
    assert len({pid for _, pid in found}) == 2


def test_a_failure_ends_what_nobody_waits_for() -> None:
    with Pools() as pools:
        began = time.monotonic()
        with pytest.raises(RanksError, match="-1 is negative"):
            list(pools.side_by_side(2, lambda n: pools.run(slowly, 1, n, 50.0 if n > 0 else 0.0), [-1, 60, 61]))
        assert time.monotonic() - began < 30
