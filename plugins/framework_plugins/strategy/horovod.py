"""`strategy=horovod`: one copy of the model a rank, gradients averaged by Horovod (Sergeev and Del Balso, 2018).

Horovod adds up the gradients, each from the moment it is accumulated, and nothing else: processes, initial weights,
batches, weights of losses, clipping and checkpoints are the framework's as under `strategy=ddp`. Ranks meet in
Horovod through torch's process group (`horovod_world`), so any launcher of the framework's will do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework import Problem, Requirements, RunPlan, hookimpl

if TYPE_CHECKING:
    from framework.mesh import Mesh
    from framework.parts import ModelPart

COMPRESSIONS = ("none", "fp16")
INSTEAD = "make horovod, which builds it in an environment of its own, or strategy=ddp"
TIMELINE = "horovod_timeline.json"
OURS = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
"""How Horovod's processes find one another and add up: what the framework's ranks can do without MPI."""


@dataclass(kw_only=True, eq=False)
class Horovod:
    """Data parallelism by Horovod.

    Attributes:
        size: number of copies; null = what `devices` leaves.
        compression: what travels: the gradients (`none`), or each divided by the number of ranks and rounded to `fp16`.
        fusion_threshold_mb: gradients that are ready together travel as one message of at most so many MB; 0 = each
            alone; null = Horovod's own, 128.
        cycle_time_ms: how often Horovod looks which gradients are ready on all ranks, milliseconds; null = Horovod's
            own, 1.
        timeline: rank 0 writes what Horovod does, and when, to `horovod_timeline.json` in the run's folder.
        find_unused_parameters: a parameter may get no gradient in a step, on some ranks or on all (one small message
            more a step).
        broadcast_buffers: copy buffers (BatchNorm statistics) from rank 0 at the end of each optimizer step.
    """

    size: int | None = None
    compression: str = "none"
    fusion_threshold_mb: float | None = None
    cycle_time_ms: float | None = None
    timeline: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"strategy.size={self.size} must be at least 1.")
        if self.compression not in COMPRESSIONS:
            raise ValueError(f"strategy.compression={self.compression} is unknown; choose {' or '.join(COMPRESSIONS)}.")
        if self.fusion_threshold_mb is not None and not 0 <= self.fusion_threshold_mb < math.inf:
            raise ValueError(
                f"strategy.fusion_threshold_mb={self.fusion_threshold_mb:g} must be at least 0, which sends each "
                "gradient alone."
            )
        if self.cycle_time_ms is not None and not 0 < self.cycle_time_ms < math.inf:
            raise ValueError(f"strategy.cycle_time_ms={self.cycle_time_ms:g} must be positive.")

    @hookimpl
    def mesh_axes(self) -> Mapping[str, int | None]:
        """Copies on `dp_replicate`."""
        return {"dp_replicate": self.size}

    @hookimpl
    def requirements(self) -> Requirements:
        """Gives data parallelism; excludes what gives ranks different pieces: Horovod adds up over all ranks."""
        cuts = ("pp", "tp", "cp", "ep")
        reason = "Horovod adds up the gradients of all ranks, and these would hold different pieces; type strategy={}"
        return Requirements(
            needs=frozenset({"data_sharding"}),
            gives=frozenset({"data_parallel"}),
            excludes=frozenset(cuts),
            why={
                "data_sharding": "ranks would train on the same samples",
                **{cut: reason.format("fsdp" if cut == "ep" else "ddp") for cut in cuts},
            },
        )

    @hookimpl
    def process_env(self, plan: RunPlan) -> Mapping[str, str]:
        """What Horovod reads when it starts and is the same on all ranks; the run's one time limit is Horovod's too."""
        variables = {**OURS, "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, math.ceil(plan.timeout_s)))}
        if self.fusion_threshold_mb is not None:
            variables["HOROVOD_FUSION_THRESHOLD"] = str(int(self.fusion_threshold_mb * 2**20))
        if self.cycle_time_ms is not None:
            variables["HOROVOD_CYCLE_TIME"] = f"{self.cycle_time_ms:g}"
        if self.timeline:
            variables["HOROVOD_TIMELINE"] = str(Path(plan.run_dir) / TIMELINE)
        return variables

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """A Horovod that isn't there or can't be used, and processes that horovodrun has started."""
        problems = []
        if reason := lacking():
            problems.append(Problem("strategy=horovod", reason, INSTEAD))
        if plan.accelerator != "cpu":
            reason = "strategy=horovod is proven with Horovod's operations for CPUs only"
            problems.append(Problem(f"accelerator={plan.accelerator}", reason, "strategy=ddp or accelerator=cpu"))
        if "HOROVOD_RANK" in os.environ:
            reason = (
                f"horovodrun has started {os.environ.get('HOROVOD_SIZE', 'some')} processes already, and each of them "
                f"would start the {plan.world_size} ranks of the plan"
            )
            fix = "the same command without horovodrun, or `unset HOROVOD_RANK` if that is left over in your shell"
            problems.append(Problem("strategy=horovod", reason, fix))
        problems += [
            Problem(
                f"{name}={os.environ[name]} (exported in your shell)",
                "the framework's ranks meet in Horovod by gloo, without MPI",
                f"`unset {name}`",
            )
            for name, value in OURS.items()
            if os.environ.get(name, value).lower() != value
        ]
        return problems

    @hookimpl
    def make_callbacks(self, plan: RunPlan) -> Sequence[Any]:
        """What starts Horovod before the training and ends it after."""
        from framework_plugins.strategy.horovod_world import HorovodWorld

        return [HorovodWorld(plan, self.process_env(plan))]

    @hookimpl
    def apply_data_parallel(self, part: ModelPart, mesh: Mesh, plan: RunPlan) -> None:
        """Have gradients reduced as they come, without a wrapper."""
        if not any(parameter.requires_grad for parameter in part.parameters()):
            return
        import torch

        from framework_plugins.strategy.horovod_reduction import HorovodReduction

        # Horovod 0.28 has no bfloat16: such gradients are added up in fp32
        widened = any(p.requires_grad and p.dtype is torch.bfloat16 for p in part.parameters())
        part.reduction = HorovodReduction.of_part(
            part,
            plan,
            mesh.reducing("dp_replicate").get_group(),
            bucket_bytes=0,  # Horovod fuses messages itself
            buffers=self.broadcast_buffers,
            wire_dtype=torch.float16 if self.compression == "fp16" else torch.float32 if widened else None,
            find_unused=self.find_unused_parameters,
            limit_s=plan.timeout_s,
        )


def lacking() -> str | None:
    """Return why Horovod can't be used here, None if it can; it isn't imported, which takes seconds and torch."""
    found = find_spec("horovod")
    if found is None:
        return "the package horovod isn't installed"
    if not any(next(Path(folder).glob("torch/mpi_lib_v2*"), None) for folder in found.submodule_search_locations or ()):
        return "the package horovod that is installed was built without its operations for PyTorch"
    return None
