"""`kill -9` of a rank at a chosen moment of a real training run, and what becomes of the run."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from safetensors.torch import load_file

from framework import testing
from framework.launch import RunResult, launch
from framework.ledger import history
from framework.plan import RunPlan

MIXES: Mapping[str, tuple[str, ...]] = {
    "ddp 2": ("+strategy=ddp", "devices=2"),
    "fsdp 2": ("+strategy=fsdp", "devices=2"),
    "gpipe 2": ("+pp=gpipe", "devices=2"),
    "tp 2": ("+tp=dtensor", "devices=2"),
    "fsdp 2 x 1f1b 2": ("+strategy=fsdp", "+pp=1f1b", "devices=4"),
    "fsdp 2 x tp 2": ("+strategy=fsdp", "+tp=dtensor", "devices=4"),
}
MOMENTS = ("start-up", "before the first checkpoint", "step", "save", "validation")
STEPS = 8
EVERY = 2
VALIDATE_EVERY = 3
SMALL = (
    "model.width=16", "model.layers=2", "model.heads=2", "model.context=16", "global_batch_size=8", "threads=1",
    f"trainer.max_steps={STEPS}", f"trainer.val_check_interval={VALIDATE_EVERY}", "trainer.limit_val_batches=2",
    "trainer.enable_progress_bar=false", f"checkpoint.every_n_steps={EVERY}", "timeout_s=60", "optimizer=adamw",
)  # fmt: skip


class KillAt(Callback):
    """Kills this process at the moments of `kills` that are meant for its rank and attempt.

    Args:
        kills: each `{"attempt", "rank", "moment", "step", "delay_s"}`; `step` counts completed optimizer steps, for
            "step" and "save"; `delay_s` is how long after the beginning of a save.
        mark: file to which the time of each kill is appended.
    """

    def __init__(self, kills: Sequence[Mapping[str, Any]], mark: str) -> None:
        self.mark = mark
        attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
        mine = [kill for kill in kills if (kill["attempt"], kill["rank"]) == (attempt, rank)]
        self.kill = mine[0] if mine else None

    def _is(self, moment: str, step: int | None = None) -> bool:
        return self.kill is not None and self.kill["moment"] == moment and step in (None, self.kill["step"])

    def _die(self) -> None:
        with open(self.mark, "a") as file:
            file.write(f"{time.time()}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Moment "start-up"."""
        if self._is("start-up"):
            self._die()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Moment "before the first checkpoint"."""
        if self._is("before the first checkpoint") and trainer.global_step < EVERY:
            self._die()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Moment "step"."""
        if self._is("step", trainer.global_step):
            self._die()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Moment "save": a while later, in a thread."""
        if self.kill is not None and self._is("save", trainer.global_step):
            threading.Timer(self.kill["delay_s"], self._die).start()

    def on_validation_batch_end(self, *_: Any) -> None:
        """Moment "validation"."""
        if self._is("validation"):
            self._die()


class FirstStep(Callback):
    """Notes when each attempt's first optimizer step was done (rank 0)."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.done = os.environ["RANK"] != "0"

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the time, once."""
        if not self.done:
            self.done = True
            with open(self.path, "a") as file:
                file.write(f"{time.time()}\n")


def plan_of(mix: str, run_dir: Path, kills: Sequence[Mapping[str, Any]] = (), *more: str) -> RunPlan:
    """Return the plan of a small GPT under a mix, with kills."""
    plan = testing.plan(*MIXES[mix], *SMALL, f"run_dir={run_dir}", *more)
    callbacks = {
        "kill": {
            "_target_": "kills.KillAt",
            "kills": [dict(kill) for kill in kills],
            "mark": str(run_dir / "kills.txt"),
        },
        "first_step": {"_target_": "kills.FirstStep", "path": str(run_dir / "first_steps.txt")},
    }
    return plan.with_(components={**plan.components, "callbacks": callbacks})


def draw(chance: random.Random, mix: str, moment: str, attempt: int = 0) -> dict[str, Any]:
    """Draw rank, step and delay of one kill."""
    world = 4 if " x " in mix else 2
    step = chance.randrange(EVERY, STEPS + 1, EVERY) if moment == "save" else chance.randrange(STEPS)
    return {
        "attempt": attempt,
        "rank": chance.randrange(world),
        "moment": moment,
        "step": step,
        "delay_s": round(chance.uniform(0, 0.1), 4),
    }


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return what the checkpoint of the last step holds, as `weights_of`."""
    return weights_of(run_dir / "checkpoints" / f"step-{STEPS:06d}")


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of model and optimizer in a checkpoint, by file and name."""
    files = sorted(checkpoint.glob("*.safetensors"))
    assert files
    return {
        f"{file.name}:{name}": tensor
        for file in files
        for name, tensor in load_file(file).items()
        if name.startswith(("model.", "optimizer."))
    }


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return the largest norm-wise relative difference of any tensor; infinite if the names differ."""
    if set(one) != set(other):
        return float("inf")
    return max(
        float((one[name].double() - other[name].double()).norm() / max(other[name].double().norm(), 1e-12))
        for name in one
    )


def ledger(run_dir: Path, steps: int = STEPS) -> tuple[list[str], str | None]:
    """Return what is wrong with a run's ledger, and the last link of its chain."""
    segments = history.read(run_dir)
    story, findings = history.history(run_dir, segments)
    segment, step = story.steps[-1]
    assert step == steps
    return [str(one) for one in (*findings, *history.check(story))], segment.records[0][step].chain


def run(plan: RunPlan) -> RunResult:
    """Run a plan in ranks of their own."""
    Path(plan.run_dir).mkdir(parents=True, exist_ok=True)
    return launch(plan)


def times(run_dir: Path, name: str) -> list[float]:
    """Return the times noted in a file of the run."""
    path = run_dir / name
    return [float(line) for line in path.read_text().splitlines()] if path.exists() else []
