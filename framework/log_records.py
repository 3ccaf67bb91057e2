"""Log records on their way from each rank to a file: the line format, its writer and its reader.

Each rank appends every record at once to its own file, `run_dir/logs/rank_<n>.log`, with one `write`. The record then
lies in the host's page cache: memory that outlives a process killed by SIGKILL, at about a microsecond a record. What
is flushed in batches is the rest of the way: to the disk, and into `global.log` (`log_merge.py`).

A record is one line, `<time> <LEVEL> <logger> <message>`; further lines of a message start with a tab.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

LAUNCHER = -1
"""The launcher's number where ranks are counted."""
MARKER = "framework.logs"
"""Logger of the line that opens each start of a rank; readers learn the attempt from it."""
CHUNK = 1 << 20
"""Bytes read at once."""

_HEADER = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}[+-]\d{4}) (\S+) (\S+) (.*)", re.DOTALL)
_ATTEMPT = re.compile(r"attempt (\d+) ")
# ANSI sequences whole, then what is left of control characters, but for tab and newline.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Return `text` without control characters and colours; newlines and tabs stay."""
    return _CONTROL.sub("", text)


def log_file(run_dir: str | Path, rank: int) -> Path:
    """Return the file of `rank` (or of the launcher, rank -1)."""
    return Path(run_dir) / "logs" / ("launcher.log" if rank == LAUNCHER else f"rank_{rank}.log")


def log_files(run_dir: str | Path) -> dict[int, Path]:
    """Return rank -> file for all files that exist, of earlier and larger worlds too."""
    found = {}
    for path in (Path(run_dir) / "logs").glob("*.log"):
        if path.name == "launcher.log":
            found[LAUNCHER] = path
        elif match := re.fullmatch(r"rank_(\d+)\.log", path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class LogLine:
    """One record as read back.

    Attributes:
        time: seconds since the epoch.
        text: message and, tab-indented on lines of their own, what follows its first line.
        attempt: which start of the run said it, 0 first.
    """

    time: float
    stamp: str
    level: str
    logger: str
    text: str
    rank: int
    attempt: int

    @property
    def levelno(self) -> int:
        """Numeric level; INFO for a level of the user's own that this process doesn't know."""
        return logging.getLevelNamesMapping().get(self.level, logging.INFO)


class Stamp:
    """Seconds since the epoch as local ISO time with microseconds; the part that changes once a second is kept."""

    def __init__(self) -> None:
        self._second = (-1, "", "")

    def __call__(self, seconds: float) -> str:
        micros = round(seconds * 1e6)
        second, micros = divmod(micros, 1_000_000)
        known, prefix, zone = self._second
        if second != known:
            local = time.localtime(second)
            prefix, zone = time.strftime("%Y-%m-%dT%H:%M:%S", local), time.strftime("%z", local)
            self._second = (second, prefix, zone)
        return f"{prefix}.{micros:06d}{zone}"


class RankLog(logging.Handler):
    """Appends every record to one rank's file, at once, whole, in one write.

    Several threads, and processes forked from the rank (loader workers), may write: O_APPEND keeps lines whole.

    Args:
        path: the file; its folder is made.
        redact: applied to each message.
        flush_entries: records after which `due` is set; who waits for it then calls `sync`.
    """

    def __init__(self, path: Path, redact: Callable[[str], str], flush_entries: int = 128) -> None:
        super().__init__()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._redact = redact
        self._stamp = Stamp()
        self._flush_entries = flush_entries
        self._traceback = logging.Formatter()
        self._pid = os.getpid()
        self.waiting = 0
        self.due = threading.Event()
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # the disk was full when the last start wrote its last line

    def render(self, record: logging.LogRecord) -> str:
        """Return the record as it stands in the file, newline included."""
        text = record.getMessage().rstrip("\n")
        if record.exc_info:
            record.exc_text = record.exc_text or self._traceback.formatException(record.exc_info)
        for more in (record.exc_text, record.stack_info):
            if more:
                text += "\n" + more
        text = plain(self._redact(text)).replace("\n", "\n\t")
        name = "_".join(record.name.split()) or "root"
        level = "_".join(record.levelname.split()) or str(record.levelno)
        return f"{self._stamp(record.created)} {level} {name} {text}\n"

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; what can't be formatted or written is reported on stderr, as logging does everywhere."""
        try:
            os.write(self._fd, self.render(record).encode("utf-8", "backslashreplace"))
        except Exception:
            self.handleError(record)
        self.waiting += 1
        # A forked process must not touch the event: its lock may have been held when it was copied.
        if self.waiting >= self._flush_entries and os.getpid() == self._pid:
            self.due.set()

    def sync(self) -> None:
        """Bring what was written to the disk, and so before the eyes of other hosts that share it."""
        if self.waiting:
            self.waiting = 0
            os.fsync(self._fd)
        self.due.clear()

    def close(self) -> None:
        """Sync and close; called once more at exit by logging."""
        super().close()
        if self._fd >= 0:
            self.sync()
            os.close(self._fd)
            self._fd = -1


class Tail:
    """Reads one rank's file from where it stopped last; the file need not exist yet."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self._position = 0
        self._held = b""
        self._attempt = 0
        self._time = 0.0

    def read(self, final: bool = False) -> list[LogLine]:
        """Return the records of the next `CHUNK` bytes.

        The last record is held back until another follows or a later call finds nothing new, because more lines of it
        may be on their way; with `final` it is returned at once, even without its newline.
        """
        new = self._fetch()
        data = self._held + new
        if final and not new:
            cut = len(data)
        else:
            cut = data.rfind(b"\n") + 1
            if new and data[cut : cut + 1] in (b"", b"\t"):
                cut = _last_record(data, cut)
        self._held = data[cut:]
        return list(self._parse(data[:cut]))

    def drain(self, final: bool = True) -> Iterator[LogLine]:
        """Yield all that is there now; without `final` the last record may be held back, as `read` does."""
        while True:
            before = self._position
            yield from self.read(final)
            got = self._position - before
            if got == 0 or (not final and got < CHUNK):
                return

    def _fetch(self) -> bytes:
        try:
            with open(self.path, "rb") as file:
                file.seek(self._position)
                new = file.read(CHUNK)
        except FileNotFoundError:
            return b""
        self._position += len(new)
        return new

    def _parse(self, data: bytes) -> Iterator[LogLine]:
        if not data:
            return
        # A line that is no header (a further line of a message, one that a full disk cut) belongs to the one above.
        records: list[str] = []
        for line in data.decode("utf-8", "backslashreplace").removesuffix("\n").split("\n"):
            if records and not (line[:1].isdigit() and _HEADER.fullmatch(line)):
                records[-1] += "\n" + line
            else:
                records.append(line)
        for record in records:
            match = _HEADER.fullmatch(record)
            if match is None:  # the file doesn't begin with a record: someone else wrote here
                yield LogLine(self._time, Stamp()(self._time), "ERROR", MARKER, record, self.rank, self._attempt)
                continue
            stamp, level, logger, text = match.groups()
            if logger == MARKER and (attempt := _ATTEMPT.match(text)):
                self._attempt = int(attempt[1])
            self._time = datetime.fromisoformat(stamp).timestamp()
            yield LogLine(self._time, stamp, level, logger, text, self.rank, self._attempt)


def _last_record(data: bytes, end: int) -> int:
    """Return where the last record of `data[:end]` starts."""
    start = data.rfind(b"\n", 0, max(end - 1, 0)) + 1
    while start and data[start : start + 1] == b"\t":
        start = data.rfind(b"\n", 0, start - 1) + 1
    return start
