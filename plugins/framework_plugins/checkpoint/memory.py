"""The tier `memory`: checkpoints in this host's main memory, which survive a rank's death and cost no disk.

They are files like others, in a folder of the system's memory file system: the same layout, hashes and commit mark, so
whatever reads a checkpoint reads them. They are gone with the host, and when the run is done.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from framework import checkpoint_files as files
from framework.checkpoint_files import CheckpointError
from framework.plan import Checkpoint

SYSTEM = Path("/dev/shm")
"""Linux's memory file system; half of the main memory, unless the administrator says otherwise."""


def root_of(run_dir: str, folder: str | None) -> Path:
    """Return where a run keeps its checkpoints in memory: by its folder's name, so that a restart finds them."""
    name = hashlib.sha256(str(Path(run_dir).resolve()).encode()).hexdigest()[:16]
    return (SYSTEM if folder is None else Path(folder)) / f"framework-{name}"


def newest(run_dir: str, folder: str | None) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run, in memory or on disk.

    Raises:
        CheckpointError: there are checkpoints, and none is complete.
    """
    complaint: CheckpointError | None = None
    found: list[Checkpoint] = []
    for tier, root in (("memory", root_of(run_dir, folder)), ("disk", Path(run_dir))):
        try:
            one = files.newest_complete(root)
        except CheckpointError as error:
            complaint = error
        else:
            found += [] if one is None else [Checkpoint(one.path, one.step, tier, one.saved)]
    if not found and complaint is not None:
        raise complaint
    return max(found, key=lambda one: one.saved, default=None)


def clear(run_dir: str, folder: str | None) -> None:
    """Give the memory back."""
    shutil.rmtree(root_of(run_dir, folder), ignore_errors=True)
