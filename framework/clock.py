"""`Clock`: the two axes of every curve, handed to loggers so that all of them agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable


class Clock:
    """Where a run stands. Kept by `framework.report.Report`; loggers only read it.

    Attributes:
        step: optimizer steps done, over all restarts; independent of accumulation.
        start_step: `step` at which this attempt began (0, or that of the checkpoint it resumed from).
    """

    def __init__(self, count_samples: Callable[[], int] = int) -> None:
        self.step = 0
        self.start_step = 0
        self.count_samples = count_samples  # default: 0, by a function that pickles into spawned ranks

    @property
    def samples(self) -> int:
        """Samples consumed by all ranks together, over all epochs and restarts; worked out when asked."""
        return self.count_samples()


@runtime_checkable
class Clocked(Protocol):
    """A logger that wants the clock: it has an attribute `clock`, which the Trainer sets before the first step."""

    clock: Clock | None
