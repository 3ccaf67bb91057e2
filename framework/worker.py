"""Inside a rank: from a frozen plan to the end of the process.

`main` is what the launchers start, one process a rank. It sets the process up (environment, threads, signals, seeds,
process group), runs the entry (training, unless a test names another), and tells the launcher how it went.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pluggy
import torch
import torch.distributed as dist

from framework import preemption, process_groups, roll_call
from framework.errors import PreemptedError
from framework.failures import failure_of
from framework.leaving import leave
from framework.plan import RunPlan
from framework.plugin_manager import manager_for

log = logging.getLogger(__name__)

Entry = Callable[[RunPlan, int, pluggy.PluginManager], Any]
"""What a rank does: (plan, global rank, manager) -> what pickles; the launcher gets it in `RunResult.results`."""

TRAIN = "framework.worker:train"
END = "end"
"""The launcher's word for: another rank failed, flush and leave."""

_launcher: Connection | None = None


@dataclass(frozen=True)
class Ended:
    """How this rank's work ended.

    Attributes:
        kind: `result`, `failed` or `preempted` (saved and stopped).
        content: what the entry returned; a `Failure`; or one sentence.
        error: the exception, None for a result.
    """

    kind: str
    content: Any
    error: BaseException | None = None

    @property
    def exit_code(self) -> int:
        """Of the process."""
        return 0 if self.error is None else failure_of(0, self.error).exit_code


@dataclass(frozen=True)
class Place:
    """Where a rank of a local launcher belongs; pickles.

    Attributes:
        rank: global rank = local rank.
        attempt: from 0.
        env: the whole environment of the process; `MASTER_PORT` is where the launcher's store listens.
    """

    rank: int
    attempt: int
    env: Mapping[str, str]


def main(plan: Mapping[str, Any], entry: str, place: Place, launcher: Connection) -> None:
    """Be one rank of a local launcher: the target of the process; ends in `SystemExit`.

    Args:
        plan: `RunPlan.to_dict()`; its `ckpt_path` is where this attempt starts.
        entry: `module:function` of an `Entry`.
        place: who this is.
        launcher: both ways: END comes in; `(Ended.kind, Ended.content)` goes out.
    """
    global _launcher  # noqa: PLW0603 - one process is one rank
    _launcher = launcher
    forked = "framework.fork_server" in sys.modules
    if forked:
        sys.modules["framework.fork_server"].become_rank()
    os.setpgid(0, 0)  # this rank and its children end as one, and don't see the terminal's Ctrl-C
    end_with_parent()
    threading.Thread(target=_watch, args=(launcher,), name="launcher-watch", daemon=True).start()
    # The launcher's way of starting ranks would otherwise be that of their DataLoader workers too: seconds instead of
    # milliseconds each, and data sets that have to pickle. This is Python's own default.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    preemption.reset()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(place.env)
    frozen = RunPlan.from_dict(plan)

    def join() -> None:
        process_groups.connect(frozen, place.rank, place.attempt, int(place.env["MASTER_PORT"]))

    code = work(frozen, place.rank, entry, join).exit_code
    if not forked:  # a forked process ends like that anyway
        leave(code)
    sys.exit(code)


def work(plan: RunPlan, rank: int, entry: str, join: Callable[[], None] | None = None) -> Ended:
    """Run `entry` as rank `rank`, tell the launcher, and return how it ended; never raises.

    Args:
        plan: of this attempt.
        rank: global rank.
        entry: `module:function`.
        join: makes the process group; None if there is one already.
    """
    manager: pluggy.PluginManager | None = None
    result: Any = None
    error: BaseException | None = None
    try:
        set_threads(plan)
        # torch was imported before this environment was known
        dist.set_debug_level_from_env()  # type: ignore[attr-defined]
        manager = manager_for(plan)
        manager.hook.on_worker_start(plan=plan, rank=rank)
        seed(plan)
        if join is not None:
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
                roll_call.leave()
                dist.destroy_process_group()
            _say(Ended("result", result))
            return Ended("result", result)
    except BaseException as caught:
        report(caught, rank)
        if error is None:
            return _ended(caught, rank)
    assert error is not None
    return _ended(error, rank)


def train(plan: RunPlan, rank: int, manager: pluggy.PluginManager) -> Any:
    """The entry of `train` and `validate`: build the Trainer from the plan, run the plan's command."""
    from framework.trainer import run

    return run(plan, manager)


def report(error: BaseException, rank: int) -> None:
    """Tell the launcher why this rank ends, as early as it is known; only the first call counts.

    Called by `work`, and on an exception in the Trainer before its teardown, which may wait for other ranks.
    """
    _say(_ended(error, rank))


def _ended(error: BaseException, rank: int) -> Ended:
    if isinstance(error, PreemptedError):
        return Ended("preempted", str(error), error)
    return Ended("failed", failure_of(rank, error), error)


def set_threads(plan: RunPlan) -> None:
    """Set the intra-op threads of this rank; None in the plan = cores this process may use / ranks on this host."""
    threads = plan.threads or max(1, len(os.sched_getaffinity(0)) // plan.local_world_size)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]) if plan.threads is None else threads)


def seed(plan: RunPlan) -> None:
    """Seed Python, NumPy and torch alike on all ranks, and DataLoader workers by rank.

    As Lightning's `seed_everything` does, and without importing it: that takes seconds, and not every entry trains.
    """
    random.seed(plan.seed)
    np.random.seed(plan.seed)
    torch.manual_seed(plan.seed)
    os.environ |= {"PL_GLOBAL_SEED": str(plan.seed), "PL_SEED_WORKERS": "1"}


def load_entry(entry: str) -> Entry:
    """Import `module:function`."""
    module, _, name = entry.partition(":")
    function: Entry = getattr(importlib.import_module(module), name)
    return function


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies (Linux), even if no Python code can run any more."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _say(ended: Ended) -> None:
    """Tell the launcher, if there is one; after a failure nothing more is said."""
    global _launcher  # noqa: PLW0603
    if _launcher is None:
        return
    try:
        _launcher.send((ended.kind, ended.content))
    except (BrokenPipeError, ConnectionResetError):
        log.warning("The launcher is gone; it wasn't told that this rank ended ('%s').", ended.kind)
    if ended.kind != "result":
        _launcher = None


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
