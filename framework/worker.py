"""Inside a rank: from a frozen plan to the end of the process.

`main` is what the launchers start, one process a rank. It sets the process up (environment, threads, signals, seeds,
process group), runs the entry (training, unless a test names another), and tells the launcher how it went.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import pluggy
import torch
import torch.distributed as dist

from framework import preemption, process_groups
from framework.errors import PreemptedError, TerminatedError
from framework.failures import failure_of
from framework.plan import RunPlan
from framework.plugin_manager import manager_for

log = logging.getLogger(__name__)

Entry = Callable[[RunPlan, int, pluggy.PluginManager], Any]
"""What a rank does: (plan, global rank, manager) -> something that pickles; the launcher gets it in `RunResult.results`."""

TRAIN = "framework.worker:train"
END = "end"
"""The launcher's word for: another rank failed, flush and leave."""

_launcher: Connection | None = None
_said = threading.Lock()


def main(
    plan: Mapping[str, Any], rank: int, attempt: int, entry: str, env: Mapping[str, str], launcher: Connection
) -> None:
    """Be rank `rank` of a local launcher: the target of the process, never returns normally.

    Args:
        plan: `RunPlan.to_dict()`; its `ckpt_path` is where this attempt starts.
        rank: global rank = local rank.
        attempt: from 0.
        entry: `module:function` of an `Entry`.
        env: the whole environment of this process; `MASTER_PORT` is where the launcher's store listens.
        launcher: both ways: END comes in; `("result", value)`, `("failed", Failure)`, `("preempted", text)` and
            `("terminated", text)` go out.
    """
    global _launcher  # noqa: PLW0603 - one process is one rank
    _launcher = launcher
    _own_process_group()
    threading.Thread(target=_watch, args=(launcher,), name="launcher-watch", daemon=True).start()
    preemption.install()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(env)
    frozen = RunPlan.from_dict(plan)

    def join() -> None:
        process_groups.connect(frozen, rank, attempt, int(env["MASTER_PORT"]))

    sys.exit(work(frozen, rank, entry, join))


def work(plan: RunPlan, rank: int, entry: str, join: Callable[[], None]) -> int:
    """Run `entry` as rank `rank` and report; return the exit code.

    Args:
        plan: of this attempt.
        rank: global rank.
        entry: `module:function`.
        join: makes the process group.
    """
    manager: pluggy.PluginManager | None = None
    result: Any = None
    error: BaseException | None = None
    try:
        set_threads(plan)
        dist.set_debug_level_from_env()  # torch was imported before this environment was known
        manager = manager_for(plan)
        manager.hook.on_worker_start(plan=plan, rank=rank)
        seed(plan)
        join()
        result = load_entry(entry)(plan, rank, manager)
    except BaseException as caught:
        error = caught
        report(caught, rank)
    try:
        if manager is not None:
            manager.hook.on_run_end(plan=plan, error=error)
        if error is None:
            if dist.is_initialized():
                dist.destroy_process_group()
            _say("result", result)
    except BaseException as caught:
        error = error or caught
        report(caught, rank)
    return 0 if error is None else failure_of(rank, error).exit_code


def train(plan: RunPlan, rank: int, manager: pluggy.PluginManager) -> Any:
    """The entry of `train` and `validate`: build the Trainer from the plan, run the plan's command."""
    from framework.trainer import run

    return run(plan, manager)


def report(error: BaseException, rank: int) -> None:
    """Tell the launcher why this rank ends, as early as it is known; the first call counts.

    Called by `work`, and by the Trainer's `on_exception` before a teardown that may wait for other ranks.
    """
    if isinstance(error, PreemptedError):
        _say("preempted", str(error))
    elif isinstance(error, TerminatedError):
        _say("terminated", str(error))
    else:
        _say("failed", failure_of(rank, error))


def set_threads(plan: RunPlan) -> None:
    """Set the intra-op threads of this rank; None in the plan = cores this process may use / ranks on this host."""
    threads = plan.threads or max(1, len(os.sched_getaffinity(0)) // plan.local_world_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]) if plan.threads is None else threads)


def seed(plan: RunPlan) -> None:
    """Seed Python, NumPy and torch alike on all ranks, and DataLoader workers by rank."""
    from lightning.pytorch import seed_everything

    seed_everything(plan.seed, workers=True, verbose=False)


def load_entry(entry: str) -> Entry:
    """Import `module:function`."""
    module, _, name = entry.partition(":")
    function: Entry = getattr(importlib.import_module(module), name)
    return function


def _say(kind: str, content: object) -> None:
    """Send one message to the launcher; after a report of failure nothing more is said. No launcher: nothing to do."""
    global _launcher  # noqa: PLW0603
    with _said:
        if _launcher is None:
            return
        try:
            _launcher.send((kind, content, time.time()))
        except (BrokenPipeError, ConnectionResetError):
            log.warning("The launcher is gone; this rank's '%s' wasn't told.", kind)
        if kind != "result":
            _launcher = None


def _own_process_group() -> None:
    """Make this rank and its later children one process group, which ends as one and doesn't see the terminal's Ctrl-C."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _watch(launcher: Connection) -> None:
    """Wait for the launcher's word or its end; then end this process and its children at once.

    Runs in a thread of its own, because the main thread may wait in a collective for a rank that is gone.
    """
    try:
        told = launcher.recv()
    except (EOFError, OSError):
        told = None
    if told == END:
        for handler in logging.getLogger().handlers:
            handler.flush()
        sys.stdout.flush()
        sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)
