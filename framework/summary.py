"""`summary.json`, the tables at the end of a run and of a sweep. Runs in the launcher: no torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from framework.curves import draw_loss
from framework.plan import RunPlan

WORKER_SUMMARY = "worker_summary.json"
"""What rank 0 measured, rewritten every few seconds; a killed run leaves its last state."""

SUMMARY = "summary.json"
"""What the launcher makes of it when the run is over."""

CHECKPOINTS = "checkpoints"

STATES = {"finished": "green", "preempted": "yellow", "interrupted": "yellow", "failed": "red", "not run": "dim"}
"""Values of `status`, with their colour."""


def finish_summary(
    plan: RunPlan, status: str, restarts: int = 0, error: str | None = None, **facts: Any
) -> dict[str, Any]:
    """Write `summary.json` and `loss.png`; called by the launcher once all workers have ended, whatever happened.

    Args:
        plan: the run.
        status: one of `STATES`.
        restarts: how often the workers were started again.
        error: the failing rank's own error, if any.
        facts: anything more that the launcher knows; wins over what the workers wrote.

    Returns:
        What was written. Figures that no worker lived to measure are None.
    """
    folder = Path(plan.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    empty: dict[str, Any] = {
        "steps": 0, "loss_first": None, "loss_last": None, "val_loss": None, "tokens_per_second": None,
        "step_ms_p50": None, "peak_rss_mb": [], "params": None, "params_per_rank": [], "resumed_from": None,
    }  # fmt: skip
    mesh = {axis: getattr(plan.mesh, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
    summary = {
        "status": status,
        "run_id": plan.run_id,
        "name": plan.name,
        "run_dir": plan.run_dir,
        "world_size": plan.world_size,
        "mesh": mesh,
        **empty,
        **read_summary(folder / WORKER_SUMMARY),
        "restarts": restarts,
        "error": error,
        "checkpoints": checkpoints(folder),
        **facts,
    }
    write_summary(folder / SUMMARY, summary)
    first = (summary.get("loss_first_step"), summary["loss_first"])
    title = f"{plan.name}  ({plan.mesh})"
    draw_loss(folder / "metrics.csv", folder / "loss.png", title, first, summary.get("bigram_entropy"))
    return summary


def checkpoints(folder: Path) -> list[str]:
    """Return names of the run's checkpoints, oldest first; hidden names are unfinished ones, links point to one."""
    found = [path for path in (folder / CHECKPOINTS).glob("[!.]*") if not path.is_symlink()]
    return [path.name for path in sorted(found, key=lambda path: (path.stat().st_mtime, path.name))]


def end_table(summary: Mapping[str, Any]) -> RenderableType:
    """Return the table at the end of a run; 80 columns are enough."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    status = summary["status"]
    told = f"{status} after {count(summary['steps'])} steps" + _restarted(summary)
    table.add_row("status", Text(told, style=STATES.get(status, "")))
    table.add_row("training loss", f"{number(summary['loss_first'])} first, {number(summary['loss_last'])} last")
    table.add_row("validation loss", _validation(summary))
    table.add_row("speed", _speed(summary))
    table.add_row("peak memory a rank", _memory(summary))
    names = summary.get("checkpoints") or []
    table.add_row("checkpoints", f"{len(names)}, newest {names[-1]}" if names else "none")
    table.add_row("run_dir", short(summary["run_dir"]))
    if summary.get("error"):
        table.add_row("error", Text(brief(str(summary["error"])), style="red"))
    return table


def sweep_table(jobs: Iterable[Mapping[str, Any]]) -> RenderableType:
    """Return the table at the end of a sweep: one row a job, and below it the error of each job that failed.

    Args:
        jobs: the summary of each job (`finish_summary`), with `overrides` (a list of `key=value`) added; a job that
            never started needs only `status`, `overrides` and `error`.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("job", "state", "ranks", "loss", "val loss", "tokens/s", "peak MiB"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    table.add_column("overrides", overflow="fold")
    errors: list[Text] = []
    for index, job in enumerate(jobs):
        status = job["status"]
        overrides = job.get("overrides") or ()
        table.add_row(
            str(index),
            Text(status, style=STATES.get(status, "")),
            str(job.get("world_size") or ""),
            number(job.get("loss_last")),
            number(job.get("val_loss")),
            count(job.get("tokens_per_second")),
            count(max(job.get("peak_rss_mb") or [], default=None)),
            Text(overrides if isinstance(overrides, str) else " ".join(overrides) or "(none)"),
        )
        if job.get("error"):
            errors.append(Text(f"job {index} {status}: {brief(str(job['error']))}", style="red"))
    return Group(table, *errors)


def short(path: str) -> str:
    """Return a path as one would type it here: relative if it lies below the working directory."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def number(value: float | str | None) -> str:
    """Write a loss: four decimals, `-` for None."""
    return "-" if value is None else f"{float(value):.4f}"


def count(value: float | None) -> str:
    """Write a large number with thousands separated; `-` for None."""
    return "-" if value is None else f"{value:,.0f}"


def read_summary(path: Path) -> dict[str, Any]:
    """Return what a summary file holds; empty if there is none."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def write_summary(path: Path, values: Mapping[str, Any]) -> None:
    """Write a summary in one step, so that readers see the old or the new one."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(_plain(values), indent=2) + "\n", encoding="utf-8")
    new.replace(path)


def _plain(value: Any) -> Any:
    """Return `value` with the numbers that JSON has no word for as text: `nan`, `inf`, `-inf`."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _restarted(summary: Mapping[str, Any]) -> str:
    restarts = summary.get("restarts") or 0
    told = f", {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
    resumed = summary.get("resumed_from")
    return told + (f", resumed from {Path(resumed).name}" if resumed else "")


def _validation(summary: Mapping[str, Any]) -> str:
    entropy = summary.get("bigram_entropy")
    return number(summary["val_loss"]) + ("" if entropy is None else f" (bigram entropy of that text {entropy:.4f})")


def _speed(summary: Mapping[str, Any]) -> str:
    tokens, samples, p50 = (summary.get(key) for key in ("tokens_per_second", "samples_per_second", "step_ms_p50"))
    rate = f"{count(tokens)} tokens/s" if tokens is not None else f"{count(samples)} samples/s"
    return rate + ("" if p50 is None else f", {p50:,.1f} ms a step (median)")


def _memory(summary: Mapping[str, Any]) -> str:
    peaks: Sequence[float] = summary.get("peak_device_mb") or summary.get("peak_rss_mb") or []
    if not peaks:
        return "-"
    if len(peaks) > 8:
        return f"{count(min(peaks))} to {count(max(peaks))} MiB over {len(peaks)} ranks"
    return " ".join(count(peak) for peak in peaks) + " MiB"


def brief(error: str) -> str:
    """Return an error's first line, and of a sample that couldn't be read why and which, which a worker tells last."""
    lines = error.strip().splitlines() or ["no message"]
    if len(lines) > 1 and lines[-1].endswith("was being read."):
        return " ".join(dict.fromkeys([lines[0], lines[-2], lines[-1]]))
    return lines[0]
