"""`Pace`: whether saves are waited for or written beside the steps, by what they cost (`checkpoint.mode=auto`)."""

from __future__ import annotations

import logging
import time
from collections import deque
from statistics import median

from framework_plugins.checkpoint.store import Took

log = logging.getLogger(__name__)

CHEAP_S = 0.25
"""A save that takes no longer is waited for: a kill just after it finds it complete."""


class Pace:
    """What saves cost: chooses between waiting for them and writing beside the steps (`checkpoint.mode=auto`).

    A save that is waited for costs what it takes. One beside the steps costs the copying, and what the steps beside it
    take longer than others: it competes with them for cores, memory and the interpreter.

    Attributes:
        background: what the next save should be.
    """

    def __init__(self) -> None:
        self.background = False
        self._alone: deque[float] = deque(maxlen=50)
        self._beside: list[float] = []
        self._last: float | None = None
        self._noted: Took | None = None
        self._waiting_s: float | None = None

    def step(self, saving: bool) -> None:
        """A batch has ended; `saving` = a save is in flight."""
        now = time.perf_counter()
        if self._last is not None:
            (self._beside.append if saving else self._alone.append)(now - self._last)
        self._last = now

    def begin(self) -> None:
        """A save begins: the time until the next batch's end isn't a step's."""
        self._last = None

    def end(self, took: Took, background: bool) -> None:
        """A save is complete: compare; called again for the same one it does nothing."""
        if took is self._noted:
            return
        self._noted = took
        usual = median(self._alone) if self._alone else 0.0
        lost = sum(max(0.0, step - usual) for step in self._beside)
        steps, self._beside = len(self._beside), []
        if not background:
            if self._waiting_s is None and took.complete_s > CHEAP_S:
                self.background = True  # the next one is tried beside the steps
            self._waiting_s = took.complete_s
            return
        cost = took.waited_s - took.held_s + lost  # what held a step is in what the steps lost
        if steps:
            log.info("%s: %d steps beside it lost %.2f s.", took.path.name, steps, lost)
        if self._waiting_s is not None and cost > self._waiting_s and steps:
            self.background = False
            log.info(
                "Saving beside the steps costs %.2f s, waiting %.2f s: saves are waited for.", cost, self._waiting_s
            )
