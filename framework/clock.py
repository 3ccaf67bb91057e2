"""`Clock`: the two axes of every curve, handed to loggers so that all of them agree."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


class Clock:
    """Where a run stands. Kept by `framework.report.Report`; loggers only read it.

    Attributes:
        step: optimizer steps done, over all restarts; independent of accumulation.
        samples: samples consumed by all ranks together, over all restarts.
        start_step: `step` at which this attempt began (0, or that of the checkpoint it resumed from).
    """

    def __init__(self) -> None:
        self.step = 0
        self.samples = 0
        self.start_step = 0


@runtime_checkable
class Clocked(Protocol):
    """A logger that wants the clock: it has an attribute `clock`, which the Trainer sets before the first step."""

    clock: Clock | None
