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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework import checkpoint_files as files
from framework.checkpoint_files import CheckpointError
from framework.errors import UsageError
from framework.plan import Checkpoint
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


def open_storage(url: str) -> tuple[Any, str]:
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


def tried(what: str, action: Callable[[], Any]) -> Any:
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
    system, root = open_storage(url)
    listed: list[str] = tried(f"Reading the catalogue of {url}", lambda: names_in(system, f"{root}/{CATALOGUE}"))
    names = [file.removesuffix(".json") for file in listed]
    found = {name: entry(url, name) for name in names if NAME.fullmatch(name)}
    return {name: one for name, one in found.items() if one is not None}


def entry(url: str, run: str) -> dict[str, Any] | None:
    """Return a run's entry of the catalogue; None if there is none that can be trusted.

    Raises:
        RemoteError: it can't be read.
    """
    system, root = open_storage(url)
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

    found: dict[str, Any] | None = tried(f"Reading the catalogue of {url}", read)
    return found


def names_in(system: Any, folder: str) -> list[str]:
    """Return the names in a folder of the storage, in order; none if there is no such folder."""
    system.invalidate_cache()
    try:
        found = system.ls(folder, detail=False)
    except FileNotFoundError:
        return []
    return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)


def copies(run_dir: str) -> set[Path]:
    """Return what was fetched into a run's folder, and what fetches that were killed have left there."""
    folder = Path(run_dir) / FOLDER
    return {path for name in ("step-*", ".step-*.tmp") for path in folder.glob(f"*/{files.FOLDER}/{name}")}


def forget(fetched: set[Path]) -> None:
    """Delete copies that `copies` has found; a process that fetches one of them is waited for."""
    for path in fetched:
        with files.alone(path.parent):
            if path.name.startswith("."):
                shutil.rmtree(path, ignore_errors=True)
            else:
                files.remove(path)


def name_of(run_dir: str) -> str | None:
    """Return a run's name in the catalogue, None if it has none."""
    name = files.read_name(run_dir, NOTE)
    return name if name is not None and NAME.fullmatch(name) else None


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
    system, root = open_storage(url)
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
            names = [name for name in names_in(system, f"{root}/{run}/{step}") if FILE_NAME.fullmatch(name)]
            system.get([f"{root}/{run}/{step}/{name}" for name in names], [str(coming / name) for name in names])

        try:
            tried(f"Reading {url}/{run}/{step}", get)
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
