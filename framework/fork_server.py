"""Imported last by the fork server, and by nobody else: how that process meets its end.

The server ends when the launcher and all ranks have gone. Taking torch apart would then cost it a second or more, which
serves nobody and keeps a process alive behind a run that is over. SIGTERM isn't for it: schedulers and `timeout` signal
the whole process group of the launcher, and without the server nobody would know how the ranks ended.
"""

from __future__ import annotations

import atexit
import os
import signal


def leave() -> None:
    """End the server; nothing in it needs a goodbye."""
    os._exit(0)


atexit.register(leave)
signal.signal(signal.SIGTERM, signal.SIG_IGN)


def become_rank() -> None:
    """Undo what is the server's alone; called in a process forked from it."""
    atexit.unregister(leave)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
