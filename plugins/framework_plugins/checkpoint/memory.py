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
from framework.plan import Checkpoint

SYSTEM = Path("/dev/shm")
"""Linux's memory file system; half of the main memory, unless the administrator says otherwise."""
NOTE = "memory_id"
"""File in the run's folder with the random part of the name of its folder in memory."""


def root_of(run_dir: str, folder: str | None) -> Path | None:
    """Return where a run keeps its checkpoints in memory; None if it keeps none."""
    note = Path(run_dir) / NOTE
    name = note.read_text().strip() if note.is_file() else ""
    return _root(name, folder) if re.fullmatch(r"[0-9a-f]{32}", name) else None


def make(run_dir: str, folder: str | None) -> Path:
    """Return where a run keeps its checkpoints in memory; make that folder, for this user alone. Called on rank 0."""
    root = root_of(run_dir, folder)
    if root is None:
        name = secrets.token_hex(16)
        (Path(run_dir) / NOTE).write_text(name)
        root = _root(name, folder)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return root


def _root(name: str, folder: str | None) -> Path:
    return (SYSTEM if folder is None else Path(folder)) / f"framework-{name}"


def newest(run_dir: str, folder: str | None) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run, in memory or on disk.

    Raises:
        CheckpointError: there are checkpoints, and none is complete; or those in memory are somebody else's.
    """
    complaint: CheckpointError | None = None
    found: list[Checkpoint] = []
    in_memory = root_of(run_dir, folder)
    if in_memory is not None and in_memory.is_dir() and in_memory.stat().st_uid != os.getuid():
        raise CheckpointError(f"{in_memory} belongs to somebody else, and checkpoints in memory are looked for there")
    for tier, root in (("memory", in_memory), ("disk", Path(run_dir))):
        try:
            one = None if root is None else files.newest_complete(root)
        except CheckpointError as error:
            complaint = error
        else:
            found += [] if one is None else [Checkpoint(one.path, one.step, tier, one.saved)]
    if not found and complaint is not None:
        raise complaint
    return max(found, key=lambda one: one.saved, default=None)


def clear(run_dir: str, folder: str | None) -> None:
    """Give the memory back."""
    root = root_of(run_dir, folder)
    if root is not None:
        shutil.rmtree(root, ignore_errors=True)
    (Path(run_dir) / NOTE).unlink(missing_ok=True)
