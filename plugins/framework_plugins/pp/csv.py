"""A schedule of the user's own, from a file in the CSV format of torch.distributed.pipelining (see `actions.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from framework import Problem, RunPlan, hookimpl
from framework_plugins.pp import actions
from framework_plugins.pp.schedules import Schedule, device_of

if TYPE_CHECKING:
    from framework.mesh import Mesh
    from framework.parts import ModelPart
    from framework.pipeline import Pipeline

SHOWN = 5
"""Faults of a file that are listed."""


@dataclass(kw_only=True, eq=False)
class Csv(Schedule):
    """Runs the actions of a file: a row a rank, compute only; what is sent follows from them.

    Attributes:
        file: path of the file; read, never executed.
        size: ranks in a pipeline; null = rows of the file.
        microbatches: pieces that a rank's batch is cut into; null = those of the file.
    """

    otherwise: ClassVar[str] = "pp=1f1b pp.cut=graph"

    schedule: str = field(init=False, default="csv")
    stages_per_rank: int = field(init=False, default=1)
    cut: str = field(init=False, default="blocks")
    balance: str | None = field(init=False, default=None)
    file: str | None = None
    table: actions.Table | None = field(init=False, default=None, repr=False)
    faults: list[str] = field(init=False, default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.file is None:
            self.faults = ["it needs a file of actions, a row a rank"]
            return
        try:
            self.table, self.faults = actions.parse(actions.read(Path(self.file)))
        except (OSError, ValueError) as error:
            self.faults = [getattr(error, "strerror", None) or str(error)]
        if self.table is None or self.faults:
            return
        ranks, count = len(self.table.rows), self.table.microbatches
        self.stages_per_rank, uneven = divmod(self.table.stages, ranks)
        for rank in range(ranks):
            held = len(self.table.of_rank(rank))
            if held != self.stages_per_rank or uneven:
                self.faults.append(
                    f"rank {rank} has {held} of {self.table.stages} stages; each of {ranks} needs as many"
                )
        if self.size not in (None, ranks):
            self.faults.append(f"it has {ranks} rows, and pp.size={self.size} asks for as many ranks")
        if self.microbatches not in (None, count):
            self.faults.append(f"it has {count} micro-batches, and pp.microbatches={self.microbatches}")
        self.size, self.microbatches = ranks, count

    @hookimpl
    def mesh_axes(self) -> Mapping[str, int | None]:
        """Axis `pp`, a rank for each row."""
        return {"pp": self.size}

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """What is wrong with the file."""
        asked = f"pp.file={self.file or 'null'}"
        fix = "pp.file=schedule.csv (docs/pipelines.md shows one)" if self.file is None else ""
        more = [f"and {len(self.faults) - SHOWN} faults more"] if len(self.faults) > SHOWN else []
        problems = [Problem(asked, fault, fix) for fault in [*self.faults[:SHOWN], *more]]
        if self.table is not None and not problems and len(self.table.rows) < 2:
            problems.append(Problem(asked, "a pipeline needs at least 2 ranks, so as many rows"))
        return problems

    @hookimpl
    def plan_notes(self, plan: RunPlan) -> Sequence[str]:
        """Bubble and activations by the file's own order."""
        if self.table is None or self.faults:
            return []
        held = ", ".join(f"stage {stage} {count}" for stage, count in actions.alive(self.table).items())
        share = actions.bubble(self.table)
        table = self.table
        return [
            f"{self.file}: {table.stages} stages, {table.microbatches} micro-batches; bubble {share:.1%} where a "
            f"backward takes two forwards; micro-batches whose activations are alive at most: {held}."
        ]

    def place(self, stage: int, ranks: int) -> int:
        """Return which of `ranks` runs `stage`."""
        table = self.table
        assert table is not None
        return next(rank for rank in range(ranks) if stage in table.of_rank(rank))

    @hookimpl
    def make_schedule(self, parts: list[ModelPart], mesh: Mesh, plan: RunPlan) -> Pipeline | None:
        """Bind the stages to torch's runtime, which adds sends and receives."""
        from framework.adapters import torch_private
        from framework.pipeline import Pipeline

        assert self.table is not None
        rows = [["" if action is None else str(action) for action in row] for row in self.table.rows]

        def make(stages: Any, microbatches: int, loss_fn: Any) -> Any:
            return torch_private.schedule_of_actions(rows, stages, microbatches, loss_fn)

        device = device_of(plan)
        return Pipeline(parts, mesh, plan, make, device)
