"""Checkpoints that are written beside the steps hold the state of their own step, and never half of it (P18)."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from plans import make_plan, option
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from framework import Trainer
from framework import checkpoint_files as files
from framework.testing import RanksError
from framework.versions import LIVES, next_life
from framework_plugins.checkpoint import staging, storage

SLOW_S = 0.5
KILOBYTES = 400


class Scalar(LightningModule):
    """w starts at 0 and its gradient is 1: after n steps of SGD with lr 1 it is -n."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.w.sum() + 0 * batch.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.5)


class Watch(Callback):
    """Notes how long each step took, and whether a save was in flight at its end."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, bool]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        saver = trainer.checkpoint_callbacks[0]
        self.steps.append((trainer.global_step, saver.store.saving))


def slow_writer(delay_s: float, fails: Sequence[int] = ()) -> Any:
    """Delay writing, and let rank 1's fail at the given saves, counted from 1."""
    original, saves = storage.write_tensors, [0]

    def write(path: Path, *args: Any) -> Any:
        time.sleep(delay_s)
        saves[0] += 1
        if saves[0] in fails and path.name == storage.file_name(1):
            raise OSError(28, "No space left on device", str(path))
        return original(path, *args)

    storage.write_tensors = write
    return original


def train(run_dir: str, strategy: str | None, steps: int, mode: str, fails: Sequence[int] = (), **more: Any) -> Any:
    """Train with a save every three steps; return what `Watch` saw."""
    world = 1 if strategy is None else 2
    plan = make_plan(
        world, strategy=strategy, run_dir=run_dir, trainer={"max_steps": steps, "max_epochs": -1},
        components={"checkpoint": option("checkpoint", "dcp", every_n_steps=3, mode=mode, save_top_k=-1, **more)},
    )  # fmt: skip
    original = slow_writer(SLOW_S, fails)
    watch = Watch()
    try:
        Trainer(plan, callbacks=[watch]).fit(Scalar(), DataLoader(torch.ones(64, 1)))  # type: ignore[arg-type]
    finally:
        storage.write_tensors = original
    return watch.steps


def saved(run_dir: Path, step: int) -> tuple[float, float, int]:
    """Return weight, momentum and step of a checkpoint."""
    path = files.folder_of(run_dir) / files.step_name(step)
    mark = files.read_mark(path)
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= {name.partition("@")[0]: tensor for name, tensor in load_file(file).items()}
    return float(tensors["model.w"][0]), float(tensors["optimizer.0.w.momentum_buffer"][0]), mark.step


WEIGHTS = {3: -4.25, 4: -6.125, 6: -10.03125}


@pytest.mark.parametrize("strategy", [None, "ddp", "fsdp"])
def test_p18_a_checkpoint_holds_its_own_step(pool: Any, tmp_path: Path, strategy: str | None) -> None:
    (steps, *_) = pool.run(
        train, 1 if strategy is None else 2, str(tmp_path), strategy, 7, "async", process_group=False
    )
    assert any(saving for step, saving in steps if step in (4, 5)), f"no step was made beside a save: {steps}"
    for step in (3, 6):
        weight, momentum, count = saved(tmp_path, step)
        assert (weight, count) == (WEIGHTS[step], step)
        assert momentum == pytest.approx(2 * (1 - 0.5**step))
    assert saved(tmp_path, 7)[2] == 7, "the last one is complete when fit returns"
    assert (files.folder_of(tmp_path) / files.LAST).resolve().name == files.step_name(7)


class Meddle(Callback):
    """Changes momentum in place where only an optimizer's step may."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            for state in trainer.optimizers[0].state.values():
                state["momentum_buffer"].mul_(2)


class Held(Callback):
    """Notes how long the step after the save was held: it lies between the gradients' zeroing and the batch's end."""

    def __init__(self) -> None:
        self.began = self.seconds = 0.0

    def on_before_zero_grad(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            self.seconds = time.perf_counter() - self.began


class SaveBeforeTheUpdate(Scalar):
    """Saves at a moment of its own: gradients are there, and the update is what comes next."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == 3:
            self.trainer.save_checkpoint(files.folder_of(self.trainer.default_root_dir) / "own")


def train_slowly_copied(
    run_dir: str, strategy: dict[str, Any] | str | None, world: int, meddle: bool, module: Any = Scalar, every: int = 3
) -> float:
    """Train for four steps; momentum is copied slowly at the third. Return for how long the fourth was held."""
    copy = staging._copy

    def slow(items: Any) -> None:
        if any(name.startswith(staging.STEADY) for name, *_ in items):
            time.sleep(SLOW_S)
        copy(items)

    components = {"checkpoint": option("checkpoint", "dcp", every_n_steps=every, mode="async", save_top_k=-1)}
    if isinstance(strategy, dict):
        components["strategy"], strategy = strategy, None
    plan = make_plan(
        world, strategy=strategy, run_dir=run_dir, trainer={"max_steps": 4, "max_epochs": -1}, components=components
    )
    staging._copy = slow
    held = Held()
    try:
        trainer = Trainer(plan, callbacks=[held, *([Meddle()] if meddle else [])])
        trainer.fit(module(), DataLoader(torch.ones(64, 1)))  # type: ignore[arg-type]
    finally:
        staging._copy = copy
    return held.seconds


ZERO = [option("strategy", "deepspeed", stage=stage) for stage in (1, 3)]


@pytest.mark.parametrize("strategy", [None, "ddp", "fsdp", *ZERO])
def test_a_step_waits_for_the_copies_of_what_it_changes(pool: Any, tmp_path: Path, strategy: Any) -> None:
    world = 1 if strategy is None else 2
    held = pool.run(train_slowly_copied, world, str(tmp_path), strategy, world, False, process_group=False)
    assert max(held) > SLOW_S / 2
    assert saved(tmp_path, 3) == (WEIGHTS[3], 1.75, 3)


@pytest.mark.parametrize("strategy", [None, "fsdp"])
def test_whoever_saves_just_before_an_update_waits_for_all_copies(pool: Any, tmp_path: Path, strategy: Any) -> None:
    world, args = (1, 2)[strategy is not None], (SaveBeforeTheUpdate, 100)
    pool.run(train_slowly_copied, world, str(tmp_path), strategy, world, False, *args, process_group=False)
    (path,) = tmp_path.rglob("own")
    names = {file for file in path.iterdir() if file.suffix == ".safetensors"}
    values = {name.partition("@")[0]: tensor for file in names for name, tensor in load_file(file).items()}
    assert float(values["optimizer.0.w.momentum_buffer"][0]) == 1.75


@pytest.mark.parametrize("strategy", [None, "ddp", "fsdp"])
def test_what_changes_while_it_is_copied_is_no_checkpoint(pool: Any, tmp_path: Path, strategy: str | None) -> None:
    world = 1 if strategy is None else 2
    with pytest.raises(RanksError, match=r"momentum_buffer was changed outside of an optimizer's step while"):
        pool.run(train_slowly_copied, world, str(tmp_path), strategy, world, True, process_group=False)
    assert not list(files.folder_of(tmp_path).glob("step-000003"))


def test_p18_ending_at_once_leaves_a_complete_file(pool: Any, tmp_path: Path) -> None:
    pool.run(train, 2, str(tmp_path), "ddp", 3, "async", process_group=False)
    assert saved(tmp_path, 3) == (WEIGHTS[3], 1.75, 3)


@pytest.mark.parametrize("steps", [5, 9])
def test_p18_a_writer_that_fails_is_told(pool: Any, tmp_path: Path, steps: int) -> None:
    """At the end, or at the next save; on all ranks, and what was saved before is intact."""
    with pytest.raises(
        RanksError, match=r"Saving .*step-000003 failed on rank 1: OSError.*No space left.*intact"
    ) as told:
        pool.run(train, 2, str(tmp_path), "fsdp", steps, "async", [1], process_group=False)
    assert "rank 0" in str(told.value)
    assert not list(files.folder_of(tmp_path).glob("step-*"))


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_training_goes_on_without_a_checkpoint_where_that_is_asked_for(pool: Any, tmp_path: Path, mode: str) -> None:
    more = {"on_failure": "go_on"}
    (steps, _) = pool.run(partial(train, **more), 2, str(tmp_path), "fsdp", 7, mode, [2], process_group=False)
    assert steps[-1][0] == 7
    good, damaged = files.marks(files.folder_of(tmp_path))
    assert ([mark.step for mark in good], damaged) == ([3, 7], [])
    assert saved(tmp_path, 3)[0] == WEIGHTS[3]


class MakesRoom(Callback):
    """Lets `lives` be written after a step, and keeps what was said."""

    def __init__(self, run_dir: str, after: int) -> None:
        self.file, self.after, self.said = Path(run_dir) / LIVES, after, [""]
        listener = logging.Handler()
        listener.emit = lambda record: self.said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("framework_plugins.checkpoint.callback").addHandler(listener)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == self.after:
            self.file.rmdir()


def train_without_lives(run_dir: str, on_failure: str) -> list[str]:
    """Save every two steps to step 7; `lives` can't be written before step 5."""
    (Path(run_dir) / LIVES).mkdir(exist_ok=True)
    room = MakesRoom(run_dir, 5)
    checkpoint = option("checkpoint", "dcp", every_n_steps=2, save_top_k=-1, on_failure=on_failure)
    plan = make_plan(2, strategy="ddp", run_dir=run_dir, trainer={"max_steps": 7, "max_epochs": -1},
                     components={"checkpoint": checkpoint})  # fmt: skip
    Trainer(plan, callbacks=[room]).fit(Scalar(), DataLoader(torch.ones(64, 1)))  # type: ignore[arg-type]
    return room.said


def test_no_state_carries_a_life_that_could_not_be_noted(pool: Any, tmp_path: Path) -> None:
    """A life that couldn't be noted would share its number with the next one, and the older of two states count."""
    (said, _) = pool.run(train_without_lives, 2, str(tmp_path), "go_on", process_group=False)
    told = [line for line in said if "lives that the run begins failed on rank 0" in line]
    assert len(told) == 3, "at the start, and at both saves that were lost"
    assert all("Training goes on, as checkpoint.on_failure=go_on." in line for line in told)
    good, damaged = files.marks(files.folder_of(tmp_path))
    assert ([(mark.step, mark.life) for mark in good], damaged) == ([(6, 1), (7, 1)], [])
    assert next_life(tmp_path) == 2


def test_a_run_that_may_lose_nothing_is_refused_at_its_start(pool: Any, tmp_path: Path) -> None:
    with pytest.raises(RanksError, match=r"lives that the run begins failed on rank 0"):
        pool.run(train_without_lives, 2, str(tmp_path), "end", process_group=False)
    assert (tmp_path / LIVES).is_dir(), "no step was made"


def test_a_last_save_that_fails_is_a_failure(pool: Any, tmp_path: Path) -> None:
    """Nothing comes after it: going on would leave nothing and say nothing."""
    with pytest.raises(RanksError, match=r"Saving .*step-000003 failed on rank 1"):
        pool.run(partial(train, on_failure="go_on"), 2, str(tmp_path), "fsdp", 3, "async", [1, 2], process_group=False)


SMALL_DISK = """
set -e
mkdir -p run/checkpoints
mount -t tmpfs -o size={kilobytes}k tmpfs run/checkpoints
"$0" -m framework +strategy=fsdp devices=2 run_dir=run trainer.max_steps=6 checkpoint.every_n_steps=2 threads=1 \\
    model.width=16 model.layers=2 model.heads=2 model.context=16 global_batch_size=8 trainer.limit_val_batches=1 \\
    checkpoint.on_failure={on_failure} recovery=none || echo "exit code $?"
ls run/checkpoints
"$0" -m framework export run
"""


@pytest.mark.parametrize(("on_failure", "reached"), [("go_on", "after 6 steps"), ("end", "")])
def test_a_full_disk(tmp_path: Path, on_failure: str, reached: str) -> None:
    """A real one: there is room for one checkpoint and a half; the first stays good in any case.

    What goes on ends with an error as well, as there is no room for the last one either, but it has made all steps.
    """
    script = SMALL_DISK.format(kilobytes=KILOBYTES, on_failure=on_failure)
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, sys.executable],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    text = " ".join((done.stdout + done.stderr).split())  # a table breaks lines
    if "unshare" in done.stderr and "Operation not permitted" in done.stderr:
        pytest.skip("this machine doesn't let a test mount a small disk")
    assert done.returncode == 0, text
    assert "No space left on device" in text
    assert "exit code 1" in text
    assert reached in text
    assert "last step-000002 " in text
    assert "elements: model.safetensors" in text, "the first one is whole"
    assert ("Training goes on, as checkpoint.on_failure=go_on." in text) == (on_failure == "go_on")


def test_waiting_is_what_sync_says(pool: Any, tmp_path: Path) -> None:
    (steps, _) = pool.run(train, 2, str(tmp_path), "ddp", 4, "sync", process_group=False)
    assert not any(saving for _, saving in steps)


def test_auto_waits_for_the_first_and_not_for_the_second(pool: Any, tmp_path: Path) -> None:
    (steps, _) = pool.run(train, 2, str(tmp_path), "ddp", 8, "auto", process_group=False)
    beside = {step for step, saving in steps if saving}
    assert not beside & {3, 4, 5}
    assert beside & {6, 7, 8}
