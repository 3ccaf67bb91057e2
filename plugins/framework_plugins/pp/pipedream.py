"""Asynchronous pipelines, which no optimizer step empties: PipeDream and PipeDream-2BW (Narayanan et al., 2019, 2021).

Their gradients are delayed, so they don't train as one process does; what they equal is one process with the same
delays (`framework.verify.reference.train`, `delays=`). See `delayed.py` for how, docs/pipelines.md for when.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar

from framework import Problem, Requirements, RunPlan, hookimpl
from framework_plugins.pp.schedules import Schedule, device_of

if TYPE_CHECKING:
    from framework.mesh import Mesh
    from framework.parts import ModelPart
    from framework.pipeline import Pipeline

SYNCHRONOUS = "1f1b"
"""What to choose where an asynchronous pipeline can't be: as fast once there are enough micro-batches."""


@dataclass(kw_only=True, eq=False)
class Delayed(Schedule):
    """What the two have in common: one stage a rank, no other axis, agreements now and then.

    Attributes:
        sync_every: optimizer steps between two agreements of all ranks; logged values are means over so many.
        trace_versions: write which version of the weights each micro-batch met, by hash; for debugging.
    """

    variants: ClassVar[tuple[str, ...]] = ()

    otherwise: ClassVar[str] = f"pp={SYNCHRONOUS} pp.cut=graph"

    schedule: str = field(init=False, default="")
    stages_per_rank: int = field(init=False, default=1)
    cut: str = field(init=False, default="blocks")
    balance: str | None = field(init=False, default=None)
    sync_every: int = 10
    trace_versions: bool = False

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise ValueError(f"pp.sync_every={self.sync_every} must be at least 1.")
        if self.microbatches is not None and self.microbatches < 1:
            raise ValueError(f"pp.microbatches={self.microbatches} must be at least 1.")

    @hookimpl
    def requirements(self) -> Requirements:
        """No other axis yet: equality with delayed gradients is shown for stages alone."""
        others = dict.fromkeys(
            ("strategy", "tp", "cp", "ep", "compile"),
            f"delayed gradients are shown to be right with pipeline stages alone; pp={SYNCHRONOUS} runs with it",
        )
        why = {
            **others,
            "tied_weights_over_stages": "the stages that hold them would apply one batch's gradient at different steps",
            "precision=fp16-mixed": "a loss scale would meet gradients that were scaled by an earlier one; "
            "precision=bf16-mixed needs none",
        }
        return Requirements(gives=self._gives(), excludes=frozenset(why), why=why, variants=self.variants)

    def _gives(self) -> frozenset[str]:
        return frozenset({"pipeline", "delayed_gradients"})

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """Settings that have no meaning with delayed gradients."""
        return list(self._problems(plan))

    def _problems(self, plan: RunPlan) -> Iterator[Problem]:
        asked = f"pp={self.schedule}"
        if plan.mesh.pp < 2:
            yield Problem(asked, "a pipeline needs at least 2 ranks", "pp.size=2")
        if plan.batch.accumulation != 1:
            yield Problem(
                f"trainer.accumulate_grad_batches={plan.batch.accumulation}",
                f"{asked} makes an optimizer step of each batch",
                "trainer.accumulate_grad_batches=1, or pp=pipedream_2bw, whose micro-batches are accumulated",
            )
        if plan.on_nonfinite == "skip":
            yield Problem(
                "on_nonfinite=skip",
                f"under {asked} later batches have met the weights before the loss is known on all ranks",
                f"on_nonfinite=raise or pp={SYNCHRONOUS}",
            )
        every = plan.trainer.get("log_every_n_steps", 1)
        if plan.components.get("logger") and every % self.sync_every:
            yield Problem(
                f"pp.sync_every={self.sync_every}",
                f"values are logged every {every} steps and would be old ones at some of them",
                f"pp.sync_every={gcd(every, self.sync_every)}",
            )

    @hookimpl
    def plan_notes(self, plan: RunPlan) -> Sequence[str]:
        """What is unlike a synchronous pipeline."""
        held = ", ".join(f"stage {stage} {count}" for stage, count in enumerate(self._versions(plan.mesh.pp)))
        clip = plan.trainer.get("gradient_clip_val")
        return [
            f"Gradients are delayed: equal to one process with the same delays, not to pp={SYNCHRONOUS}. Versions of "
            f"the weights held: {held}. All ranks agree every {self.sync_every} steps: logged values are their means.",
            *(["The clip norm makes all stages wait for one another in each step."] if clip else []),
        ]

    def _versions(self, stages: int) -> list[int]:
        raise NotImplementedError

    @hookimpl
    def check_model(self, plan: RunPlan, model: Any) -> Sequence[Problem]:
        """What no pipeline can run, and what draining the pipeline would pass by."""
        from lightning.pytorch.utilities.model_helpers import is_overridden

        problems = list(super().check_model(plan, model))
        if is_overridden("optimizer_step", model):
            name = type(model).__name__
            reason = f"{name} has an optimizer_step of its own, and steps are also made outside of Lightning's loop"
            problems.append(Problem(f"pp={self.schedule}", reason, f"pp={SYNCHRONOUS}"))
        return problems

    @hookimpl
    def make_schedule(self, parts: list[ModelPart], mesh: Mesh, plan: RunPlan) -> Pipeline | None:
        """Build the runtime."""
        from framework_plugins.pp.delayed import DelayedPipeline

        device = device_of(plan)
        return DelayedPipeline(
            parts, mesh, plan, device, sync_every=self.sync_every, trace=self.trace_versions, **self._delays()
        )

    def _delays(self) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(kw_only=True, eq=False)
class PipeDream(Delayed):
    """PipeDream with weight stashing: stage s applies a batch's gradient stages - 1 - s steps after its own.

    Attributes:
        vertical_sync: a batch meets one version of the weights on all stages, the first one's newest.
    """

    schedule: str = field(init=False, default="pipedream")
    microbatches: int | None = field(init=False, default=1)
    variants: ClassVar[tuple[str, ...]] = ("vertical_sync=true",)

    vertical_sync: bool = False

    def _gives(self) -> frozenset[str]:
        return super()._gives() | {"delay_by_stage"} | ({"vertical_sync"} if self.vertical_sync else set())

    def _delays(self) -> dict[str, Any]:
        return {"vertical_sync": self.vertical_sync}

    def _versions(self, stages: int) -> list[int]:
        return [stages if self.vertical_sync else stages - stage for stage in range(stages)]


@dataclass(kw_only=True, eq=False)
class PipeDream2BW(Delayed):
    """PipeDream-2BW: every stage applies a batch's gradient one step after its own, and holds two versions."""

    schedule: str = field(init=False, default="pipedream_2bw")

    def _problems(self, plan: RunPlan) -> Iterator[Problem]:
        yield from super()._problems(plan)
        count, stages = plan.batch.microbatches, plan.mesh.pp
        if count < stages:
            yield Problem(
                f"pp.microbatches={count}",
                f"a batch must be through all {stages} stages when the next one is, so it needs as many micro-batches",
                f"pp.microbatches={stages}",
            )

    def _delays(self) -> dict[str, Any]:
        return {"delay": 1}

    def _versions(self, stages: int) -> list[int]:
        return [2] * (stages - 1) + [1]
