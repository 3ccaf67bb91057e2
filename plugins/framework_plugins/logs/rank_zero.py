"""`logs=rank_zero`: every rank's log records in a file a rank, and all of them merged on rank 0 into `global.log`.

What is said reaches three places:

* `run_dir/logs/rank_<n>.log`, at once (see `framework.log_records`: in memory that survives a killed process);
* `run_dir/global.log`, in batches of `flush_entries` or after `flush_seconds`, identical lines once with their ranks;
* the console, from rank 0's process, so that lines don't tear its progress bar: INFO once, whoever said it (but for
  Lightning's and torch's own); warnings and errors of any rank, with the rank.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework import hookimpl
from framework.errors import UsageError
from framework.failures import headline
from framework.log_merge import GlobalLog, Said, complete, label
from framework.log_records import LAUNCHER, MARKER, RankLog, log_file, plain
from framework.redaction import SECRET_NAMES, Redactor

if TYPE_CHECKING:
    from framework.plan import Failure, RunPlan

POLL_SECONDS = 1.0
"""How often rank 0 looks into the other ranks' files."""
REMEMBERED = 4096
"""Lines that the console remembers, to show each once."""
NOISY = ("lightning", "lightning.pytorch", "lightning.fabric", "torch")
"""Loggers that print by themselves on every rank; here they go the common way."""
LIBRARIES = ("lightning", "torch")
"""Packages whose INFO lines go to the files only: the start screen says the same in fewer lines."""

NOT_OURS = re.compile(r"/(?:lightning|torch)/[^\s:]+:\d+: (?:Future|Deprecation)Warning: ")
"""Advice from one library to another, which a user can't follow: to the files only."""


@dataclass(kw_only=True, eq=False)
class RankZero:
    """Settings and hooks of the option; see the module.

    Attributes:
        level: lowest level that is kept, by name.
        console_level: lowest level that is shown on the console.
        flush_entries: records that may wait before a flush.
        flush_seconds: seconds that a record may wait before a flush.
        secret_names: regular expression; values of environment variables whose upper-case name it finds are masked.
    """

    level: str = "info"
    console_level: str = "info"
    flush_entries: int = 128
    flush_seconds: float = 5.0
    secret_names: str = SECRET_NAMES

    def __post_init__(self) -> None:
        self._session: Session | None = None
        for name in ("level", "console_level"):
            value = getattr(self, name)
            known = [known.lower() for known in logging.getLevelNamesMapping()]
            if not isinstance(value, str) or value.lower() not in known:
                raise UsageError(f"logs.{name}={value}: not a level. Type one of {', '.join(known)}.")
        if self.flush_entries < 1:
            raise UsageError(f"logs.flush_entries={self.flush_entries}: at least 1. Type logs.flush_entries=128.")
        if not self.flush_seconds > 0:
            raise UsageError(f"logs.flush_seconds={self.flush_seconds}: more than 0 s. Type logs.flush_seconds=5.")
        try:
            re.compile(self.secret_names)
        except re.error as error:
            raise UsageError(
                f"logs.secret_names={self.secret_names}: not a regular expression ({error}). "
                f"Type logs.secret_names='TOKEN|SECRET|PASSWORD|KEY'."
            ) from error

    @hookimpl
    def on_worker_start(self, plan: RunPlan, rank: int) -> None:
        """Send this process's log records the common way from here on."""
        self._session = Session(self, plan, rank)

    @hookimpl
    def make_callbacks(self, plan: RunPlan) -> Sequence[Any]:
        """Add none; by now Lightning and torch are imported: take over the handlers that they put up for themselves."""
        if self._session is not None:
            self._session.adopt()
        return []

    @hookimpl
    def on_worker_failure(self, plan: RunPlan, failure: Failure, attempt: int) -> None:
        """Write why a rank died into the launcher's own file, and bring `global.log` up to date."""
        log = RankLog(log_file(plan.run_dir, LAUNCHER), Redactor(names=self.secret_names))
        text = f"attempt {attempt} ended: {headline(failure)}"
        log.emit(logging.LogRecord("framework.launch", logging.ERROR, "", 0, text, None, None))
        log.close()
        self._finish(plan)

    @hookimpl
    def on_run_end(self, plan: RunPlan, error: BaseException | None) -> None:
        """In a worker: record how it ended and stop. In the launcher: complete `global.log`."""
        if self._session is not None:
            self._session.close(error)
            self._session = None
        else:
            self._finish(plan)

    def _finish(self, plan: RunPlan) -> None:
        console = Console(logging.getLevelName(self.console_level.upper()))
        for said in complete(plan.run_dir, plan.world_size):
            # Rank 0 and the launcher show their own lines at once.
            if not said.ranks & {0, LAUNCHER}:
                console.offer_said(said)


class Console:
    """Shows a line once, whichever rank says it first; warnings and errors with the rank.

    The n-th time that a rank says a line counts as the same as the n-th time that another does.
    """

    def __init__(self, level: int) -> None:
        self._level = level
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._shown: OrderedDict[tuple[str, str, str], dict[int, int]] = OrderedDict()

    def offer(self, ranks: set[int], level: int, logger: str, text: str, seconds: float) -> None:
        """Write to stderr, unless the line was shown for another rank."""
        if level < self._level or logger == MARKER:
            return
        if level < logging.WARNING and logger.partition(".")[0] in LIBRARIES:
            return
        if logger == "py.warnings" and NOT_OURS.search(text.partition("\n")[0]):
            return
        name = logging.getLevelName(level)
        if self._pid != os.getpid():  # a forked loader worker: the lock may have been held when it was copied
            self._pid, self._lock = os.getpid(), threading.Lock()
        with self._lock:
            said = self._shown.setdefault((logger, name, text), {})
            self._shown.move_to_end((logger, name, text))
            if len(self._shown) > REMEMBERED:
                self._shown.popitem(last=False)
            most = max(said.values(), default=0)
            for rank in ranks:
                said[rank] = said.get(rank, 0) + 1
            if max(said.values()) == most:
                return
        who = f" {label(ranks)}" if level >= logging.WARNING else ""
        clock = time.strftime("%H:%M:%S", time.localtime(seconds))
        # stderr is looked up each time: a progress bar puts its own in place, to print above itself.
        print(f"{clock} {name}{who} {logger}: {text}", file=sys.stderr, flush=True)

    def offer_said(self, said: Said) -> None:
        """Offer a merged line."""
        line = said.line
        self.offer(said.ranks, line.levelno, line.logger, line.text, line.time)


class ConsoleHandler(logging.Handler):
    """Rank 0's own records, to the console at once."""

    def __init__(self, console: Console, redact: Callable[[str], str]) -> None:
        super().__init__()
        self._console = console
        self._redact = redact
        self._traceback = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        try:
            text = record.getMessage().rstrip("\n")
            if record.exc_info:
                text += "\n" + (record.exc_text or self._traceback.formatException(record.exc_info))
            text = plain(self._redact(text)).replace("\n", "\n\t")
            self._console.offer({0}, record.levelno, record.name, text, record.created)
        except Exception:
            self.handleError(record)


class Session:
    """Logging of one worker process, from `on_worker_start` to `on_run_end`.

    A thread flushes; on rank 0 it also merges. `close` puts the process's logging back as it was, for those who run
    several in one process.
    """

    def __init__(self, settings: RankZero, plan: RunPlan, rank: int) -> None:
        self._settings = settings
        self._plan = plan
        self._rank = rank
        self._root = logging.getLogger()
        self._before = self._root.level
        self._adopted: list[tuple[logging.Logger, logging.Handler, bool]] = []
        redact = Redactor(names=settings.secret_names)
        self._log = RankLog(log_file(plan.run_dir, rank), redact, settings.flush_entries)
        self._handlers: list[logging.Handler] = [self._log]
        self._console = Console(logging.getLevelName(settings.console_level.upper()))
        if rank == 0:
            self._handlers.append(ConsoleHandler(self._console, redact))
        self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.note(logging.INFO, f"attempt {self._attempt} started on {socket.gethostname()}")
        self.adopt()
        self._root.setLevel(settings.level.upper())
        for handler in self._handlers:
            self._root.addHandler(handler)
        logging.captureWarnings(True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="framework-logs", daemon=True)
        self._thread.start()

    def note(self, level: int, text: str) -> None:
        """Write a line of this option's own: to the files only."""
        self._log.handle(logging.LogRecord(MARKER, level, "", 0, text, None, None))

    def adopt(self) -> None:
        """Take handlers that print to the console off root, Lightning and torch: rank 0 prints for all."""
        streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        for logger in (self._root, *map(logging.getLogger, NOISY)):
            printing = [
                handler
                for handler in logger.handlers
                if isinstance(handler, logging.StreamHandler) and handler.stream in streams
            ]
            for handler in printing:
                logger.removeHandler(handler)
            if printing:
                self._adopted += [(logger, handler, logger.propagate) for handler in printing]
                logger.propagate = True

    def close(self, error: BaseException | None) -> None:
        """Record `error`, write what waits, put logging back."""
        if error is not None:
            record = logging.LogRecord(MARKER, logging.ERROR, "", 0, "ended by", None, None)
            record.exc_info = (type(error), error, error.__traceback__)
            self._log.handle(record)
        self._stop.set()
        self._log.due.set()
        self._thread.join()
        logging.captureWarnings(False)
        for handler in self._handlers:
            self._root.removeHandler(handler)
            handler.close()
        self._root.setLevel(self._before)
        for logger, handler, propagate in self._adopted:
            logger.addHandler(handler)
            logger.propagate = propagate

    def _run(self) -> None:
        settings = self._settings
        if self._rank != 0:
            while not self._stop.is_set():
                self._log.due.wait(settings.flush_seconds)
                self._log.sync()
            return
        merge = GlobalLog(self._plan.run_dir, self._plan.world_size, settings.flush_entries, settings.flush_seconds)
        synced = time.monotonic()
        while True:
            final = self._stop.is_set()
            for said in merge.poll(final):
                # Its own lines and the launcher's were shown at once; an earlier attempt's at its end.
                if not said.ranks & {0, LAUNCHER} and said.line.attempt == self._attempt:
                    self._console.offer_said(said)
            if final or self._log.due.is_set() or time.monotonic() - synced >= settings.flush_seconds:
                self._log.sync()
                synced = time.monotonic()
            if final:
                return
            self._log.due.wait(min(POLL_SECONDS, settings.flush_seconds))
