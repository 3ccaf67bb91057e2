"""The tier `remote`: copies of checkpoints wherever fsspec reaches (s3://, gs://, ...), and a catalogue beside them.

Below the URL lie::

    catalogue/<run>.json         what there is of a run: one sealed file a run, written by its rank 0 alone
    <run>/step-000012/...        a checkpoint: the same files as on disk, the commit mark last

A run's name here is that of its folder with a random part, so two runs never write to one place. Any other machine
finds the newest good state from the URL alone: `ckpt_path=URL`, `python -m framework catalogue URL`.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from framework import checkpoint_files as files
from framework.checkpoint_files import CheckpointError
from framework.errors import UsageError
from framework.plan import Checkpoint, RunPlan
from framework_plugins.checkpoint.wire import FILE_NAME, STEP_NAME

log = logging.getLogger(__name__)

NOTE = "remote_name"
"""File in the run's folder with the run's name in the catalogue."""
FOLDER = "remote"
"""Folder in the run's folder into which checkpoints are fetched."""
CATALOGUE = "catalogue"
NAME = re.compile(r"[A-Za-z0-9._-]{1,120}-[0-9a-f]{8}")


class RemoteError(CheckpointError):
    """The remote storage can't be reached, or doesn't hold what was asked for; the message has the URL."""


def _open(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it.

    Raises:
        UsageError: fsspec doesn't know it, or a package is missing.
    """
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url} can't be opened: {error}") from error
    return system, str(path).rstrip("/")


def _tried(what: str, action: Callable[[], Any]) -> Any:
    """Do something with the remote storage; its libraries raise all kinds of errors.

    Raises:
        RemoteError: it failed.
    """
    try:
        return action()
    except CheckpointError:
        raise
    except Exception as error:
        raise RemoteError(f"{what} failed: {type(error).__name__}: {error}") from error


def entries(url: str) -> dict[str, dict[str, Any]]:
    """Return the catalogue: run -> its entry.

    Raises:
        RemoteError: it can't be read.
    """
    system, root = _open(url)
    listed: list[str] = _tried(f"Reading the catalogue of {url}", lambda: _names(system, f"{root}/{CATALOGUE}"))
    names = [file.removesuffix(".json") for file in listed]
    found = {name: entry(url, name) for name in names if NAME.fullmatch(name)}
    return {name: one for name, one in found.items() if one is not None}


def entry(url: str, run: str) -> dict[str, Any] | None:
    """Return a run's entry of the catalogue; None if there is none that can be trusted.

    Raises:
        RemoteError: it can't be read.
    """
    system, root = _open(url)
    path = f"{root}/{CATALOGUE}/{run}.json"

    def read() -> dict[str, Any] | None:
        system.invalidate_cache()
        try:
            return files.unsealed_bytes(system.cat_file(path))
        except FileNotFoundError:
            return None
        except ValueError as error:
            log.warning("%s is left out of the catalogue: %s.", path, error)
            return None

    found: dict[str, Any] | None = _tried(f"Reading the catalogue of {url}", read)
    return found


def _names(system: Any, folder: str) -> list[str]:
    """Return the names in a folder of the storage, in order; none if there is no such folder."""
    system.invalidate_cache()
    try:
        found = system.ls(folder, detail=False)
    except FileNotFoundError:
        return []
    return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)


def name_of(run_dir: str) -> str | None:
    """Return a run's name in the catalogue, None if it has none."""
    name = files.read_name(run_dir, NOTE)
    return name if name is not None and NAME.fullmatch(name) else None


class Remote:
    """Copies this run's checkpoints, one at a time, in a thread of rank 0. The newest one that waits is taken next.

    Args:
        url: of the storage.
        keep: how many of the newest are kept there.
        plan: of the run.
    """

    def __init__(self, url: str, keep: int, plan: RunPlan) -> None:
        self.url, self.keep = url, keep
        self._system, self._root = _open(url)
        name = name_of(plan.run_dir)
        if name is None:
            plain = re.sub(r"[^A-Za-z0-9._-]", "-", Path(plan.run_dir).name)[:80] or "run"
            name = f"{plain}-{secrets.token_hex(4)}"
            files.write_name(plan.run_dir, NOTE, name)
        self.name = name
        known = entry(url, name) or {}
        self._entry: dict[str, Any] = {
            "format": 2,
            "run": name,
            "run_id": plan.run_id,
            "mesh": str(plan.mesh),
            "began_from": known.get("began_from", plan.ckpt_path),
            "checkpoints": self._stored(),
        }
        self._note(self._entry["checkpoints"])  # what can't be written to is known now, not at the first save
        self._next: Path | None = None
        self._now: Path | None = None
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="remote checkpoints", daemon=True)
        self._thread.start()

    def send(self, path: Path) -> None:
        """Copy a complete checkpoint to the remote storage, soon."""
        with self._wake:
            if self._next is not None:
                log.warning("%s isn't copied to %s: a newer one has come.", self._next.name, self.url)
            self._next = path
            self._wake.notify_all()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to be copied."""
        return not self.needed

    @property
    def needed(self) -> set[Path]:
        """Checkpoints that mustn't be deleted yet: the one that is being copied, and the next one."""
        with self._wake:
            return {path for path in (self._now, self._next) if path is not None}

    def close(self) -> None:
        """End the thread; what it is copying isn't waited for."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._next is not None or self._closing)
                if self._closing and self._next is None:
                    return
                path = self._now = self._next
                self._next = None
            assert path is not None
            try:
                began = time.perf_counter()
                self._copy(path)
                log.info("%s is in %s/%s after %.2f s.", path.name, self.url, self.name, time.perf_counter() - began)
            except Exception as error:  # whatever it is: the thread is needed for the next one
                log.warning("%s isn't in %s: %s. Training goes on.", path.name, self.url, error)
            finally:
                self._now = None

    def _copy(self, path: Path) -> None:
        """Copy the files, the mark last; then the catalogue, then forget old ones."""
        try:
            files.read_mark(path)
            content = (path / files.META).read_bytes()
        except (CheckpointError, OSError) as error:
            raise RemoteError(f"it is gone or damaged ({error})") from error
        names = [file.name for file in sorted(path.iterdir()) if FILE_NAME.fullmatch(file.name)]
        there = f"{self._root}/{self.name}/{path.name}"

        def put() -> None:
            self._system.invalidate_cache()
            if self._system.exists(there):  # an older one of the same step: not a moment with half of each
                self._forget(path.name)
                self._system.rm(there, recursive=True)
            data = [name for name in names if name != files.META]
            self._system.makedirs(there, exist_ok=True)
            self._system.put([str(path / name) for name in data], [f"{there}/{name}" for name in data])
            self._system.pipe_file(f"{there}/{files.META}", content)

        _tried(f"Writing {self.url}", put)
        rows = [one for one in self._entry["checkpoints"] if one["name"] != path.name]
        rows.append(_row(path.name, files.unsealed_bytes(content)))
        kept, dropped = rows[-self.keep :], rows[: -self.keep]
        self._note(kept)
        for old in dropped:
            self._remove(old["name"])

    def _remove(self, name: str) -> None:
        there = f"{self._root}/{self.name}/{name}"
        _tried(f"Removing {name} from {self.url}", lambda: self._system.rm(there, recursive=True))

    def _stored(self) -> list[dict[str, Any]]:
        """Return what the storage really has of this run, the oldest first; remove what a kill left half copied."""
        folder = f"{self._root}/{self.name}"

        def read() -> dict[str, bytes | None]:
            found: dict[str, bytes | None] = {}
            for name in _names(self._system, folder):
                if STEP_NAME.fullmatch(name):
                    marked = files.META in _names(self._system, f"{folder}/{name}")
                    found[name] = self._system.cat_file(f"{folder}/{name}/{files.META}") if marked else None
            return found

        rows = []
        for name, content in _tried(f"Reading {self.url}", read).items():
            if content is None:  # the mark is written last
                self._remove(name)
                continue
            try:
                rows.append(_row(name, files.unsealed_bytes(content)))
            except (ValueError, KeyError, TypeError) as error:
                log.warning("%s/%s/%s is left alone: its mark can't be read (%s).", self.url, self.name, name, error)
        return sorted(rows, key=lambda row: (row["life"], row["step"]))

    def _forget(self, name: str) -> None:
        self._note([one for one in self._entry["checkpoints"] if one["name"] != name])

    def _note(self, rows: list[dict[str, Any]]) -> None:
        self._entry["checkpoints"] = rows
        content = files.json_bytes(files.sealed(self._entry))
        at = f"{self._root}/{CATALOGUE}/{self.name}.json"

        def write() -> None:
            self._system.makedirs(f"{self._root}/{CATALOGUE}", exist_ok=True)
            self._system.pipe_file(at, content)

        _tried(f"Writing the catalogue of {self.url}", write)


def _row(name: str, mark: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the catalogue says of a checkpoint."""
    return {
        "name": name,
        "step": int(mark["step"]),
        "life": files.life_of(mark),
        "saved": float(mark["saved"]),
        "bytes": sum(mark["files"].values()),
    }


def newest(url: str, name: str) -> list[dict[str, Any]]:
    """Return what the catalogue has of a run, the newest first: `name`, `step`, `life`, `saved`, `bytes`."""
    rows = (entry(url, name) or {}).get("checkpoints", [])
    good = [row for row in rows if STEP_NAME.fullmatch(str(row.get("name")))]
    return sorted(good, key=lambda row: (int(row["life"]), int(row["step"])), reverse=True)


def fetch(url: str, run: str, step: str, run_dir: str) -> Path:
    """Copy a checkpoint into the folder of this run; return its path. One process does it, others wait.

    Raises:
        RemoteError: it isn't there, or can't be read.
        CheckpointError: what has come isn't complete.
    """
    system, root = _open(url)
    final = files.folder_of(Path(run_dir) / FOLDER / run) / step
    final.parent.mkdir(parents=True, exist_ok=True)
    with files.alone(final.parent):
        if files.is_complete(final):
            return final
        if (final / files.DAMAGE).exists():
            files.read_mark(final)  # raises: what lies there was fetched before, and is damaged
        coming = final.with_name(f".{step}.{secrets.token_hex(4)}.tmp")
        coming.mkdir()

        def get() -> None:
            names = [name for name in _names(system, f"{root}/{run}/{step}") if FILE_NAME.fullmatch(name)]
            system.get([f"{root}/{run}/{step}/{name}" for name in names], [str(coming / name) for name in names])

        try:
            _tried(f"Reading {url}/{run}/{step}", get)
            files.read_mark(coming)
            if not files.is_complete(final):  # a file system without locks: another one may have been faster
                files.remove(final)
                coming.rename(final)
        finally:
            shutil.rmtree(coming, ignore_errors=True)
    return final


def find(url: str, run_dir: str) -> Checkpoint:
    """Fetch what `ckpt_path=url` means: a storage with one run, a run in it (its newest good one), or one checkpoint.

    Raises:
        UsageError: there is none, or there are several runs; the message names them.
        RemoteError: it can't be read.
    """
    base, run, step = _parts(url)
    if run is None:
        known = {name for name, one in entries(base).items() if one["checkpoints"]}
        if len(known) != 1:
            told = f"it holds several runs: {', '.join(sorted(known)[:10])}; type ckpt_path={base}/<run>"
            if not known:
                told = (
                    "there is no catalogue of runs. Type what checkpoint.remote was when the run saved, which "
                    f"`python -m framework catalogue {base}` must know, or ckpt_path=null to start afresh"
                )
            raise UsageError(f"ckpt_path={url}: {told}.")
        run = next(iter(known))
    rows = newest(base, run)
    if step is not None:
        rows = [row for row in rows if row["name"] == step]
    if not rows:
        told = ", ".join(row["name"] for row in newest(base, run)[:10])
        has = f"of this run it has {told}" if told else f"`python -m framework catalogue {base}` shows what it has"
        raise UsageError(f"ckpt_path={url}: the catalogue of {base} has no such checkpoint; {has}.")
    complaint: CheckpointError | None = None
    for row in rows:
        began = time.perf_counter()
        try:
            path = fetch(base, run, row["name"], run_dir)
        except CheckpointError as error:
            log.warning("Skipped: %s", error)
            complaint = error
        else:
            return Checkpoint(
                str(path), int(row["step"]), "remote", float(row["saved"]), time.perf_counter() - began, row["life"]
            )
    assert complaint is not None
    raise complaint


def _parts(url: str) -> tuple[str, str | None, str | None]:
    """Cut a URL into that of the storage, run and checkpoint."""
    base, step = url.rstrip("/"), None
    if STEP_NAME.fullmatch(base.rpartition("/")[2]):
        base, _, step = base.rpartition("/")
    if NAME.fullmatch(base.rpartition("/")[2]):
        base, _, run = base.rpartition("/")
        return base, run, step
    return base, None, step
