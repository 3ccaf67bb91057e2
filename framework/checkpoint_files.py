"""How checkpoints lie on disk, and which of them may be trusted; imports no torch, so that the launcher can ask too.

A run's checkpoints are directories `run_dir/checkpoints/step-000012`, each with::

    rank-00000.safetensors ...   tensors, a file a rank that had something to write
    index.json                   where each piece of each tensor lies
    state.json                   everything that is not a tensor
    meta.json                    the commit mark: step, order of saving, size of every other file, hashes

All is written into `.step-000012.<life>.tmp`; once every rank has flushed its file to disk, rank 0 writes `meta.json`
and renames the directory. So a directory with its proper name is complete unless it was damaged later; names that
begin with a dot are never read.

Every byte is under a hash that was taken in memory before it was written (SHA-256): each piece's and each file's header
in `index.json`, those of `index.json` and `state.json` in `meta.json`, and that file's own in itself. What is read is
checked; a checkpoint that was found damaged gets a file `damaged.json`, and isn't taken again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.errors import FrameworkError
from framework.plan import Checkpoint

FORMAT = 2
"""Raised when the layout changes in a way that older code can't read."""
FOLDER = "checkpoints"
LAST = "last"
"""Symbolic link to the newest checkpoint, for people; the program looks at the commit marks."""
META = "meta.json"
INDEX = "index.json"
STATE = "state.json"
DAMAGE = "damaged.json"
"""What was found wrong with the checkpoint when it was read; whoever repairs it deletes this file."""
SCORE = "score.json"
"""The monitored metric's value, added when it is known; not part of what makes a checkpoint complete."""

_LEFTOVER = re.compile(r"\.step-.*\.(tmp|removed)")
_STEP_NAME = re.compile(r"step-(\d+)(-.*)?")

log = logging.getLogger(__name__)


class CheckpointError(FrameworkError):
    """A checkpoint can't be written or read; the message names path, rank and cause."""


class DamagedError(CheckpointError):
    """Bytes of a checkpoint aren't those that were written; the message names file (by rank) and tensor."""


@dataclass(frozen=True)
class Mark:
    """What a commit mark says.

    Attributes:
        path: the checkpoint's directory.
        step: optimizer steps done.
        saves: number of this save in its folder, from 1: the order of saving, which need not be that of the steps.
        score: value of the monitored metric, None if there is none.
        better: whether the best score is the `min` or the `max`.
        saved: when, seconds since the epoch.
        life: of the run that saved, see `framework.versions`; 0 = nobody counted.
    """

    path: Path
    step: int
    saves: int
    score: float | None = None
    better: str = "min"
    saved: float = 0.0
    life: int = 0


def read_name(run_dir: str | os.PathLike[str], note: str) -> str | None:
    """Return a name that a run has elsewhere, from a file in its folder; None if it has none.

    A copy of the folder has none: two runs would take each other's checkpoints for their own.
    """
    file = Path(run_dir) / note
    words = file.read_text().split() if file.is_file() else []
    if not words or (len(words) > 1 and words[1] != str(Path(run_dir).stat().st_ino)):
        return None
    return words[0]


def write_name(run_dir: str | os.PathLike[str], note: str, name: str) -> None:
    """Note a name that a run has elsewhere."""
    write_bytes(Path(run_dir) / note, f"{name} {Path(run_dir).stat().st_ino}\n".encode())


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other processes that come here out of a folder, where its file system has locks."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            log.info("%s can't be locked (%s): several processes may do the same work there.", folder, error)
        yield


def step_name(step: int) -> str:
    """Name of the checkpoint of optimizer step `step`; only characters that the shell and Hydra take literally."""
    return f"step-{step:06d}"


def folder_of(run_dir: str | os.PathLike[str]) -> Path:
    """Folder of a run's checkpoints."""
    return Path(run_dir) / FOLDER


def read_json(path: Path) -> Any:
    """Read one JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> str:
    """Write one JSON file so that a reader finds the old content or the whole new one, also after a crash.

    Returns:
        SHA-256 of what was to be written.
    """
    content = json_bytes(value)
    write_bytes(path, content)
    return hashlib.sha256(content).hexdigest()


def json_bytes(value: Any) -> bytes:
    """Return what `write_json` writes."""
    return json.dumps(value, allow_nan=False).encode()


def write_bytes(path: Path, content: bytes) -> None:
    """Write one file so that a reader finds the old content or the whole new one, also after a crash."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return `value` with its own hash, which `unsealed` checks."""
    return {**value, SEAL: hashlib.sha256(json.dumps(value, allow_nan=False).encode()).hexdigest()}


def unsealed(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds a sealed value; one without a seal and of format 1, or of none, is old.

    Raises:
        OSError: it can't be read.
        ValueError: it is no JSON object, or not the one that was written.
    """
    return unsealed_bytes(path.read_bytes())


def unsealed_bytes(content: bytes) -> dict[str, Any]:
    """Return the sealed value that a JSON file of this content holds; ValueError as in `unsealed`."""
    value = json.loads(content)
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}")
    seal = value.pop(SEAL, None)
    old = seal is None and value.get("format", 0 if set(value) == SCORE_KEYS else 2) <= 1
    if not old and json.dumps(sealed(value)).encode() != content:
        raise ValueError("its bytes aren't those that were written")
    return value


SEAL = "sha256"
SCORE_KEYS = {"monitor", "value"}
"""What a score file had before it was sealed."""


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable (renames and new files are else lost in a power cut)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(temporary: Path, final: Path, step: int, world_size: int, hashes: Mapping[str, str] | None = None) -> None:
    """Turn the finished directory `temporary` into the checkpoint `final`, replacing an older one of that name.

    Args:
        temporary: the directory.
        final: what it is renamed to.
        step: optimizer steps done.
        world_size: ranks that saved.
        hashes: file name -> SHA-256 of what was to be written, of files that are read by everybody.
    """
    sizes = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
    put_in_place(temporary, final, new_mark(final.parent, sizes, step, world_size, hashes or {}))


def new_mark(
    folder: Path, sizes: Mapping[str, int], step: int, world_size: int, hashes: Mapping[str, str],
    clock: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the commit mark of the next save in `folder`.

    Args:
        folder: of the checkpoints.
        sizes: file name -> bytes, of all files but the mark.
        step: optimizer steps done.
        world_size: ranks that saved.
        hashes: as in `commit`.
        clock: as `framework.versions.Clock.to_dict` gives it.
    """
    return {
        "format": FORMAT,
        "step": step,
        "saves": 1 + max((mark.saves for mark in marks(folder)[0]), default=0),
        "world_size": world_size,
        "saved": time.time(),
        "files": dict(sizes),
        "hashes": dict(hashes),
        "clock": None if clock is None else dict(clock),
    }


def put_in_place(temporary: Path, final: Path, mark: Mapping[str, Any]) -> None:
    """Turn the finished directory `temporary` into the checkpoint `final` with this commit mark; see `commit`."""
    write_json(temporary / META, sealed(mark))
    older = final.with_name(f".{final.name}.removed")
    if final.is_dir() and not final.is_symlink():
        if older.exists():
            shutil.rmtree(older)
        final.rename(older)  # deleted below, when the new one is in its place
    temporary.rename(final)
    sync_folder(final.parent)
    if older.exists():
        shutil.rmtree(older)
    # What a crash left of saves and removals: nothing depends on it any more.
    for leftover in final.parent.iterdir():
        if _LEFTOVER.fullmatch(leftover.name):
            shutil.rmtree(leftover)


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint; it vanishes at once under its name, so that nobody finds half of it."""
    path = Path(path)
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        doomed = path.with_name(f".{path.name}.removed")
        if doomed.exists():
            shutil.rmtree(doomed)
        path.rename(doomed)
        shutil.rmtree(doomed)


def link_last(path: Path) -> None:
    """Point `last` beside `path` to it, in one atomic step: it is never missing and never dangles."""
    temporary = path.with_name(f".{LAST}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path.name, target_is_directory=True)
    link = path.with_name(LAST)
    if link.is_dir() and not link.is_symlink():
        raise CheckpointError(f"{link} should be a link to {path.name}, but it is a directory: move it away")
    temporary.replace(link)


def read_mark(path: str | os.PathLike[str]) -> Mark:
    """Check a checkpoint and return its commit mark.

    Raises:
        CheckpointError: the directory isn't a complete checkpoint, and why.
    """
    path = Path(path)
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, and a checkpoint is a folder ({step_name(12)}): to begin with the weights of a file of"
            " Lightning's or torch's, load them in your module with torch.load(..., weights_only=True)"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint: there is no such directory")
    _check_unmarked(path)
    try:
        content = (path / META).read_bytes()
        if (newer := json.loads(content)["format"]) > FORMAT:  # first: a newer one may be sealed in another way
            raise CheckpointError(
                f"{path} has format {newer}, but this version reads up to {FORMAT}: use a newer version"
            )
        mark = unsealed_bytes(content)
        step, saves, files = int(mark["step"]), int(mark["saves"]), dict(mark["files"])
        hashes = dict(mark.get("hashes", {}))
        life = life_of(mark)
    except FileNotFoundError:
        hint = f"; type {folder_of(path) / LAST} for that run's newest" if folder_of(path).is_dir() else ""
        raise CheckpointError(f"{path} is not a complete checkpoint: its commit mark {META} is missing{hint}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: {META} can't be read ({error})") from error
    _check_sizes(path, files)
    for name, expected in hashes.items():
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            raise DamagedError(f"{path} is damaged: {name} can't be read ({error})") from error
        if hashlib.sha256(content).hexdigest() != expected:
            raise DamagedError(f"{path} is damaged: the bytes of {name} aren't those that were written")
    return Mark(path, step, saves, *_score(path), float(mark.get("saved", 0.0)), life)


def life_of(mark: Mapping[str, Any]) -> int:
    """Return the life of the run that a commit mark's state is of; 0 = nobody counted."""
    return int((mark.get("clock") or {"life": 0})["life"])


def _check_sizes(path: Path, files: Mapping[str, int]) -> None:
    for name, size in files.items():
        try:
            actual = (path / name).stat().st_size
        except OSError:
            raise CheckpointError(f"{path} is not a complete checkpoint: {name} is missing") from None
        if actual != size:
            raise CheckpointError(
                f"{path} is not a complete checkpoint: {name} has {actual} bytes, but {size} were written"
            )


def write_score(path: Path, monitor: str | None, better: str, value: float) -> None:
    """Add the score to a complete checkpoint."""
    write_json(path / SCORE, sealed({"monitor": monitor, "better": better, "value": repr(value)}))


def _score(path: Path) -> tuple[float | None, str]:
    try:
        score = unsealed(path / SCORE)
        return float(score["value"]), str(score.get("better", "min"))
    except FileNotFoundError:
        return None, "min"
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s can't be read (%s): the checkpoint counts as not scored", path / SCORE, error)
        return None, "min"


def mark_damaged(path: Path, why: str) -> None:
    """Note that a checkpoint was found damaged, so that it isn't taken again; nothing of it is deleted."""
    try:
        write_json(path / DAMAGE, {"why": why})
    except OSError as error:
        log.warning("%s can't be marked as damaged, so it may be tried again: %s", path, error)


def _check_unmarked(path: Path) -> None:
    try:
        why = (path / DAMAGE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error})") from error
    try:
        why = str(json.loads(why)["why"])
    except (ValueError, KeyError, TypeError):
        why = f"{DAMAGE} says so, but can't be read"
    raise DamagedError(f"{path} was found damaged before: {why} (delete {DAMAGE} once it is repaired)")


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Tell whether a directory is a complete checkpoint."""
    try:
        read_mark(path)
    except CheckpointError:
        return False
    return True


def marks(folder: Path) -> tuple[list[Mark], list[CheckpointError]]:
    """Return the complete checkpoints in a folder, oldest save first, and what is wrong with each of the others.

    Names that begin with a dot are saves that never ended or removals, and other names aren't ours: neither counts.
    """
    good, bad = [], []
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in paths:
        if _STEP_NAME.fullmatch(path.name) and path.is_dir():
            try:
                good.append(read_mark(path))
            except CheckpointError as error:
                bad.append(error)
    return sorted(good, key=lambda mark: (mark.saves, mark.step)), bad


def newest_complete(run_dir: str | os.PathLike[str]) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run; None if nothing was ever saved.

    Damaged ones are skipped with a warning.

    Raises:
        CheckpointError: there are checkpoints, but none is complete. Starting at step 0 would throw work away in
            silence.
    """
    folder = folder_of(run_dir)
    good, bad = marks(folder)
    for error in bad:
        log.warning("Checkpoint skipped: %s", error)
    if not good and bad:
        causes = "; ".join(str(error) for error in bad)
        raise CheckpointError(
            f"The run has checkpoints in {folder}, but none is complete ({causes}). Nothing was deleted: repair one,"
            f" move the folder away to start from the beginning, or give another one with ckpt_path=PATH"
        )
    return _found(good[-1]) if good else None


def _found(mark: Mark) -> Checkpoint:
    return Checkpoint(str(mark.path), mark.step, saved=mark.saved, life=mark.life)


def by_score(among: Sequence[Mark], better: str) -> list[Mark]:
    """Return those of the marks, oldest first, that have a score, the best first; of equal ones the older, NaN last.

    Args:
        among: as `marks` returns them.
        better: whether the best is the `min` or the `max`.
    """
    sign = 1 if better == "min" else -1
    scored = [
        (math.inf if math.isnan(mark.score) else sign * mark.score, mark) for mark in among if mark.score is not None
    ]
    return [mark for _, mark in sorted(scored, key=lambda pair: pair[0])]


def best_complete(run_dir: str | os.PathLike[str]) -> Checkpoint | None:
    """Return the complete checkpoint with the best score of a run, the older of equal ones; None if none is scored."""
    scored = [mark for mark in marks(folder_of(run_dir))[0] if mark.score is not None and not math.isnan(mark.score)]
    if not scored:
        return None
    return _found(by_score(scored, scored[-1].better)[0])
