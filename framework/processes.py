"""Start the ranks of one attempt as processes of this host, watch them, and leave none behind.

The launcher process holds the rendezvous store, on a port that it has bound itself, so nobody can take the port in
between and the store survives any rank. Each rank leads a process group of its own, so its DataLoader workers end with
it, and holds one end of a pipe: by the pipe's end it learns that the launcher is gone.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from framework.errors import RunFailedError
from framework.failures import by_cause, death_of, doubt, headline, write_error_file
from framework.launch import Attempt, Outcome, Status, StopSignals
from framework.plan import Failure
from framework.rank_env import stale_variables, worker_environment

log = logging.getLogger(__name__)

WINDOW_S = 2.0
"""After the first failure is told the ranks may go on for so long: the cause may be on its way, loggers are closed."""
GRACE_S = 3.0
"""A rank that was told to end has so long to flush its logs, then it is killed."""
SAVE_GRACE_S = 60.0
"""After one rank has saved and stopped, the others have so long to do the same."""
EXIT_GRACE_S = 30.0
"""After all ranks have delivered their result, their processes have so long to go away."""
POLL_S = 0.1
STOPS: dict[str, Status] = {"preempted": "preempted", "terminated": "interrupted"}
"""What a rank that was asked to stop has said -> status of the run, in order of weight."""
UNSAVED = "SIGTERM: ended without saving, as the first step wasn't reached yet, or nobody saves (recovery=none)."

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "lightning.pytorch",
    "framework.worker",
    "framework.fork_server",
]
"""Imported once in the fork server; a rank then starts in a few tens of milliseconds. None of them starts a thread."""


def prewarm() -> None:
    """Start the fork server, which imports `PRELOAD` while the caller does something else; returns at once.

    The server ends with the calling process. Calling it again does nothing.
    """
    from multiprocessing import forkserver

    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    before = signal.getsignal(signal.SIGINT)
    try:
        # Inherited by the server and the ranks: Ctrl-C is the launcher's alone to handle, during the imports too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread: then Ctrl-C during the server's imports prints a traceback
        forkserver.ensure_running()
        return
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class _Rank:
    """One worker process as the launcher sees it."""

    number: int
    process: BaseProcess
    pipe: Connection
    said: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    ended: bool = False

    @property
    def finished(self) -> bool:
        return self.ended or "result" in self.said

    def listen(self) -> None:
        """Take in what the rank has said so far."""
        try:
            while self.pipe.poll():
                kind, content = self.pipe.recv()
                self.said[kind] = content
                if kind == "failed":
                    self.failure = content
        except (EOFError, OSError):
            return

    def reap(self) -> None:
        """Note the process's end, and what is wrong about it."""
        if self.ended or self.process.exitcode is None:
            return
        self.listen()
        self.ended = True
        code = self.process.exitcode
        if self.failure is None and "preempted" not in self.said:
            if code == -signal.SIGTERM:
                self.said["terminated"] = UNSAVED
            elif code != 0 or "result" not in self.said:
                self.failure = death_of(self.number, code, time.time())

    def signal(self, number: int) -> None:
        """Signal the rank's main process."""
        if not self.ended and self.process.pid is not None:
            try:
                os.kill(self.process.pid, number)
            except ProcessLookupError:
                return

    def kill_group(self) -> None:
        """Kill the rank and whatever it has started."""
        assert self.process.pid  # 0 would be the launcher's own group
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.signal(signal.SIGKILL)  # it may not have come so far as to lead a group


class HostLauncher:
    """Runs all ranks of an attempt on this host: a `framework.launch.Launcher`.

    The process that calls `run` speaks for the whole run (`leads`), and restarts are its own affair.

    Args:
        method: `forkserver` (imports done once) or `spawn` (each rank imports for itself).
    """

    leads = True
    external_attempt = None

    def __init__(self, method: str) -> None:
        self.method = method

    def run(self, attempt: Attempt) -> Outcome:
        """Start the ranks, wait for their end, and say how it went; afterwards none of them is alive.

        Raises:
            RunFailedError: the processes couldn't be started at all.
        """
        stale = stale_variables()
        if stale and attempt.number == 0:
            said = " ".join(f"{name}={value}" for name, value in stale.items())
            log.warning("Ignored for this run, left over in the shell: %s", said)
        with _store(attempt) as port:
            ranks: list[_Rank] = []
            try:
                for number in range(attempt.plan.world_size):
                    ranks.append(self._start(attempt, number, port))
                _watch(ranks, attempt.stop)
            finally:
                _end(ranks)
        return _outcome(ranks, attempt)

    def _start(self, attempt: Attempt, number: int, port: int) -> _Rank:
        from framework import worker

        plan = attempt.plan
        if self.method == "forkserver":
            prewarm()
        context = multiprocessing.get_context(self.method)
        ours, theirs = context.Pipe()
        env = worker_environment(
            os.environ, plan.env, rank=number, world_size=plan.world_size, run_id=plan.run_id,
            attempt=attempt.number, port=port,
        )  # fmt: skip
        process = context.Process(  # type: ignore[attr-defined]
            target=worker.main,
            args=(plan.to_dict(), attempt.entry, worker.Place(number, attempt.number, env), theirs),
            name=f"rank-{number}",
        )
        try:
            process.start()
        except (EOFError, OSError) as error:
            raise RunFailedError(f"Rank {number} couldn't be started by '{self.method}': {error!r}.") from error
        theirs.close()
        return _Rank(number, process, ours)


@contextmanager
def _store(attempt: Attempt) -> Iterator[int]:
    """Hold the attempt's rendezvous store; yield its port. Only this host can connect."""
    import torch.distributed as dist

    from framework.process_groups import RUN_KEY

    listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, attempt.plan.world_size))
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=attempt.plan.timeout_s),
    )  # fmt: skip
    store.set(RUN_KEY, attempt.plan.run_id)
    yield port
    del store


def _watch(ranks: list[_Rank], stop: StopSignals) -> None:
    """Return when all ranks have ended, or when they have to be ended by the caller."""
    forwarded = False
    limit: float | None = None
    while True:
        alive = [rank for rank in ranks if not rank.ended]
        if not alive:
            return
        wait([item for rank in alive for item in (rank.process.sentinel, rank.pipe)], timeout=POLL_S)
        for rank in alive:
            rank.listen()
            rank.reap()
        if stop.at_once:
            return
        if stop.requested and not forwarded:
            forwarded = True
            for rank in ranks:
                rank.signal(signal.SIGTERM)
        grace = _grace(ranks)
        if grace is not None:
            limit = min(limit or float("inf"), time.monotonic() + grace)
            if time.monotonic() >= limit:
                return


def _grace(ranks: list[_Rank]) -> float | None:
    """Return how long the ranks may still live after what just happened; None = as long as they like."""
    if any(rank.failure for rank in ranks):
        return WINDOW_S
    if any("terminated" in rank.said for rank in ranks):
        return GRACE_S
    if any("preempted" in rank.said for rank in ranks):
        return SAVE_GRACE_S
    if all(rank.finished for rank in ranks):
        return EXIT_GRACE_S
    return None


def _end(ranks: list[_Rank]) -> None:
    """Leave no rank and no child of a rank alive."""
    from framework.worker import END

    for rank in ranks:
        if not rank.ended:
            try:
                rank.pipe.send(END)
            except OSError:
                continue
    limit = time.monotonic() + GRACE_S
    for rank in ranks:
        rank.process.join(max(0.0, limit - time.monotonic()))
    for rank in ranks:
        rank.kill_group()
        rank.process.join()
        rank.listen()
        rank.pipe.close()
        rank.process.close()


def _outcome(ranks: list[_Rank], attempt: Attempt) -> Outcome:
    """Draw one conclusion from how all ranks ended; write an error file for each that failed."""
    failures = by_cause(rank.failure for rank in ranks if rank.failure is not None)
    for failure in failures:
        write_error_file(attempt.plan.run_dir, failure, attempt.number)
    for failure in failures[1:]:
        log.info("Also, later or as a consequence: %s", headline(failure))
    results = {rank.number: rank.said["result"] for rank in ranks if "result" in rank.said}
    status, note = _status(ranks, attempt, failures)
    late = [str(rank.number) for rank in ranks if not rank.ended]
    if status == "finished" and late:
        log.warning("Ranks %s had finished but didn't exit within %g s: ended.", ", ".join(late), EXIT_GRACE_S)
    return Outcome(status=status, failures=failures, results=results, note=note)


def _status(ranks: list[_Rank], attempt: Attempt, failures: tuple[Failure, ...]) -> tuple[Status, str]:
    """Return the status and one sentence on why it stopped.

    A rank that says "preempted" speaks for all, since saving is done together; what other ranks lose by its end is
    no failure then.
    """
    if attempt.stop.at_once:
        return "interrupted", attempt.stop.reason
    if any(doubt(failure) == 0 for failure in failures):
        return "failed", ""
    for kind, status in STOPS.items():
        told = [rank.said[kind] for rank in ranks if kind in rank.said]
        if told:
            return status, told[0]
    return ("failed" if failures else "finished"), ""
