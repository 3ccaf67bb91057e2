"""Versions of a run's state: a vector clock in every checkpoint, so that states of different moments are never mixed.

A clock has an entry a data-parallel group: how many optimizer steps it has done. Groups that step together have equal
entries, and a save in which they differ is refused. A run that is started again may go back to an older checkpoint and
make the same steps once more; so a clock also counts the lives of the run, and a later life is newer whatever its
steps. After C. J. Fidge, "Timestamps in Message-Passing Systems That Preserve the Partial Ordering" (1988).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.checkpoint_files import CheckpointError, folder_of, marks, write_bytes

LIVES = "lives"
"""File in a run's folder: how often the run was started, by commands and restarts."""


class VersionError(CheckpointError):
    """States of different versions met; the message names rank, group and step."""


@dataclass(frozen=True)
class Clock:
    """When a state was.

    Attributes:
        life: of the run, from 1.
        steps: optimizer steps done in this run's history, an entry a data-parallel group.
    """

    life: int
    steps: tuple[int, ...]

    def before(self, other: Clock) -> bool:
        """Whether this state is older than `other`: of an earlier life, or no group is further and one is less far."""
        if self.life != other.life:
            return self.life < other.life
        if len(self.steps) != len(other.steps):
            return max(self.steps) < max(other.steps)
        return self != other and all(mine <= yours for mine, yours in zip(self.steps, other.steps, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"life": self.life, "steps": list(self.steps)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Clock:
        """Inverse of `to_dict`; raises KeyError, TypeError or ValueError for anything else."""
        return cls(int(data["life"]), tuple(int(step) for step in data["steps"]))

    def __str__(self) -> str:
        steps = sorted(set(self.steps))
        return f"step {' to '.join(map(str, (steps[0], steps[-1])[: len(steps)]))}, life {self.life}"


def next_life(run_dir: str | Path) -> int:
    """Return which of its lives a run that starts once more begins, from 1. No state may carry it before `begin`."""
    file = Path(run_dir) / LIVES
    text = file.read_text().strip() if file.is_file() else ""
    known = [mark.life for mark in marks(folder_of(run_dir))[0]]  # the file may be lost, or of a copied folder
    return 1 + max(int(text) if text.isdecimal() else 0, *known, 0)


def begin(run_dir: str | Path, life: int) -> None:
    """Note on disk that a life of a run begins, so that no later one gets its number. Called on rank 0.

    Raises:
        VersionError: a life of this number or a later one has begun since `next_life` was asked.
        OSError: it can't be written.
    """
    latest = next_life(run_dir) - 1
    if latest >= life:
        raise VersionError(f"{run_dir} was started again (life {latest}) since this life ({life}) began")
    file = Path(run_dir) / LIVES
    file.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(file, f"{life}\n".encode())


def check_same(what: str, clocks: Sequence[Mapping[str, Any] | None]) -> None:
    """Raise VersionError if the ranks (by rank) are about to read states of different versions."""
    told = ["no clock" if clock is None else str(Clock.from_dict(clock)) for clock in clocks]
    usual = max(set(told), key=told.count)
    other = [f"rank {rank} reads {one}" for rank, one in enumerate(told) if one != usual]
    if other:
        raise VersionError(f"{what} failed: {'; '.join(other[:4])}, the others {usual}: hosts must see the same files")


def joined(what: str, life: int, groups: Sequence[int], steps: Sequence[int]) -> Clock:
    """Return the clock of a state that all ranks hold together.

    Args:
        what: the beginning of the message, "Saving step-000004".
        life: of the run.
        groups: data-parallel group of each rank.
        steps: optimizer steps that each rank has done.

    Raises:
        VersionError: ranks have done different numbers of steps.
    """
    if len(set(steps)) > 1:
        usual = max(set(steps), key=steps.count)
        other = [rank for rank, step in enumerate(steps) if step != usual]
        told = "; ".join(f"rank {rank} (data group {groups[rank]}) is at step {steps[rank]}" for rank in other[:4])
        raise VersionError(
            f"{what} failed: states of different versions aren't mixed: {told}, the others at step {usual}"
        )
    return Clock(life, tuple(steps[0] for _ in sorted(set(groups))))
