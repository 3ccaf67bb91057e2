"""Which of several failures is the cause, and how it is told: signals by name, symptoms never before causes."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from framework.errors import EXIT_RUN_FAILED, EXIT_USAGE, FrameworkError
from framework.plan import Failure

SYMPTOM = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|DistNetworkError|DistStoreError|gloo::|"
    r"recvValue failed|sendBytes failed|failed to recv|socket (closed|timeout)|remote process exited|"
    r"ncclRemoteError|NCCL communicator was aborted|Horovod has been shut down",
    re.IGNORECASE,
)
"""What a rank says when another one is gone. Never the headline while any other failure is known."""

OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|cannot allocate memory|bad_alloc|^MemoryError", re.IGNORECASE
)
"""What torch's allocators, C++ and Python say when there is no memory left."""

SYMPTOM_SIGNALS = (signal.SIGABRT, signal.SIGTERM)
"""Signals that may follow from another rank's end: gloo calls `std::terminate` when it loses a peer in a callback."""


def failure_of(rank: int, error: BaseException, at: float | None = None) -> Failure:
    """Describe an exception of `rank`; `at` is the time it was raised, seconds since the epoch (None = now)."""
    code = error.exit_code if isinstance(error, FrameworkError) else EXIT_RUN_FAILED
    if type(error).__name__ == "MisconfigurationException":  # Lightning's UsageError; importing it takes seconds
        code = EXIT_USAGE
    text = "".join(traceback.format_exception(error))
    message = "".join(traceback.format_exception_only(error)).strip()
    return Failure(rank=rank, message=message, exit_code=code, time=at or time.time(), traceback=text)


def death_of(rank: int, exit_code: int, at: float) -> Failure:
    """Describe a process that ended without a word; a negative `exit_code` is the number of a signal."""
    if exit_code < 0:
        return Failure(rank=rank, message=f"killed by {signal_name(-exit_code)}", exit_code=exit_code, time=at)
    message = f"the process ended by itself (exit code {exit_code}) before its work was done"
    return Failure(rank=rank, message=message, exit_code=exit_code or EXIT_RUN_FAILED, time=at)


def signal_name(number: int) -> str:
    """Return `signal 9 (SIGKILL)`."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def oom_kills() -> int:
    """Return how many processes of this control group the kernel has killed for memory; 0 where it doesn't say."""
    group = Path("/proc/self/cgroup")
    places = [line.rpartition(":")[2].lstrip("/") for line in group.read_text().splitlines()] if group.exists() else []
    for place in (*places, ""):
        events = Path("/sys/fs/cgroup", place, "memory.events")
        if events.is_file():
            counts = dict(line.split() for line in events.read_text().splitlines())
            return int(counts.get("oom_kill", 0))
    return 0


def doubt(failure: Failure) -> int:
    """Return how likely a failure is only what an innocent rank shows when another is gone: 0 = not at all, to 2."""
    if failure.exit_code < 0 and not failure.traceback:
        return 1 if -failure.exit_code in SYMPTOM_SIGNALS else 0
    return 2 if SYMPTOM.search(failure.message) else 0


def by_cause(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Sort: causes before symptoms, each by time; the first is the headline."""
    return tuple(sorted(failures, key=lambda failure: (doubt(failure), failure.time)))


def headline(failure: Failure) -> str:
    """Return one line: `rank 1 failed: RuntimeError: boom`, `rank 1 was killed by signal 9 (SIGKILL)`.

    What a rank refused is a sentence already, and returned as it is.
    """
    if failure.exit_code == EXIT_USAGE and failure.traceback:
        return failure.message.partition(": ")[2] or failure.message
    if failure.traceback:
        return f"rank {failure.rank} failed: {failure.message}"
    verb = " was " if failure.message.startswith("killed") else ": "
    return f"rank {failure.rank}{verb}{failure.message}"


def write_error_file(run_dir: str, failure: Failure, attempt: int) -> Path:
    """Write `errors/rank_<r>.json` in the run's folder (whole or not at all) and return its path.

    A later attempt's file replaces an earlier one's, which is kept as `rank_<r>.attempt_<n>.json`.
    """
    folder = Path(run_dir) / "errors"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{failure.rank}.json"
    if path.exists():
        earlier = json.loads(path.read_text())["attempt"]
        path.replace(folder / f"rank_{failure.rank}.attempt_{earlier}.json")
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({"attempt": attempt, **asdict(failure)}, indent=1))
    part.replace(path)
    return path
