"""Causes before symptoms, signals by name, error files that replace nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from framework.errors import EXIT_USAGE, UsageError
from framework.failures import by_cause, death_of, doubt, failure_of, headline, write_error_file
from framework.plan import Failure

CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:42135."


def raised(rank: int, error: BaseException, at: float) -> Failure:
    try:
        raise error
    except BaseException as caught:
        return failure_of(rank, caught, at)


def test_the_cause_comes_first_although_it_is_told_last() -> None:
    symptom = raised(0, RuntimeError(CLOSED), at=1.0)
    aborted = death_of(2, -signal.SIGABRT, at=2.0)
    cause = raised(1, ValueError("boom7"), at=3.0)
    later = raised(3, ValueError("boom8"), at=4.0)
    assert [failure.rank for failure in by_cause([symptom, aborted, later, cause])] == [1, 3, 2, 0]


@pytest.mark.parametrize(
    "text",
    [
        CLOSED,
        "Connection reset by peer",
        "[Errno 32] Broken pipe",
        "DistNetworkError: failed to recv, got 0 bytes",
        "DistStoreError: wait timeout",
        "remote process exited or there was a network error, ncclRemoteError",
    ],
)
def test_what_a_lost_peer_looks_like(text: str) -> None:
    assert doubt(raised(0, RuntimeError(text), 0.0)) == 2


@pytest.mark.parametrize(
    "error",
    [
        ValueError("boom7"),
        RuntimeError("Timed out waiting 15000ms for recv operation to complete"),
        MemoryError(),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
)
def test_what_is_a_cause(error: BaseException) -> None:
    assert doubt(raised(0, error, 0.0)) == 0


def test_a_kill_is_a_cause_and_an_abort_may_follow_from_one() -> None:
    assert doubt(death_of(0, -signal.SIGKILL, 0.0)) == 0
    assert doubt(death_of(0, -signal.SIGSEGV, 0.0)) == 0
    assert doubt(death_of(0, -signal.SIGABRT, 0.0)) == 1
    assert doubt(death_of(0, 3, 0.0)) == 0


def test_headlines() -> None:
    assert headline(death_of(1, -9, 0.0)) == "rank 1 was killed by signal 9 (SIGKILL)"
    assert "exit code 3" in headline(death_of(1, 3, 0.0))
    assert headline(raised(2, ValueError("boom7"), 0.0)) == "rank 2 failed: ValueError: boom7"
    assert "signal 64" in headline(death_of(0, -64, 0.0))
    assert headline(raised(1, UsageError("tp.size=3: no."), 0.0)) == "tp.size=3: no.", "a sentence for the user already"


def test_a_users_mistake_keeps_its_exit_code() -> None:
    assert failure_of(0, UsageError("no")).exit_code == EXIT_USAGE
    assert failure_of(0, MisconfigurationException("no")).exit_code == EXIT_USAGE, "Lightning's word for it"
    assert failure_of(0, ValueError("no")).exit_code == 1
    assert death_of(0, 0, 0.0).exit_code == 1, "ending early is a failure, even with code 0"


def test_error_files_of_earlier_attempts_are_kept(tmp_path: Path) -> None:
    for attempt in range(3):
        write_error_file(str(tmp_path), raised(1, ValueError(f"boom{attempt}"), 0.0), attempt)
    told = {path.name: json.loads(path.read_text())["message"] for path in (tmp_path / "errors").iterdir()}
    assert told == {
        "rank_1.json": "ValueError: boom2",
        "rank_1.attempt_0.json": "ValueError: boom0",
        "rank_1.attempt_1.json": "ValueError: boom1",
    }
