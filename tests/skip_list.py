"""A skip must stand in a list: `skips.toml` holds each test that may skip, with its reason.

Any other skip fails the session: a test that silently doesn't run is worse than none.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("skips.toml")


def allowed_skips(path: Path = LIST) -> dict[str, str]:
    """Return pattern of a test's id -> reason.

    Raises:
        pytest.UsageError: an entry without a pattern or a reason.
    """
    allowed = {}
    for entry in tomllib.loads(path.read_text()).get("skip", []):
        if not entry.get("test") or not entry.get("reason"):
            raise pytest.UsageError(f"{path.name}: an entry needs `test` (pattern of ids) and `reason`: {entry}")
        allowed[entry["test"]] = entry["reason"]
    return allowed


def unlisted(skipped: Mapping[str, str], allowed: Iterable[str]) -> dict[str, str]:
    """Return the skipped tests, id -> reason given, that no pattern of `allowed` covers."""
    return {
        test: reason for test, reason in skipped.items() if not any(fnmatchcase(test, pattern) for pattern in allowed)
    }


class SkipList:
    """Collects skips of a session and fails it for those that stand in no list."""

    def __init__(self, allowed: Mapping[str, str]) -> None:
        self.allowed = allowed
        self.skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that skipped; one that failed as expected (`xfail`) counts as run."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a whole module that skipped."""
        if report.skipped:
            self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self.skipped[report.nodeid] = reason

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail a session that passed otherwise."""
        if unlisted(self.skipped, self.allowed) and exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name the culprits."""
        for test, reason in unlisted(self.skipped, self.allowed).items():
            terminalreporter.write_line(
                f"UNLISTED SKIP {test}: {reason}. Put it into tests/skips.toml, or run it.", red=True
            )
