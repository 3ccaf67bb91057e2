"""`logger=csv`: one table of all logged numbers, `metrics.csv`, one row an optimizer step.

Lightning's own CSVLogger takes a new folder a start, or overwrites. This one goes on with the table it finds, so that
one run has one table, however often it was restarted or resumed.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from framework.clock import Clock
from framework.curves import read_table

AXES = ("step", "samples", "epoch")
"""Columns that come first: optimizer steps done, samples consumed over all ranks, epochs finished."""


class Csv(Logger):
    """Writes `metrics.csv` on global rank 0; every row is on disk before the next step begins.

    `step` counts optimizer steps done (1 after the first), so it doesn't depend on accumulation, and it strictly
    increases over the whole file. Values logged at one step share one row. A run that resumes from step n first drops
    the rows after n: those steps are done again.

    Args:
        save_dir: folder of the file.
        file: its name.
    """

    def __init__(self, save_dir: str, file: str = "metrics.csv") -> None:
        super().__init__()
        self.path = Path(save_dir) / file
        self.clock: Clock | None = None
        """Set by the framework's Trainer; None (any other Trainer): Lightning's step, and no samples column."""
        self._columns: list[str] | None = None
        self._last: dict[str, Any] = {}
        self._last_at = 0

    @property
    def name(self) -> str:
        """Empty: the file lies in `save_dir` itself."""
        return ""

    @property
    def version(self) -> str:
        """Empty: a run has one table."""
        return ""

    @property
    def save_dir(self) -> str:
        """Folder of the file."""
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: `plan.yaml` beside the table holds all settings."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add `metrics` to the row of the current step."""
        axes: dict[str, Any] = {"step": step or 0}
        if self.clock is not None:
            axes = {"step": self.clock.step, "samples": self.clock.samples}
        if self._columns is None:
            self._resume(axes["step"] - 1 if self.clock is None else self.clock.start_step)
        self._write({**(self._last if self._is_last(axes) else {}), **axes, **metrics})

    def _is_last(self, row: Mapping[str, Any]) -> bool:
        return bool(self._last) and int(self._last["step"]) == row["step"]

    def _resume(self, step: int) -> None:
        """Read the table of an earlier start, and drop its rows after `step`."""
        rows: list[dict[str, str]] = []
        self._columns = []
        if self.path.exists():
            rows = [row for row in read_table(self.path) if int(row["step"]) <= step]
            self._columns = list(dict.fromkeys(name for row in rows for name in row))
        self._rewrite(rows)

    def _write(self, row: dict[str, Any]) -> None:
        """Put `row` at the end of the file, in place of the last row if it is the same step's."""
        assert self._columns is not None
        if not row.keys() <= set(self._columns):
            kept = [kept for kept in read_table(self.path) if int(kept["step"]) < int(row["step"])]
            names = [*self._columns, *row]
            self._columns = list(dict.fromkeys([axis for axis in AXES if axis in names] + names))
            self._rewrite([*kept, row])
        else:
            with self.path.open("r+", newline="", encoding="utf-8") as file:
                end = file.seek(0, os.SEEK_END)
                at = self._last_at if self._is_last(row) else end
                file.seek(at)
                file.truncate()
                file.write(self._line(row))
            self._last_at = at
        self._last = row

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        """Replace the whole file at once, so that a kill leaves the old or the new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [self._line(dict(zip(self._columns or (), self._columns or (), strict=True))), *map(self._line, rows)]
        new = self.path.with_suffix(".new")
        new.write_text("".join(lines) if self._columns else "", encoding="utf-8", newline="")
        new.replace(self.path)
        self._last_at = len("".join(lines[:-1]).encode())
        self._last = rows[-1] if rows else {}

    def _line(self, row: Mapping[str, Any]) -> str:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerow([row.get(name, "") for name in self._columns or ()])
        return out.getvalue()
