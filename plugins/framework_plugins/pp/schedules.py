"""The pipeline schedules of torch.distributed.pipelining; one class, one YAML each.

GPipe (Huang et al., 2019); 1F1B (Narayanan et al., PipeDream-Flush, 2021); interleaved 1F1B (Narayanan et al., 2021);
looped BFS (Lamy-Poirier, 2023); zero bubble and ZBV (Qi et al., 2023, 2024); DualPipeV (DeepSeek-AI, 2025).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework import Problem, Requirements, RunPlan, hookimpl

if TYPE_CHECKING:
    from framework.mesh import Mesh
    from framework.parts import ModelPart
    from framework.pipeline import Pipeline

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
SINGLE = ("gpipe", "1f1b")
"""Schedules with one stage a rank."""
V_SHAPED = ("zbv", "dualpipev")
"""Rank r holds stages r and 2p - 1 - r."""


@dataclass(kw_only=True, eq=False)
class Schedule:
    """A pipeline.

    Attributes:
        schedule: one of `CLASSES`.
        size: ranks in a pipeline; null = what the plan gives (2 by default).
        microbatches: pieces that a rank's batch is cut into; null = derived.
        stages_per_rank: stages that each rank runs in turn.
        blocks: name of the list of blocks to cut between (`model.layers`); null = the model's longest one.
        split: number of blocks of each stage, first to last; null = as even as it goes.
    """

    schedule: str = "gpipe"
    size: int | None = None
    microbatches: int | None = None
    stages_per_rank: int = 1
    blocks: str | None = None
    split: list[int] | None = None

    def __post_init__(self) -> None:
        if self.schedule not in CLASSES:
            raise ValueError(f"pp.schedule={self.schedule} is unknown; choose one of {', '.join(CLASSES)}.")
        if self.microbatches is not None and self.microbatches < 1:
            raise ValueError(f"pp.microbatches={self.microbatches} must be at least 1.")
        if self.schedule in SINGLE and self.stages_per_rank != 1:
            raise ValueError(f"pp.stages_per_rank={self.stages_per_rank}: pp={self.schedule} has one stage a rank.")
        if self.schedule in V_SHAPED and self.stages_per_rank != 2:
            raise ValueError(f"pp.stages_per_rank={self.stages_per_rank}: pp={self.schedule} has two stages a rank.")
        if self.stages_per_rank < 1:
            raise ValueError(f"pp.stages_per_rank={self.stages_per_rank} must be at least 1.")

    @hookimpl
    def mesh_axes(self) -> Mapping[str, int | None]:
        """Axis `pp`."""
        return {"pp": self.size}

    @hookimpl
    def requirements(self) -> Requirements:
        """A stage can't share weights with another one yet."""
        return Requirements(
            gives=frozenset({"pipeline"}),
            excludes=frozenset({"tied_weights_over_stages"}),
            why={
                "tied_weights_over_stages": "tied weights would lie on two stages, and nobody adds up their gradients"
            },
        )

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """Micro-batch counts that the schedule can't run."""
        count, ranks = plan.batch.microbatches, plan.mesh.pp
        stages = ranks * self.stages_per_rank
        problems = []
        if ranks < 2:
            problems.append(Problem(f"pp={self.schedule}", "a pipeline needs at least 2 ranks", "pp.size=2"))
        least = stages if self.schedule in ("1f1b", "dualpipev") else ranks
        if count < least:
            share = (ranks - 1) / (count + ranks - 1)
            problems.append(
                Problem(
                    f"pp.microbatches={count}",
                    f"{self.schedule} needs at least as many micro-batches as its {least} "
                    f"{'stages' if least == stages else 'ranks'}; with {count} they would wait {share:.0%} of the time",
                    f"pp.microbatches={least}",
                )
            )
        elif self.schedule in ("interleaved_1f1b", "zero_bubble"):
            rounds = max(1, count // ranks)
            if count % rounds:
                problems.append(
                    Problem(
                        f"pp.microbatches={count}",
                        f"{self.schedule} runs them in {rounds} equal rounds over its {ranks} ranks",
                        f"pp.microbatches={count // ranks * ranks}",
                    )
                )
        return problems

    @hookimpl
    def check_model(self, plan: RunPlan, model: Any) -> Sequence[Problem]:
        """Blocks that can't be cut as asked, weights used on two stages, steps that a pipeline can't run."""
        from lightning.pytorch.utilities.model_helpers import is_overridden

        problems = []
        stages = plan.mesh.pp * self.stages_per_rank
        try:
            path, keys = self._blocks(model)
        except ValueError as error:
            return [
                Problem(
                    f"pp.blocks={self.blocks or 'null'}", str(error), "pp.blocks=NAME of a list of modules, or pp=none"
                )
            ]
        if len(keys) < stages:
            problems.append(
                Problem(
                    f"pp={self.schedule}",
                    f"{path} has {len(keys)} blocks for {stages} stages "
                    f"({plan.mesh.pp} ranks x {self.stages_per_rank})",
                    f"pp.size={max(1, len(keys) // self.stages_per_rank)} or a deeper model",
                )
            )
        elif self.split is not None and (
            len(self.split) != stages or sum(self.split) != len(keys) or min(self.split) < 1
        ):
            problems.append(
                Problem(
                    f"pp.split={self.split}",
                    f"{path} has {len(keys)} blocks and there are {stages} stages",
                    f"{stages} numbers of at least 1 that add up to {len(keys)}",
                )
            )
        problems += self._tied(model, path)
        if not model.automatic_optimization:
            problems.append(Problem(f"pp={self.schedule}", "a pipeline runs no manual optimization", "pp=none"))
        if is_overridden("backward", model):
            problems.append(
                Problem(f"pp={self.schedule}", f"{type(model).__name__} has a backward of its own", "pp=none")
            )
        return problems

    def _tied(self, model: Any, path: str) -> list[Problem]:
        seen: dict[Any, str] = {}
        problems = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first = seen.setdefault(parameter, name)
            if first != name:
                problems.append(
                    Problem(
                        f"pp={self.schedule}",
                        f"'{first}' and '{name}' are one tied parameter, which would lie on two stages",
                        "model.tied=false" if hasattr(model, "tied") or path == "layers" else "pp=none",
                    )
                )
        return problems

    def _blocks(self, model: Any) -> tuple[str, list[str]]:
        from framework.stages import blocks_of

        return blocks_of(model, self.blocks)

    @hookimpl
    def make_stages(self, module: Any, mesh: Mesh, plan: RunPlan) -> list[ModelPart] | None:
        """Cut the module into this rank's stages."""
        from itertools import accumulate

        from framework.stages import cut, split_evenly

        ranks, rank = mesh.size("pp"), mesh.rank("pp")
        stages = ranks * self.stages_per_rank
        path, keys = self._blocks(module)
        if self.split is None:
            ranges = split_evenly(len(keys), stages)
        else:
            ends = list(accumulate(self.split))
            ranges = [range(end - size, end) for end, size in zip(ends, self.split, strict=True)]
        return cut(module, path, ranges, self._mine(rank, ranks))

    def _mine(self, rank: int, ranks: int) -> list[int]:
        """Return the stages of a rank, ascending."""
        if self.schedule in V_SHAPED:
            return [rank, ranks * self.stages_per_rank - 1 - rank]
        return [rank + ranks * turn for turn in range(self.stages_per_rank)]

    @hookimpl
    def make_schedule(self, parts: list[ModelPart], mesh: Mesh, plan: RunPlan) -> Pipeline | None:
        """Bind the stages to torch's schedule."""
        import torch
        from torch.distributed import pipelining
        from torch.distributed.pipelining import schedules

        from framework.pipeline import Pipeline

        name = CLASSES[self.schedule]
        cls = getattr(pipelining, name, None) or getattr(schedules, name)

        def make(stages: Any, microbatches: int, loss_fn: Any) -> Any:
            mine = stages[0] if self.schedule in SINGLE else stages
            # gradients are scaled in the loss function, by the weight of each micro-batch
            return cls(mine, n_microbatches=microbatches, loss_fn=loss_fn, scale_grads=False)

        device = torch.device("cpu") if plan.accelerator == "cpu" else torch.device("cuda", torch.cuda.current_device())
        return Pipeline(parts, mesh, plan, make, device)
