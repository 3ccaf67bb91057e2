"""One job in the launcher process: the folder, the start screen, the workers, the summary, the end table."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, RenderableType

from framework.plan import FILE, RunPlan
from framework.rank_env import external_rank
from framework.run_lock import alone_in


def claim(folder: Path) -> Path:
    """Make a new folder and return it: `folder`, or, if that exists, `folder-2`, `folder-3`, ...

    Two runs that start within one second never share a folder: `mkdir` is atomic.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            candidate.mkdir()
        except FileExistsError:
            number += 1
        else:
            return candidate


def release(folder: Path, top: Path) -> None:
    """Remove a folder that `claim` made and nobody wrote into, and those above it that are empty too, below `top`."""
    for empty in (folder, *folder.parents):
        if empty == top or top not in empty.parents:
            return
        try:
            empty.rmdir()
        except OSError:  # another run is in it
            return


def plan_yaml(plan: RunPlan) -> str:
    """Return the plan as YAML."""
    return str(yaml.safe_dump(_simple(plan.to_dict()), sort_keys=False, allow_unicode=True))


def _simple(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _simple(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_simple(item) for item in value]
    return value


def read_plan(folder: Path | str) -> RunPlan:
    """Return the plan of an earlier run from its folder."""
    return RunPlan.from_dict(yaml.safe_load((Path(folder) / FILE).read_text(encoding="utf-8")))


def start_screen(plan: RunPlan, model: Any) -> RenderableType:
    """Return the one screen that shows what would run."""
    from framework.describe import describe  # it needs torch

    return describe(plan, model)


def console(*, stderr: bool = False) -> Console:
    """Return a console; where there is no terminal it prints plain lines of the width that `COLUMNS` says, or 120."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else 120
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=stderr)


def run(plan: RunPlan, model: Any) -> tuple[int, dict[str, Any]]:
    """Run a plan to its end; return the exit code and the summary.

    Args:
        plan: frozen.
        model: the LightningModule on the meta device, for the start screen.
    """
    from framework.launch import launch

    outside = external_rank()
    leads = outside is None or outside.rank == 0
    if not leads:
        return launch(plan).exit_code, {}
    folder = Path(plan.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(plan.run_dir) if plan.command == "fit" else nullcontext():
        (folder / FILE).write_text(plan_yaml(plan), encoding="utf-8")
        screen = console()
        screen.print(start_screen(plan, model))
        result = launch(plan)
        from framework.summary import end_table, finish_summary

        error = result.describe() or None
        summary = finish_summary(plan, result.status, result.restarts, error, resumed_from=result.resumed_from)
        screen.print(end_table(summary))
    return result.exit_code, summary
