"""`start`: from the command to the first step, phase by phase; and from `kill -9` of a rank to the next one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.telling import told
from framework.summary import WORKER_SUMMARY, read_summary

WORDS = "+strategy=fsdp +pp=gpipe trainer.max_steps=100000 trainer.limit_val_batches=0 trainer.log_every_n_steps=1"
PHASES = (
    ("compose", "plan.yaml is written: words understood, model checked"),
    ("process", "the process of rank 0 exists"),
    ("trainer", "process group made, Trainer built"),
    ("setup", "model and data handed over"),
    ("train_start", "model cut, wrapped and initialised"),
    ("first_step", "first optimizer step done"),
)
TIME_LIMIT_S = 180.0


def once(folder: Path) -> dict[str, Any]:
    """Start the main job, kill -9 its last rank once it has trained for a while, and stop it after the next first step.

    Returns:
        `start_s`: seconds from the command to each phase; `kill_to_step_s`: from the kill to the first step after it.
    """
    command = [sys.executable, "-m", "framework", *WORDS.split(), f"run_dir={folder}"]
    log = folder.with_suffix(".log").open("w")
    began = time.time()
    run = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        first = _wait(run, folder, lambda found: found["steps"] > 0)
        composed = (folder / "plan.yaml").stat().st_mtime
        timeline = {"compose": composed, **first["timeline"]}
        time.sleep(2.0)
        killed = time.time()
        os.kill(first["pids"][-1], signal.SIGKILL)
        again = _wait(
            run, folder, lambda found: found["attempt"] > first["attempt"] and found["timeline"].get("first_step", 0)
        )
        return {
            "start_s": {phase: timeline[phase] - began for phase, _ in PHASES},
            "kill_to_step_s": again["timeline"]["first_step"] - killed,
        }
    finally:
        _stop(run)
        log.close()


def _wait(run: subprocess.Popen[bytes], folder: Path, done: Any) -> dict[str, Any]:
    """Return the workers' summary once `done` says so.

    Raises:
        RuntimeError: the run ended or took too long; with its output.
    """
    end = time.monotonic() + TIME_LIMIT_S
    while time.monotonic() < end and run.poll() is None:
        found = read_summary(folder / WORKER_SUMMARY)
        if found and done(found):
            return found
        time.sleep(0.02)
    output = folder.with_suffix(".log").read_text()[-4000:]
    raise RuntimeError(f"{'The run ended' if run.poll() is not None else 'Too slow'}:\n{output}")


def _stop(run: subprocess.Popen[bytes]) -> None:
    """End the run as Ctrl-C would; it leaves no process."""
    if run.poll() is None:
        run.send_signal(signal.SIGINT)
    try:
        run.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def measure(rounds: int) -> dict[str, Any]:
    """Return medians over `rounds`, and all rounds."""
    with tempfile.TemporaryDirectory() as folder:
        all_rounds = [once(Path(folder) / f"run{number}") for number in told(range(1, rounds + 1))]
    return {
        "start_s": {phase: median(one["start_s"][phase] for one in all_rounds) for phase, _ in PHASES},
        "kill_to_step_s": median(one["kill_to_step_s"] for one in all_rounds),
        "rounds": json.loads(json.dumps(all_rounds)),
    }


def table(report: Mapping[str, Any]) -> Any:
    """Return the figures as a table."""
    from rich.table import Table

    shown = Table(title=f"Seconds, median of {len(report['rounds'])}: python -m framework +strategy=fsdp +pp=gpipe")
    for name in ("phase", "since the command", "took"):
        shown.add_column(name, justify="left" if name == "phase" else "right")
    before = 0.0
    for phase, meaning in PHASES:
        at = report["start_s"][phase]
        shown.add_row(meaning, f"{at:.2f}", f"{at - before:.2f}")
        before = at
    shown.add_row("kill -9 of a rank to the first step after it", "", f"{report['kill_to_step_s']:.2f}", style="bold")
    return shown
