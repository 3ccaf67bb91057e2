"""`Remote`: copies this run's checkpoints to the tier `remote`, and decides which are kept there."""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from framework import checkpoint_files as files
from framework.checkpoint_files import CheckpointError, Mark
from framework.plan import RunPlan
from framework_plugins.checkpoint.remote import (
    CATALOGUE,
    NOTE,
    RemoteError,
    entry,
    name_of,
    names_in,
    open_storage,
    tried,
)
from framework_plugins.checkpoint.wire import FILE_NAME, STEP_NAME

log = logging.getLogger(__name__)

Row = dict[str, Any]
"""What the catalogue says of a checkpoint."""


class Remote:
    """Copies this run's checkpoints, one at a time, in a thread of rank 0. The newest one that waits is taken next.

    Kept there, as on disk, are the newest and besides them the best.

    Args:
        url: of the storage.
        keep: how many of the newest are kept there.
        plan: of the run.
        top_k: how many of the best are kept besides; -1 = delete none.
        better: whether the best score is the `min` or the `max`.
    """

    def __init__(self, url: str, keep: int, plan: RunPlan, top_k: int = 0, better: str = "min") -> None:
        self.url, self.keep, self.top_k, self.better = url, keep, top_k, better
        self._system, self._root = open_storage(url)
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
            "better": better,
            "began_from": known.get("began_from", plan.ckpt_path),
            "checkpoints": self._stored(),
        }
        self._note(self._rows)  # what can't be written to is known now, not at the first save
        self._next: Path | None = None
        self._scored: list[Mark] = []
        self._now: Path | None = None
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="remote checkpoints", daemon=True)
        self._thread.start()

    @property
    def _rows(self) -> list[Row]:
        rows: list[Row] = self._entry["checkpoints"]
        return rows

    def send(self, path: Path) -> None:
        """Copy a complete checkpoint to the remote storage, soon."""
        with self._wake:
            if self._next is not None and self._next not in {mark.path for mark in self._scored}:
                log.warning("%s isn't copied to %s: a newer one has come.", self._next.name, self.url)
            self._next = path
            self._wake.notify_all()

    def scores(self, marks: Sequence[Mark]) -> None:
        """Learn the scores of what is kept on disk; what is one of the best there and isn't here yet is copied, too."""
        there = {(*_version(row), row["score"]) for row in self._rows}
        with self._wake:
            self._scored = [
                mark for mark in marks if (mark.path.name, mark.life, mark.saved, _told(mark.score)) not in there
            ]
            self._wake.notify_all()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to be copied."""
        return not self.needed

    @property
    def needed(self) -> set[Path]:
        """Checkpoints that mustn't be deleted yet: the one that is being copied, and those that may be next."""
        with self._wake:
            return {path for path in (self._now, self._next, *(mark.path for mark in self._scored)) if path is not None}

    def close(self) -> None:
        """End the thread; what it is copying isn't waited for."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._next is not None or self._scored or self._closing)
                if self._next is None and not self._scored:
                    return
                newest = self._next is not None
                path = self._now = self._next or self._scored.pop(0).path
                if newest:
                    self._next = None
            try:
                began = time.perf_counter()
                if self._copy(path, newest):
                    log.info(
                        "%s is in %s/%s after %.2f s.", path.name, self.url, self.name, time.perf_counter() - began
                    )
            except Exception as error:  # whatever it is: the thread is needed for the next one
                log.warning("%s isn't in %s: %s. Training goes on.", path.name, self.url, error)
            finally:
                self._now = None

    def _copy(self, path: Path, newest: bool) -> bool:
        """Copy the files, the mark last; then the catalogue, then forget old ones. Return whether there was need to.

        Args:
            path: on disk.
            newest: whether it is kept in any case.
        """
        try:
            mark = files.read_mark(path)
            content = (path / files.META).read_bytes()
        except (CheckpointError, OSError) as error:
            raise RemoteError(f"it is gone or damaged ({error})") from error
        row = _row(path.name, files.unsealed_bytes(content), mark.score)
        if row in self._rows:
            return False
        there = {_version(one) for one in self._rows}
        rows = _in_order([*(one for one in self._rows if one["name"] != row["name"]), row])
        kept = self._kept(rows)
        if not (newest or _version(row) in there or self._among_best(row, rows)):
            return False
        if _version(row) not in there:
            self._put(path, content)
        if mark.score is not None:
            at, score = f"{self._root}/{self.name}/{path.name}/{files.SCORE}", (path / files.SCORE).read_bytes()
            tried(f"Writing {self.url}", lambda: self._system.pipe_file(at, score))
        self._note(kept)
        for old in rows:
            if old not in kept:
                self._remove(old["name"])
        return True

    def _put(self, path: Path, mark: bytes) -> None:
        names = [file.name for file in sorted(path.iterdir()) if FILE_NAME.fullmatch(file.name)]
        there = f"{self._root}/{self.name}/{path.name}"

        def put() -> None:
            self._system.invalidate_cache()
            if self._system.exists(there):  # an older one of the same step: not a moment with half of each
                self._note([one for one in self._rows if one["name"] != path.name])
                self._system.rm(there, recursive=True)
            data = [name for name in names if name != files.META]
            self._system.makedirs(there, exist_ok=True)
            self._system.put([str(path / name) for name in data], [f"{there}/{name}" for name in data])
            self._system.pipe_file(f"{there}/{files.META}", mark)

        tried(f"Writing {self.url}", put)

    def _kept(self, rows: Sequence[Row]) -> list[Row]:
        """Return which of the rows, oldest first, are kept: the newest, and the best."""
        if self.top_k == -1:
            return list(rows)
        names = {row["name"] for row in rows[-self.keep :]}
        return [row for row in rows if row["name"] in names or self._among_best(row, rows)]

    def _among_best(self, row: Row, rows: Sequence[Row]) -> bool:
        order = [mark.path.name for mark in ranked(rows, self.better)]
        return row["name"] in (order if self.top_k == -1 else order[: self.top_k])

    def _remove(self, name: str) -> None:
        there = f"{self._root}/{self.name}/{name}"
        tried(f"Removing {name} from {self.url}", lambda: self._system.rm(there, recursive=True))

    def _stored(self) -> list[Row]:
        """Return what the storage really has of this run, the oldest first; remove what a kill left half copied."""
        folder = f"{self._root}/{self.name}"

        def read() -> dict[str, tuple[bytes | None, bytes | None]]:
            found: dict[str, tuple[bytes | None, bytes | None]] = {}
            for name in names_in(self._system, folder):
                if STEP_NAME.fullmatch(name):
                    there = names_in(self._system, f"{folder}/{name}")
                    mark, score = (
                        self._system.cat_file(f"{folder}/{name}/{file}") if file in there else None
                        for file in (files.META, files.SCORE)
                    )
                    found[name] = mark, score
            return found

        rows = []
        for name, (mark, score) in tried(f"Reading {self.url}", read).items():
            if mark is None:  # the mark is written last
                self._remove(name)
                continue
            try:
                value = None if score is None else float(files.unsealed_bytes(score)["value"])
                rows.append(_row(name, files.unsealed_bytes(mark), value))
            except (ValueError, KeyError, TypeError) as error:
                log.warning(
                    "%s/%s/%s is left alone: its mark or score can't be read (%s).", self.url, self.name, name, error
                )
        return _in_order(rows)

    def _note(self, rows: list[Row]) -> None:
        self._entry["checkpoints"] = rows
        content = files.json_bytes(files.sealed(self._entry))
        at = f"{self._root}/{CATALOGUE}/{self.name}.json"

        def write() -> None:
            self._system.makedirs(f"{self._root}/{CATALOGUE}", exist_ok=True)
            self._system.pipe_file(at, content)

        tried(f"Writing the catalogue of {self.url}", write)


def _row(name: str, mark: Mapping[str, Any], score: float | None) -> Row:
    return {
        "name": name,
        "step": int(mark["step"]),
        "life": files.life_of(mark),
        "saved": float(mark["saved"]),
        "bytes": sum(mark["files"].values()),
        "score": _told(score),
    }


def _told(score: float | None) -> str | None:
    return None if score is None else repr(score)  # JSON has no infinity


def _version(row: Row) -> tuple[str, int, float]:
    return row["name"], row["life"], row["saved"]


def _in_order(rows: Sequence[Row]) -> list[Row]:
    """Return the oldest first."""
    return sorted(rows, key=lambda row: (row["life"], row["step"]))


def ranked(rows: Sequence[Row], better: str) -> list[Mark]:
    """Return those of the catalogue's rows, oldest first, that have a score, the best first; names are the paths'."""
    scores = [row.get("score") for row in rows]
    marks = [
        Mark(Path(row["name"]), int(row["step"]), 0, None if score is None else float(score))
        for row, score in zip(rows, scores, strict=True)
    ]
    return files.by_score(marks, better)
