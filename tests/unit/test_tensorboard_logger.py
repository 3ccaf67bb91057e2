"""`logger=tensorboard`: one folder, the axes of `metrics.csv`, and no steps twice after a restart."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from framework.clock import Clock
from framework_plugins.logger.tensorboard import TensorBoard


def attempt(folder: Path, start: int, steps: list[int], offset: float) -> None:
    """Log `offset + step` at each of `steps`, as an attempt that resumed from step `start`."""
    logger = TensorBoard(str(folder))
    logger.clock = Clock(lambda: logger.clock.step * 8 if logger.clock else 0)
    logger.clock.start_step = start
    _ = logger.experiment  # Lightning makes the file before it restores a checkpoint
    for step in steps:
        logger.clock.step = step
        logger.log_metrics({"train_loss": offset + step}, step=999)
    logger.finalize("success")


def test_a_restart_replaces_the_steps_that_are_done_again(tmp_path: Path) -> None:
    attempt(tmp_path, 0, [1, 2, 3, 4, 5], 0.0)
    attempt(tmp_path, 2, [3, 4], 100.0)
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]
    assert len(list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))) == 2
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train_loss")] == [(1, 1), (2, 2), (3, 103), (4, 104)]
    assert [(event.step, event.value) for event in events.Scalars("samples")] == [(1, 8), (2, 16), (3, 24), (4, 32)]
