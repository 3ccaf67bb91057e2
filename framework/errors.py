"""Every error that a user can meet, and the program's one table of exit codes.

An error message is one sentence: what was asked, why it can't be, what to type instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

EXIT_OK = 0
EXIT_RUN_FAILED = 1
EXIT_USAGE = 2
"""Bad input or a plan that was refused; nothing was started."""
EXIT_PREEMPTED = 75
"""SIGTERM arrived, all ranks saved at one step and stopped (EX_TEMPFAIL: run the same command again)."""
EXIT_INTERRUPTED = 130
"""Ctrl-C."""
EXIT_TERMINATED = 143
"""SIGTERM arrived and nothing was saved: too early, twice, or no recovery was chosen."""


class FrameworkError(Exception):
    """Base of all errors of the framework; `exit_code` is what the command line returns."""

    exit_code = EXIT_RUN_FAILED


class UsageError(FrameworkError):
    """The command line or a config can't be understood."""

    exit_code = EXIT_USAGE


class PluginError(UsageError):
    """A plugin is broken, missing, or conflicts with another; names its distribution."""


@dataclass(frozen=True)
class Problem:
    """One complaint about a plan.

    Attributes:
        setting: what was asked, as the user would type it (`pp.microbatches=3`).
        reason: why it can't be.
        fix: what to type instead; empty if there is nothing to type.
    """

    setting: str
    reason: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.setting}: {self.reason.rstrip('.')}." + (f" Type {self.fix}." if self.fix else "")


class PlanError(UsageError):
    """A plan was refused; carries all complaints, not only the first."""

    def __init__(self, problems: Iterable[Problem], nearest: Iterable[str] = ()) -> None:
        self.problems = tuple(problems)
        self.nearest = tuple(nearest)
        lines = [str(problem) for problem in self.problems]
        if self.nearest:
            lines.append("Nearest mixes that work: " + " | ".join(self.nearest))
        super().__init__("\n".join(lines))


class RunFailedError(FrameworkError):
    """A started run ended badly; the message leads with the first failing rank's own error."""


class PreemptedError(FrameworkError):
    """A run saved and stopped because it was asked to."""

    exit_code = EXIT_PREEMPTED
