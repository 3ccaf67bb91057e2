"""The pipeline schedules of torch.distributed.pipelining; one class, one YAML each.

GPipe (Huang et al., 2019); 1F1B (Narayanan et al., PipeDream-Flush, 2021); interleaved 1F1B (Narayanan et al., 2021);
looped BFS (Lamy-Poirier, 2023); zero bubble and ZBV (Qi et al., 2023, 2024); DualPipeV (DeepSeek-AI, 2025).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

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
CUTS = ("auto", "blocks", "graph")
BALANCES = ("flops", "parameters")


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
        cut: `blocks` cuts between the blocks of a list, `graph` wherever a weight is first used, so that stages cost
            alike; `auto` takes blocks where most of the weights lie in one list of them.
        balance: what `cut=graph` makes alike: `flops` or `parameters`; null = flops. Setting it chooses `graph`.
    """

    otherwise: ClassVar[str] = "pp.cut=graph"
    """What to type where blocks can't be cut."""

    schedule: str = "gpipe"
    size: int | None = None
    microbatches: int | None = None
    stages_per_rank: int = 1
    blocks: str | None = None
    split: list[int] | None = None
    cut: str = "auto"
    balance: str | None = None

    def __post_init__(self) -> None:
        if self.schedule not in CLASSES:
            raise ValueError(f"pp.schedule={self.schedule} is unknown; choose one of {', '.join(CLASSES)}.")
        if self.microbatches is not None and self.microbatches < 1:
            raise ValueError(f"pp.microbatches={self.microbatches} must be at least 1.")
        if self.schedule in SINGLE and self.stages_per_rank != 1:
            raise ValueError(f"pp.stages_per_rank={self.stages_per_rank}: pp={self.schedule} has one stage a rank.")
        if self.schedule in V_SHAPED and self.stages_per_rank != 2:
            raise ValueError(f"pp.stages_per_rank={self.stages_per_rank}: pp={self.schedule} has two stages a rank.")
        if self.cut not in CUTS:
            raise ValueError(f"pp.cut={self.cut} is unknown; choose one of {', '.join(CUTS)}.")
        if self.balance not in (None, *BALANCES):
            raise ValueError(f"pp.balance={self.balance} is unknown; choose one of {', '.join(BALANCES)}.")
        if self.balance and (self.cut == "blocks" or self.blocks or self.split):
            raise ValueError(f"pp.balance={self.balance} is for pp.cut=graph; leave out what is set of blocks.")
        if self.cut == "graph" and (self.blocks or self.split):
            raise ValueError("pp.cut=graph finds its places itself; leave pp.blocks and pp.split out.")
        if self.stages_per_rank < 1:
            raise ValueError(f"pp.stages_per_rank={self.stages_per_rank} must be at least 1.")

    @hookimpl
    def mesh_axes(self) -> Mapping[str, int | None]:
        """Axis `pp`."""
        return {"pp": self.size}

    @hookimpl
    def requirements(self) -> Requirements:
        """Gives a pipeline."""
        return Requirements(gives=frozenset({"pipeline"}))

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

        from framework_plugins.pp.cutting import by_blocks, complaints

        problems: list[Problem] = []
        stages = plan.mesh.pp * self.stages_per_rank
        if not model.automatic_optimization:
            problems.append(Problem(f"pp={self.schedule}", "a pipeline runs no manual optimization", "pp=none"))
        if is_overridden("backward", model):
            problems.append(
                Problem(f"pp={self.schedule}", f"{type(model).__name__} has a backward of its own", "pp=none")
            )
        if by_blocks(self, model, stages):
            problems += self._complaints_of_blocks(plan, model, stages)
        elif not problems:
            problems += complaints(self, plan, model, stages)
        return problems

    def _complaints_of_blocks(self, plan: RunPlan, model: Any, stages: int) -> list[Problem]:
        from framework_plugins.pp.cutting import tied

        problems = []
        try:
            path, keys = self._blocks(model)
        except ValueError as error:
            return [
                Problem(
                    f"pp.blocks={self.blocks or 'null'}",
                    str(error),
                    f"pp.blocks=NAME of a list of modules, {self.otherwise}, or pp=none",
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
        for first, name in tied(model):
            reason = f"'{first}' and '{name}' are one tied parameter, which would lie on two stages of blocks"
            problems.append(Problem(f"pp={self.schedule}", reason, self.otherwise))
        return problems

    def _blocks(self, model: Any) -> tuple[str, list[str]]:
        from framework.block_stages import blocks_of

        return blocks_of(model, self.blocks)

    @hookimpl
    def make_stages(self, module: Any, mesh: Mesh, plan: RunPlan) -> list[ModelPart] | None:
        """Cut the module into this rank's stages."""
        from itertools import accumulate

        from framework.block_stages import cut, split_evenly
        from framework.traced_stages import cut_traced
        from framework_plugins.pp.cutting import by_blocks, found_places

        ranks, rank = mesh.size("pp"), mesh.rank("pp")
        stages = ranks * self.stages_per_rank
        mine = [stage for stage in range(stages) if self.place(stage, ranks) == rank]
        if not by_blocks(self, module, stages):
            found = found_places(self, module, plan, stages, device_of(plan))
            return None if found is None else cut_traced(module, found[0], found[1], mine, device_of(plan))
        path, keys = self._blocks(module)
        if self.split is None:
            ranges = split_evenly(len(keys), stages)
        else:
            ends = list(accumulate(self.split))
            ranges = [range(end - size, end) for end, size in zip(ends, self.split, strict=True)]
        return cut(module, path, ranges, mine)

    def place(self, stage: int, ranks: int) -> int:
        """Return which of `ranks` runs `stage`."""
        if self.schedule in V_SHAPED and stage >= ranks:
            return 2 * ranks - 1 - stage
        return stage % ranks

    @hookimpl
    def make_schedule(self, parts: list[ModelPart], mesh: Mesh, plan: RunPlan) -> Pipeline | None:
        """Bind the stages to torch's schedule."""
        from torch.distributed import pipelining
        from torch.distributed.pipelining import schedules

        from framework.pipeline import Pipeline

        name = CLASSES[self.schedule]
        cls = getattr(pipelining, name, None) or getattr(schedules, name)

        def make(stages: Any, microbatches: int, loss_fn: Any) -> Any:
            mine = stages[0] if self.schedule in SINGLE else stages
            # gradients are scaled in the loss function, by the weight of each micro-batch
            return cls(mine, n_microbatches=microbatches, loss_fn=loss_fn, scale_grads=False)

        return Pipeline(parts, mesh, plan, make, device_of(plan))


def device_of(plan: RunPlan) -> Any:
    """Return the device that this rank computes on."""
    import torch

    return torch.device("cpu") if plan.accelerator == "cpu" else torch.device("cuda", torch.cuda.current_device())
