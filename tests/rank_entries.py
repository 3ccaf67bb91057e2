"""What the ranks do in tests of launching: small functions over gloo, steered by `plan.facts`."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

from framework import hookimpl, preemption, process_groups, worker
from framework.plan import Checkpoint, RunPlan


def meet(plan: RunPlan, rank: int, manager: Any) -> dict[str, Any]:
    """Sum the ranks' numbers, and say where this rank is."""
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return {
        "sum": total.item(),
        "world": dist.get_world_size(),
        "run_id": plan.run_id,
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "torch_random": torch.rand(1).item(),
        "python_random": random.random(),
        "argv": sys.argv,
        "env": dict(os.environ),
        "ckpt_path": plan.ckpt_path,
    }


def fail(plan: RunPlan, rank: int, manager: Any) -> None:
    """Fail on rank `facts.rank` in the manner `facts.how`, while the other ranks go on meeting."""
    how = plan.facts["how"]
    culprit = rank == plan.facts["rank"]
    if how == "after_barrier":
        dist.barrier()
        if culprit:
            raise ValueError("boom7")
        return
    for step in range(10_000):
        if culprit and step == 3:
            _fail(how)
        dist.all_reduce(torch.ones(1))


def _fail(how: str) -> None:
    if how == "raise":
        raise ValueError("boom7")
    if how == "raise_and_hang":
        try:
            raise ValueError("boom7")
        except ValueError as error:
            worker.report(error, int(os.environ["RANK"]))  # as on an exception in the Trainer
            time.sleep(1000)
    if how == "loader":
        for _ in DataLoader(_Broken(), num_workers=1):
            pass
    if how == "exit":
        os._exit(3)
    if how == "early_exit":
        os._exit(0)
    if how == "system_exit":
        sys.exit(4)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(1000)


class _Broken(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise ValueError("boom7")


@dataclass(kw_only=True, eq=False)
class FailsInSetup:
    """A plugin that fails at the first moment of a worker."""

    rank: int

    @hookimpl
    def on_worker_start(self, rank: int) -> None:
        """Raise on one rank, before there is a process group."""
        if rank == self.rank:
            raise ValueError("boom7")


@dataclass(kw_only=True, eq=False)
class Journal:
    """A plugin that writes down what is called in the launcher."""

    path: str

    def _write(self, text: str) -> None:
        with open(self.path, "a") as file:
            file.write(text + "\n")

    @hookimpl
    def on_worker_failure(self, failure: Any, attempt: int) -> None:
        """Note the failure."""
        self._write(f"failure of rank {failure.rank} in attempt {attempt}")

    @hookimpl
    def on_run_end(self, error: Any) -> None:
        """Note the end, in the launcher only."""
        if "RANK" not in os.environ:
            self._write(f"end: {type(error).__name__}")


@dataclass(kw_only=True, eq=False)
class StepFiles:
    """A plugin with checkpoints that are one number each: `checkpoints/step_<n>`."""

    @hookimpl
    def newest_complete(self, plan: RunPlan) -> Checkpoint | None:
        """Return the highest."""
        steps = [int(path.name.removeprefix("step_")) for path in Path(plan.run_dir).glob("checkpoints/step_*")]
        if not steps:
            return None
        return Checkpoint(path=f"{plan.run_dir}/checkpoints/step_{max(steps)}", step=max(steps))


def unpicklable(plan: RunPlan, rank: int, manager: Any) -> Any:
    """Return what can't travel."""
    return lambda: rank


def never_exits(plan: RunPlan, rank: int, manager: Any) -> str:
    """Finish, but leave a thread behind that keeps rank 1 alive."""
    if rank == 1:
        threading.Thread(target=time.sleep, args=(1000,)).start()
    return "done"


def group_timeouts(plan: RunPlan, rank: int, manager: Any) -> dict[str, float]:
    """Make groups in all the ways there are, and return the time limit of each."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    mesh["dp", "tp"]._flatten("all")
    dist.new_group([0, 1], group_desc="own")
    dist.new_group([0], group_desc="first")
    dist.new_group([rank], group_desc="alone", use_local_synchronization=True)
    return process_groups.timeouts()


def hang_in_mesh(plan: RunPlan, rank: int, manager: Any) -> None:
    """Rank 1 doesn't come to a collective of a group of a mesh."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    group = dist.new_group([0, 1])
    dist.barrier()
    if rank == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1), group=group if plan.facts["group"] == "new_group" else mesh.get_group("tp"))


def steps(plan: RunPlan, rank: int, manager: Any) -> dict[str, Any]:
    """Count to `facts.steps`, one all-reduce each, the way a Trainer would: agree on stopping, save, go on from a file.

    Other facts: `every` (steps between saves), `kill_at` (list of [attempt, rank, step]), `save_s` (seconds a save
    takes), `step_s`, `arm`, `loader` (start DataLoader workers), `child` (start a program).
    """
    facts = plan.facts
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    first = int(Path(plan.ckpt_path).read_text()) if plan.ckpt_path else 0
    log = logging.getLogger("test")
    if facts.get("loader"):
        batches = iter(DataLoader(torch.arange(1000), num_workers=2))
        next(batches)
    if facts.get("child"):
        subprocess.Popen(["sleep", "1000"])
    if facts.get("arm", True):
        preemption.arm()
    seen = []
    for step in range(first + 1, facts["steps"] + 1):
        time.sleep(facts.get("step_s", 0.0))
        if [attempt, rank, step] in facts.get("kill_at", []):
            os.kill(os.getpid(), signal.SIGKILL)
        if [attempt, rank, step] in facts.get("raise_at", []) or rank == facts.get("always_raise"):
            raise ValueError("boom7")
        flag = torch.tensor(float(preemption.requested()))
        dist.all_reduce(flag)
        preemption.agree(flag.item() > 0)
        seen.append(step)
        _note(plan, rank, {"attempt": attempt, "step": step, "pid": os.getpid(), "time": time.time()})
        if preemption.agreed() or step % facts.get("every", 1_000_000) == 0:
            _save(plan, rank, step)
        if preemption.agreed():
            log.warning("saved")
            raise preemption.StopRequested(f"SIGTERM: all ranks saved at step {step} and stopped.")
    return {"first": first, "steps": seen, "attempt": attempt, "ckpt_path": plan.ckpt_path}


def _note(plan: RunPlan, rank: int, entry: dict[str, Any]) -> None:
    with open(Path(plan.run_dir) / f"steps_{rank}.jsonl", "a") as file:
        file.write(json.dumps(entry) + "\n")


def _save(plan: RunPlan, rank: int, step: int) -> None:
    dist.barrier()
    with open(Path(plan.run_dir) / "saves.txt", "a") as file:
        file.write(f"{rank} {step}\n")
    time.sleep(plan.facts.get("save_s", 0.0))
    if rank == 0:
        path = Path(plan.run_dir) / "checkpoints" / f"step_{step}"
        path.parent.mkdir(exist_ok=True)
        part = path.with_name(f"part_{step}")
        part.write_text(str(step))
        part.replace(path)
    dist.barrier()
