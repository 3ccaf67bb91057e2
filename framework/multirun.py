"""What Hydra calls, once a run or once a job of a sweep; and the table of all jobs at the end.

Jobs are isolated: each is composed, checked and run by itself, and what becomes of one disturbs no other. Each leaves a
record in its folder, so that the table also holds jobs that a launcher of Hydra's ran elsewhere.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from framework import job
from framework.compose import examine
from framework.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_RUN_FAILED,
    EXIT_TERMINATED,
    EXIT_USAGE,
    FrameworkError,
)
from framework.plan import RunPlan
from framework.summary import SUMMARY, read_summary, sweep_table

RECORD = "job.json"
"""What became of a job of a sweep, in its folder."""

REFUSED = "not run"
ENDED = (EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_TERMINATED)
"""Exit codes of a job that was told to stop: then the rest of the sweep doesn't start."""

Run = Callable[[RunPlan, Any], int]
"""What to do with a plan and its model; returns the exit code."""


class JobFailedError(CompactHydraException):
    """Tells a sweeper that a job failed: an optimising sweeper must not take it for a number."""


class StopSweepError(KeyboardInterrupt):
    """Ends a sweep because a job was told to stop; not an `Exception`, so that Hydra lets it through."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__()


class SweepFolder(Callback):
    """Remembers where the sweep of this process writes: a callback of Hydra's, named in `train.yaml`."""

    folder: Path | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called once, before the first job."""
        type(self).folder = Path(config.hydra.sweep.dir)


class Task:
    """The function that Hydra calls for each job.

    Args:
        command: `fit` or `validate`.
        prepared: plan and model of a single run, which were checked before its folder was made; None in a sweep.
        run: what to do with a plan; `framework.job.run` or a package's command.
        before_model: called for each job of a sweep before its model is built.
    """

    __name__ = "framework"

    def __init__(
        self,
        command: str,
        prepared: tuple[RunPlan, Any] | None,
        run: Run,
        before_model: Callable[[], None] | None = None,
    ) -> None:
        self.command = command
        self.prepared = prepared
        self.run = run
        self.before_model = before_model
        self.exit_code = EXIT_OK
        self.error: Exception | None = None

    def __call__(self, config: DictConfig) -> float | None:
        """Run one job; return its validation loss (or training loss) for sweepers that minimise."""
        settings = HydraConfig.get()
        folder = Path(settings.runtime.output_dir)
        if settings.mode == RunMode.MULTIRUN:
            return self._job(config, settings, folder)
        assert self.prepared is not None
        plan, model = self.prepared
        try:
            self.exit_code = self.run(plan.with_(run_dir=str(folder)), model)
        except Exception as error:  # the command line says it, in our words and with our exit code, not Hydra
            self.error = error
            return None
        return score(folder)

    def _job(self, config: DictConfig, settings: Any, folder: Path) -> float | None:
        """Run one job of a sweep, whatever happens in it, and leave a record."""
        overrides = [token.lstrip("+") for token in settings.overrides.task if not token.startswith("++run_dir=")]
        job.console().rule(f"job {settings.job.num}: {' '.join(overrides)}", style="bold")
        code, status, error = EXIT_RUN_FAILED, "failed", ""
        try:
            blueprint = examine(config, settings.runtime.choices, command=self.command, run_dir=str(folder))
            plan = blueprint.plan(before_model=self.before_model)
            code = self.run(plan, blueprint.model)
            status = read_summary(folder / SUMMARY).get("status") or ("finished" if code == EXIT_OK else "failed")
        except FrameworkError as refused:
            code, status, error = refused.exit_code, REFUSED, str(refused)
            job.console(stderr=True).print(f"job {settings.job.num} not run:\n{error}", markup=False)
        except Exception as crash:  # a fault of ours or of a plugin's: the other jobs still run
            error = f"{type(crash).__name__}: {crash}"
            traceback.print_exc()
        except KeyboardInterrupt:
            code, status = EXIT_INTERRUPTED, "interrupted"
        record = {
            "number": settings.job.num,
            "overrides": overrides,
            "status": status,
            "exit_code": code,
            "error": error,
        }
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if code in ENDED:
            raise StopSweepError(code)
        if code != EXIT_OK and not settings.sweeper._target_.endswith("BasicSweeper"):
            raise JobFailedError(error.splitlines()[0] if error else f"job {settings.job.num} {status}")
        return score(folder)


def score(folder: Path) -> float | None:
    """Return the loss that a sweeper minimises: of validation, or, without one, the last of training."""
    summary = read_summary(folder / SUMMARY)
    value = summary.get("val_loss")
    value = summary.get("loss_last") if value is None else value
    return None if value is None else float(value)


def records(folder: Path, since: float) -> list[dict[str, Any]]:
    """Return what became of the jobs below `folder` that ended after `since` (seconds since the epoch), by number."""
    found = []
    for path in folder.rglob(RECORD):
        if path.stat().st_mtime >= since:
            record = json.loads(path.read_text(encoding="utf-8"))
            summary = read_summary(path.with_name(SUMMARY))
            found.append({**summary, **record, "error": record["error"] or summary.get("error")})
    return sorted(found, key=lambda record: record["number"])


def conclude(since: float) -> int | None:
    """Print the table of all jobs of this process' sweep and return its exit code; None if there was no job."""
    folder = SweepFolder.folder
    jobs = records(folder, since) if folder is not None and folder.is_dir() else []
    if not jobs:
        return None
    shared = set.intersection(*(set(record["overrides"]) for record in jobs)) if len(jobs) > 1 else set()
    shown = [{**record, "overrides": [word for word in record["overrides"] if word not in shared]} for record in jobs]
    job.console().print(sweep_table(shown))
    return exit_code([record["exit_code"] for record in jobs])


def exit_code(codes: Sequence[int]) -> int:
    """Return one exit code for a sweep: it was stopped, nothing could run, something failed, or all is well."""
    for code in ENDED:
        if code in codes:
            return code
    if all(code == EXIT_USAGE for code in codes):
        return EXIT_USAGE
    return EXIT_RUN_FAILED if any(codes) else EXIT_OK


def now() -> float:
    """Return the time from which records of this sweep count; a second earlier, as file systems round down."""
    return time.time() - 1.0
