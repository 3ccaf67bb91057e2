"""SIGTERM means "save and stop": one rank's signal becomes one decision of all ranks, at one step (P37).

A signal handler may not take part in a collective: it only sets a flag. The strategy puts the flag into the all-reduce
that each training step makes anyway and tells `agree` what all ranks learned; whoever saves (`recovery=restart`) reads
`agreed` at the end of the optimizer step. A rank on which nobody saves stops at once.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType

from framework.errors import PreemptedError, TerminatedError

log = logging.getLogger(__name__)

ONE_NOTICE_S = 0.5
"""Signals closer together are one notice: a scheduler signals all processes, and the launcher forwards its own."""


class StopRequested(PreemptedError):
    """Raised on all ranks at the same step, once they have saved; ends training."""


class _Notice:
    """What this process knows about being asked to stop; one instance, `_notice`."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.agreed = False
        self.savers = 0

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.at is not None:
            if now - self.at < ONE_NOTICE_S:
                return
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self.at = now
        if self.savers == 0:
            raise TerminatedError(
                "SIGTERM: stopped without saving, since nobody saves here or the first step wasn't reached."
            )


_notice = _Notice()


def install() -> None:
    """Take over SIGTERM; called first of all in a worker's main thread, and once more to forget an earlier run."""
    _notice.__init__()  # type: ignore[misc]
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _notice.on_sigterm)


def arm() -> None:
    """Promise to save at the next step's end once `agreed()`; until then SIGTERM waits. Undo with `disarm`."""
    _notice.savers += 1


def disarm() -> None:
    """Take back one `arm`."""
    _notice.savers -= 1


def requested() -> bool:
    """Return whether this rank was asked to stop; other ranks may not know yet."""
    return _notice.at is not None


def agree(stop: bool) -> None:
    """Note that all ranks know (if `stop`) that one of them was asked to stop; called at the same step on all ranks."""
    _notice.agreed |= stop


def agreed() -> bool:
    """Return whether all ranks know that they have to stop; the same on all ranks between two calls of `agree`."""
    return _notice.agreed
