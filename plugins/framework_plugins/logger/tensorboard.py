"""`logger=tensorboard`: TensorBoard events in `run_dir/tensorboard`, one version a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from framework.clock import Clock


class TensorBoard(TensorBoardLogger):
    """Lightning's TensorBoardLogger with a fixed place and the axes of `metrics.csv`.

    Written by global rank 0 only. A restarted or resumed run adds a second event file to the same folder and marks the
    step that it starts from, so that TensorBoard hides the steps that are done again.

    Args:
        save_dir: folder that gets `version` as its sub-folder.
        version: name of that folder.
        flush_secs: seconds between two writes to disk.
    """

    def __init__(self, save_dir: str, version: str = "tensorboard", flush_secs: int = 30) -> None:
        super().__init__(save_dir, name="", version=version, default_hp_metric=False, flush_secs=flush_secs)
        self.clock: Clock | None = None
        """Set by the framework's Trainer; None (any other Trainer): Lightning's step, and no samples curve."""
        self._started = False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write one point of each metric at the optimizer steps done, and the samples consumed so far."""
        values = dict(metrics)
        if self.clock is not None:
            step = self.clock.step
            values["samples"] = self.clock.samples
        if not self._started:
            self._mark_start(step or 0)
            self._started = True
        super().log_metrics(values, step)

    def _mark_start(self, step: int) -> None:
        """Tell TensorBoard that what earlier event files hold from `step` on is void."""
        if len(list(Path(self.log_dir).glob("events.out.tfevents.*"))) < 2:
            return
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]

        start = self.clock.start_step + 1 if self.clock is not None else step
        self.experiment.file_writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), start)
