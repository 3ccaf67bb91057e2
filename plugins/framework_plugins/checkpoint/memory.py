"""The tier `memory`: checkpoints in this host's main memory, which survive a rank's death and cost no disk.

They are files like others, in a folder of the system's memory file system: the same layout, hashes and commit mark, so
whatever reads a checkpoint reads them. They are gone with the host, and when the run is done. A file in the run's own
folder says where they are, so a run never finds what another one of the same name has left.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from framework import checkpoint_files as files
from framework.checkpoint_files import CheckpointError

SYSTEM = Path("/dev/shm")
"""Linux's memory file system; half of the main memory, unless the administrator says otherwise."""
NOTE = "memory_id"
"""File in the run's folder with the random part of the name of its folder in memory."""
SIGN = "framework-keeper"
"""File in a memory file system with the random name of the keeper that serves it."""


def name_of(run_dir: str) -> str | None:
    """Return the random name under which a run keeps checkpoints in memory; None if it keeps none."""
    name = files.read_name(run_dir, NOTE)
    return name if name is not None and re.fullmatch(r"[0-9a-f]{32}", name) else None


def root(name: str, folder: Path | str | None) -> Path:
    """Return the folder in memory of the run of that name."""
    return (SYSTEM if folder is None else Path(folder)) / f"framework-{name}"


def root_of(run_dir: str, folder: str | None) -> Path | None:
    """Return where a run keeps its checkpoints in memory; None if it keeps none.

    Raises:
        CheckpointError: that folder belongs to somebody else.
    """
    name = name_of(run_dir)
    if name is None:
        return None
    found = root(name, folder)
    if found.is_dir() and found.stat().st_uid != os.getuid():
        raise CheckpointError(f"{found} belongs to somebody else, and checkpoints in memory are looked for there")
    return found


def make(run_dir: str, folder: str | None) -> Path:
    """Return where a run keeps its checkpoints in memory; make that folder, for this user alone. Called on rank 0."""
    found = root_of(run_dir, folder)
    if found is None:
        name = secrets.token_hex(16)
        files.write_name(run_dir, NOTE, name)
        found = root(name, folder)
    make_room(found)
    return found


def make_room(found: Path) -> None:
    """Make a folder for this user alone, if it isn't there."""
    found.mkdir(mode=0o700, parents=True, exist_ok=True)


def forget(found: Path) -> None:
    """Give the memory back that this host has spent on a run."""
    shutil.rmtree(found, ignore_errors=True)


def clear(run_dir: str, folder: str | None) -> None:
    """Give the memory back, and forget the name."""
    found = root_of(run_dir, folder)
    if found is not None:
        forget(found)
    (Path(run_dir) / NOTE).unlink(missing_ok=True)


def sign(folder: Path | str | None, make: bool = True) -> str:
    """Return the name of the keeper of a memory file system, the same at each call; "" if there is none to be made."""
    file = (SYSTEM if folder is None else Path(folder)) / SIGN
    if not file.is_file():
        if not make:
            return ""
        file.write_text(secrets.token_hex(16))
    return file.read_text().strip()
