"""`recovery=restart`: start again from the newest complete checkpoint after a failure; save and stop on SIGTERM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from framework.errors import EXIT_USAGE
from framework.hookspecs import hookimpl
from framework.plan import Failure, RunPlan

if TYPE_CHECKING:
    from framework.stopping import SaveAndStop


@dataclass(kw_only=True, eq=False)
class Restart:
    """Bounded restarts; a failure that can only repeat itself isn't tried again.

    Attributes:
        max_restarts: attempts after the first one, in the whole run.
    """

    max_restarts: int = 3

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ValueError(f"recovery.max_restarts={self.max_restarts}: it is a count, 0 or more.")

    @hookimpl
    def make_restart_policy(self, plan: RunPlan) -> Restart:
        """Return this plugin: it is the policy."""
        return self

    @hookimpl
    def make_callbacks(self, plan: RunPlan) -> Sequence[SaveAndStop]:
        """Return the callback that saves and stops all ranks when one of them is asked to."""
        from framework.stopping import SaveAndStop

        return [SaveAndStop(plan)]

    def why_not(self, failure: Failure, restarts: int, previous: Failure | None, progressed: bool) -> str | None:
        """Return None to start again, or why not; see `framework.launch.RestartPolicy`."""
        if failure.exit_code == EXIT_USAGE:
            return "Not started again: the settings are at fault."
        same = previous is not None and failure.traceback and failure.message == previous.message
        if same and not progressed:
            return "Not started again: the same error came twice at the same place."
        if restarts >= self.max_restarts:
            return f"Not started again: recovery.max_restarts={self.max_restarts} is used up."
        return None
