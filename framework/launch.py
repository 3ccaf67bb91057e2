"""`launch(plan)`: start the workers of a frozen plan, restart them if the plan says so, and say how it ended.

Nothing here or in a worker reads the command line: a worker gets the plan as plain data, so the jobs of a sweep can't
start each other again. How processes are started is the launcher plugin's (`make_launcher`); whether a failure is
followed by another attempt is the recovery plugin's (`make_restart_policy`).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Protocol, runtime_checkable

import pluggy

from framework.checkpoint_files import CheckpointError, best_complete, folder_of
from framework.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_RUN_FAILED,
    EXIT_TERMINATED,
    EXIT_USAGE,
    PlanError,
    Problem,
    RunFailedError,
    UsageError,
)
from framework.failures import headline
from framework.plan import STARTS, Checkpoint, Failure, RunPlan
from framework.plugin_manager import manager_for
from framework.run_lock import alone_in

log = logging.getLogger(__name__)

Status = Literal["finished", "failed", "preempted", "interrupted"]

TRAIN = "framework.worker:train"
MAX_TIMEOUT_S = 1e8
"""About three years; torch counts milliseconds in 64 bits, but some of its waits overflow far below that."""
ONE_NOTICE_S = 0.5
"""SIGTERMs closer together are one: `timeout` and schedulers signal the process and its whole group."""


class StopSignals:
    """What this process was told to do by signals while the run goes on; a context manager of the main thread.

    Attributes:
        requested: SIGTERM arrived: all ranks shall save and stop.
        at_once: Ctrl-C, or a second SIGTERM: end now.
        reason: what happened, for the user.
        exit_code: of the program if it ends at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self.at_once = False
        self.reason = ""
        self.exit_code = EXIT_TERMINATED
        self._last = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._on) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:
            self.at_once, self.reason, self.exit_code = True, "Ctrl-C: all ranks were ended.", EXIT_INTERRUPTED
        elif self.requested and now - self._last > ONE_NOTICE_S:
            self.at_once, self.reason = True, "A second SIGTERM: all ranks were ended without saving."
        self.requested = True
        self._last = now


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks.

    Attributes:
        plan: what to run; `ckpt_path` is where this attempt starts from (a path or None, never a word), and
            `fall_back` says whether it was found here.
        number: from 0.
        entry: `module:function` of a `framework.worker.Entry`; what each rank runs.
        stop: what the launcher process was told by signals.
    """

    plan: RunPlan
    number: int
    entry: str
    stop: StopSignals


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended; no rank is alive any more.

    Attributes:
        status: `finished`: every rank delivered its result.
        failures: the cause first, then symptoms and later ones.
        results: global rank -> what its entry returned, of those that finished.
        note: one sentence on why it stopped, if it was asked to.
    """

    status: Status
    failures: tuple[Failure, ...] = ()
    results: Mapping[int, Any] = field(default_factory=dict)
    note: str = ""


class Launcher(Protocol):
    """What `make_launcher` returns.

    Attributes:
        leads: whether this process speaks for the whole run: it calls the launcher's hooks, prints, writes the summary.
            False on all ranks but 0 under an external launcher, where every rank runs `launch`.
        external_attempt: None if `launch` restarts the ranks; under a launcher that does it itself, how often it has,
            as far as this process knows (`Meeting`).
    """

    leads: bool
    external_attempt: int | None

    def run(self, attempt: Attempt) -> Outcome:
        """Run all ranks of `attempt` to their end. Called again for each restart."""
        ...


@runtime_checkable
class Meeting(Protocol):
    """A launcher that restarts the ranks itself, and whose ranks agree on what each alone doesn't know."""

    def meet(self, plan: RunPlan) -> tuple[int, RunPlan]:
        """Return how often all ranks were restarted, and the plan of all. Called once, before `run`. Collective."""
        ...


class RestartPolicy(Protocol):
    """What `make_restart_policy` returns."""

    def why_not(self, failure: Failure, restarts: int, previous: Failure | None, progressed: bool) -> str | None:
        """Return None to start again, or why not, as a sentence for the user.

        Args:
            failure: of this attempt.
            restarts: how many restarts there were so far.
            previous: failure of the attempt before, None if this was the first.
            progressed: whether this attempt left a newer checkpoint than the one it started from.
        """
        ...

    def adapt(self, plan: RunPlan, failures: Sequence[Failure]) -> tuple[RunPlan, str] | None:
        """Return the plan that further attempts need after these failures, and why as a sentence; None = the same one.

        Asked before `why_not`, which isn't asked then: it must come to an end by itself.
        """
        ...


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        status: `preempted` = all ranks saved at one step and stopped because they were asked to.
        exit_code: of the program.
        error: the cause, if it failed.
        reason: one sentence: why it didn't finish; empty if it did.
        restarts: how often it was started again.
        resumed_from: the checkpoint from which the last attempt started, None = from the start.
        results: global rank -> what its entry returned.
        summary: what rank 0's entry returned, if that is a mapping.
    """

    status: Status
    exit_code: int
    error: Failure | None = None
    reason: str = ""
    restarts: int = 0
    resumed_from: str | None = None
    results: Mapping[int, Any] = field(default_factory=dict)

    @property
    def summary(self) -> dict[str, Any]:
        """What rank 0 returned, if that is a mapping, else empty."""
        value = self.results.get(0)
        return dict(value) if isinstance(value, Mapping) else {}

    def describe(self) -> str:
        """Return what to print at the end: the cause first, its rank named, with the traceback. Empty if finished.

        The traceback of settings that were refused helps nobody; it lies in `errors/` of the run's folder.
        """
        if self.error is None:
            return self.reason
        first, trace = _capital(headline(self.error)), self.error.traceback.rstrip()
        if self.error.exit_code == EXIT_USAGE:
            first, trace = headline(self.error), ""  # a sentence that may begin with a setting's name
        parts = [first, trace, self.reason]
        return "\n".join(part for part in parts if part)


def prewarm() -> None:
    """Start importing torch and Lightning for the workers in the background (local launcher); returns at once."""
    from framework import processes

    processes.prewarm()


def launch(plan: RunPlan, entry: str = TRAIN) -> RunResult:
    """Run `plan` to its end, restarts included; returns however it ends.

    Args:
        plan: frozen; every worker gets it as it is, with `ckpt_path` replaced by where the attempt starts.
        entry: `module:function` of what each rank runs; tests name their own.

    Raises:
        PlanError: the plan can't be started (time limit, ranks a host).
        UsageError: no launcher is chosen, there is no checkpoint as `ckpt_path` asks for, or another run is writing
            into the folder.
        RunFailedError: no process could be started.
    """
    problems = check(plan)
    if problems:
        raise PlanError(problems)
    manager = manager_for(plan)
    launcher: Launcher | None = manager.hook.make_launcher(plan=plan)
    if launcher is None:
        raise UsageError("No launcher is chosen, so nobody can start the ranks; type launcher=local.")
    held: AbstractContextManager[None] = nullcontext()
    if launcher.leads:
        Path(plan.run_dir).mkdir(parents=True, exist_ok=True)
        if plan.command == "fit":
            held = alone_in(plan.run_dir)
    with held:
        return _run(plan, entry, manager, launcher)


def _run(plan: RunPlan, entry: str, manager: pluggy.PluginManager, launcher: Launcher) -> RunResult:
    error: BaseException | None = None
    try:
        with StopSignals() as stop:
            result = _attempts(plan, entry, manager, launcher, stop)
        if result.status != "finished":
            error = RunFailedError(result.describe())
    except BaseException as caught:
        error = caught
        raise
    finally:
        if launcher.leads:
            manager.hook.on_run_end(plan=plan, error=error)
    return result


def check(plan: RunPlan) -> list[Problem]:
    """Return what makes `plan` impossible to start, whatever the launcher."""
    problems = []
    if not 0 < plan.timeout_s <= MAX_TIMEOUT_S:
        reason = f"a time limit is more than 0 and at most {MAX_TIMEOUT_S:g} seconds."
        problems.append(Problem(f"timeout_s={plan.timeout_s:g}", reason, "timeout_s=1800"))
    if plan.threads is not None and plan.threads < 1:
        problems.append(Problem(f"threads={plan.threads}", "a rank needs at least one thread.", "threads=1"))
    if plan.num_nodes < 1 or plan.world_size % plan.num_nodes:
        problems.append(
            Problem(f"num_nodes={plan.num_nodes}", f"{plan.world_size} ranks can't be spread evenly over it.")
        )
    return problems


def _attempts(
    plan: RunPlan, entry: str, manager: pluggy.PluginManager, launcher: Launcher, stop: StopSignals
) -> RunResult:
    """Start, and start again as often as the policy allows."""
    if launcher.external_attempt is not None:
        return _one_attempt(plan, entry, manager, launcher, stop)
    policy: RestartPolicy | None = manager.hook.make_restart_policy(plan=plan)
    start = first = _first_start(plan, manager)
    previous: Failure | None = None
    restarts = adaptations = 0
    while True:
        outcome = launcher.run(Attempt(_begun(plan, start, first), restarts, entry, stop))
        if outcome.status != "failed":
            return _result(outcome, stop, restarts, start, outcome.note)
        failure = outcome.failures[0]
        manager.hook.on_worker_failure(plan=plan, failure=failure, attempt=restarts)
        try:
            newest: Checkpoint | None = manager.hook.newest_complete(plan=plan)
        except CheckpointError as error:
            return _result(outcome, stop, restarts, start, f"Not started again: {error}")
        again = newest.path if newest is not None else first
        if policy is None:
            return _result(outcome, stop, restarts, start, "Not started again: no recovery is chosen.")
        adapt = getattr(policy, "adapt", None)  # newer than the protocol's other method
        adapted = None if adapt is None else adapt(plan, outcome.failures)
        if adapted is not None:
            plan, why = adapted
            adaptations += 1
            log.warning("%s", why)
        else:
            why_not = policy.why_not(failure, restarts - adaptations, previous, progressed=again != start)
            if why_not is not None:
                return _result(outcome, stop, restarts, start, why_not)
        if stop.requested:
            return _result(outcome, stop, restarts, start, "Not started again: the run was asked to stop.")
        restarts += 1
        previous, start = failure, again
        log.warning("%s. Restart %d begins from %s.", _capital(headline(failure)), restarts, _why(newest, start))


def _one_attempt(
    plan: RunPlan, entry: str, manager: pluggy.PluginManager, launcher: Launcher, stop: StopSignals
) -> RunResult:
    """Run this process's part of an attempt of a launcher that restarts the ranks itself."""
    number = launcher.external_attempt or 0
    if isinstance(launcher, Meeting):
        number, plan = launcher.meet(plan)
    newest: Checkpoint | None = manager.hook.newest_complete(plan=plan) if number else None
    start = newest.path if newest is not None else _first_start(plan, manager)
    if number and launcher.leads:
        log.warning("Restart %d begins from %s.", number, _why(newest, start))
    first = start if newest is None else None
    outcome = launcher.run(Attempt(_begun(plan, start, first), number, entry, stop))
    return _result(outcome, stop, number, start, outcome.note)


def _first_start(plan: RunPlan, manager: pluggy.PluginManager) -> str | None:
    """Return where a run starts that has nothing of its own yet; resolves `last`, `best`, `auto` and a run's folder."""
    asked, run_dir = plan.ckpt_path, plan.run_dir
    if asked is None:
        return None
    found: Checkpoint | None
    if "://" in asked:
        found = manager.hook.fetch_checkpoint(plan=plan, url=asked)
        if found is None:
            raise UsageError(f"ckpt_path={asked}: nothing here can fetch it; type checkpoint=dcp, or a path.")
        _tell_start(found)
        return found.path
    if asked not in STARTS:
        if not folder_of(asked).is_dir():
            return asked
        run_dir = asked
    if asked == "best":
        found = best_complete(run_dir)
    else:
        found = manager.hook.newest_complete(plan=plan.with_(run_dir=str(Path(run_dir).resolve())))
    if found is not None:
        _tell_start(found)
        return found.path
    if asked == "auto":
        return None
    what = "checkpoint with a score (checkpoint.monitor)" if asked == "best" else "complete checkpoint"
    raise UsageError(f"ckpt_path={asked}: there is no {what} in {run_dir}; type ckpt_path=null to start afresh.")


def _begun(plan: RunPlan, start: str | None, first: str | None) -> RunPlan:
    """Return the plan of an attempt that starts at `start`; `first` is where the run began, None = afresh."""
    named = plan.ckpt_path is not None and (plan.ckpt_path == "best" or "://" in plan.ckpt_path)
    asked = start == plan.ckpt_path or (named and start == first)
    return plan.with_(ckpt_path=start, fall_back=start is not None and not asked)


def _why(newest: Checkpoint | None, start: str | None) -> str:
    """Say which file an attempt starts from, and why that one."""
    if newest is not None:
        return f"{_told(newest)}, the newest complete checkpoint of this run"
    if start is not None:
        return f"{start}, given as ckpt_path, as this run has no complete checkpoint of its own yet"
    return "the start, as there is no complete checkpoint yet"


def _tell_start(found: Checkpoint) -> None:
    """Say where a run begins from, once a host: under torchrun each rank comes here, before its logs are set up."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        log.warning("This run begins from %s.", _told(found))


def _told(found: Checkpoint) -> str:
    return f"{found.path} (step {found.step}, tier {found.tier}, found in {found.found_s:.2f} s)"


def _result(outcome: Outcome, stop: StopSignals, restarts: int, start: str | None, reason: str) -> RunResult:
    error = outcome.failures[0] if outcome.status == "failed" else None
    if outcome.status == "failed":
        code = EXIT_USAGE if error is not None and error.exit_code == EXIT_USAGE else EXIT_RUN_FAILED
    elif outcome.status == "interrupted":
        code = stop.exit_code
    else:
        code = EXIT_PREEMPTED if outcome.status == "preempted" else EXIT_OK
    return RunResult(outcome.status, code, error, reason, restarts, start, outcome.results)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
