"""One run at a time writes into a folder: a second one would replace its checkpoints and mix its records."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from framework.errors import UsageError

log = logging.getLogger(__name__)


_held: dict[Path, int] = {}
"""Folders that this process holds -> their descriptors."""


def _let_go() -> None:
    """In a forked child: don't hold on to what is its parent's, whose end must free it."""
    for folder in _held.values():
        os.close(folder)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def alone_in(run_dir: str) -> Generator[None, None, None]:
    """Hold the folder `run_dir`; the system lets go of it when this process ends, however it ends.

    Nothing is written for it. Where the file system has no such locks (some network file systems), nobody is kept out.
    A process may hold a folder twice; its children never do.

    Raises:
        UsageError: another run holds it.
    """
    path = Path(run_dir).resolve()
    if path in _held:
        yield
        return
    folder = _held[path] = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise UsageError(
                    f"run_dir={run_dir}: another run is writing there. Wait for its end, or type "
                    "run_dir=<another folder>."
                ) from None
            log.info("%s can't be locked (%s): a second run in it wouldn't be noticed.", run_dir, error)
        yield
    finally:
        if _held.pop(path, None) is not None:  # else this is a child
            os.close(folder)
