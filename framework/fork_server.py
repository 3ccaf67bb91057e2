"""Imported last by the fork server, and by nobody else: what makes that process leave quickly.

The server ends when the launcher and all ranks have gone. Taking torch apart would then cost it a second or more, which
serves nobody and keeps a process alive behind a run that is over.
"""

from __future__ import annotations

import atexit
import os


def leave() -> None:
    """End the server; nothing in it needs a goodbye."""
    os._exit(0)


atexit.register(leave)


def become_rank() -> None:
    """Undo what is the server's alone; called in a process forked from it."""
    atexit.unregister(leave)
