"""SIGTERM means "save and stop": one rank's signal becomes one decision of all ranks, at one step (P37).

A signal handler may not take part in a collective: it only sets a flag. The strategy puts the flag into the all-reduce
that each training step makes anyway and tells `agree` what all ranks learned; whoever saves (`recovery=restart`) reads
`agreed` at the end of the optimizer step. A rank on which nobody saves keeps the system's default and ends at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from framework.errors import PreemptedError

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
        if self.at is None:
            self.at = now
        elif now - self.at >= ONE_NOTICE_S:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


_notice = _Notice()


def reset() -> None:
    """Forget what happened; from here to `arm` SIGTERM ends the process, wherever it waits."""
    global _notice  # noqa: PLW0603 - signals come to the process, not to an object
    _notice = _Notice()
    _handle(signal.SIG_DFL)


def arm() -> None:
    """Promise to save at the end of the first step at which `agreed()` holds; SIGTERM waits for it until `disarm`."""
    _notice.savers += 1
    _handle(_notice.on_sigterm)


def disarm() -> None:
    """Take back one `arm`."""
    _notice.savers -= 1
    if _notice.savers == 0:
        _handle(signal.SIG_DFL)


def requested() -> bool:
    """Return whether this rank was asked to stop; other ranks may not know yet."""
    return _notice.at is not None


def agree(stop: bool) -> None:
    """Note that all ranks know (if `stop`) that one of them was asked to stop; called at the same step on all ranks."""
    _notice.agreed |= stop


def agreed() -> bool:
    """Return whether all ranks know that they have to stop; the same on all ranks between two calls of `agree`."""
    return _notice.agreed


def _handle(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Set what SIGTERM does; Python allows it in the main thread only, and elsewhere there is nothing to protect."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
