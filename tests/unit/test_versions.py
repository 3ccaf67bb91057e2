"""Vector clocks: which of two states is older, and which aren't mixed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from framework import checkpoint_files as files
from framework import versions
from framework.versions import Clock, VersionError
from framework_plugins.checkpoint.store import ShardedStore


@pytest.mark.parametrize(
    ("one", "other", "older"),
    [
        (Clock(1, (4, 4)), Clock(1, (5, 5)), True),
        (Clock(1, (4, 4)), Clock(1, (4, 4)), False),
        (Clock(1, (4, 5)), Clock(1, (5, 5)), True),
        (Clock(1, (4, 6)), Clock(1, (5, 5)), False),  # neither is: they were made apart
        (Clock(1, (5, 5)), Clock(1, (4, 6)), False),
        (Clock(1, (9, 9)), Clock(2, (4, 4)), True),  # a life that went back
        (Clock(2, (4, 4)), Clock(1, (9, 9)), False),
        (Clock(1, (4,)), Clock(1, (5, 5)), True),  # resized within a life: by an adaptation
    ],
)
def test_which_is_older(one: Clock, other: Clock, older: bool) -> None:
    assert one.before(other) is older


def test_a_clock_travels_as_plain_data() -> None:
    clock = Clock(3, (7, 7))
    assert Clock.from_dict(clock.to_dict()) == clock
    assert str(clock) == "step 7, life 3"
    assert str(Clock(1, (4, 6))) == "step 4 to 6, life 1"


def test_ranks_at_different_steps_are_named() -> None:
    assert versions.joined("Saving x", 2, [0, 0, 1, 1], [5, 5, 5, 5]) == Clock(2, (5, 5))
    with pytest.raises(VersionError, match=r"rank 3 \(data group 1\) is at step 4, the others at step 5"):
        versions.joined("Saving x", 2, [0, 0, 1, 1], [5, 5, 5, 4])


def test_ranks_that_read_different_versions_are_named() -> None:
    clock = Clock(1, (5,)).to_dict()
    versions.check_same("Loading x", [clock, clock])
    versions.check_same("Loading x", [None, None])  # before there were clocks
    with pytest.raises(VersionError, match="rank 1 reads step 4, life 1, the others step 5, life 1"):
        versions.check_same("Loading x", [clock, Clock(1, (4,)).to_dict(), clock])


def start(run: Path) -> int:
    life = versions.next_life(run)
    versions.begin(run, life)
    return life


def test_lives_are_counted(tmp_path: Path) -> None:
    assert [start(tmp_path) for _ in range(3)] == [1, 2, 3]
    (tmp_path / versions.LIVES).write_text("nonsense")
    assert start(tmp_path) == 1
    path = files.folder_of(tmp_path) / files.step_name(2)
    ShardedStore().save(str(path), {"model.a": torch.ones(1)}, {"step": 2, "clock": Clock(7, (2,)).to_dict()})
    assert start(tmp_path) == 8, "no life may seem older than what it finds"


def test_a_life_that_could_not_be_noted_is_none_once_another_has_begun(tmp_path: Path) -> None:
    late = versions.next_life(tmp_path)
    assert start(tmp_path) == late
    with pytest.raises(VersionError, match=r"was started again \(life 1\) since this life \(1\) began"):
        versions.begin(tmp_path, late)
    assert versions.next_life(tmp_path) == 2
