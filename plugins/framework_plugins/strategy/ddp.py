"""`strategy=ddp`: one copy of the model a rank, gradients averaged by all-reduce (Li et al., 2020).

Standing alone with `reduction=bucketed` it is torch's DistributedDataParallel. Its wrapper doesn't compose with tensor
or pipeline parallelism and doesn't reduce gradient by gradient, so there `reduction.GradientReduction` does the work;
settings that only the wrapper has are then refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework import Problem, Requirements, RunPlan, hookimpl

if TYPE_CHECKING:
    from framework.mesh import Mesh
    from framework.parts import ModelPart


REDUCTIONS = ("bucketed", "overlap")
HOOKS = ("none", "fp16", "bf16", "powersgd")
WRAPPER_ONLY = ("gradient_as_bucket_view", "static_graph")
"""Settings of torch's wrapper that `framework.reduction` doesn't have."""


@dataclass(kw_only=True, eq=False)
class DDP:
    """Distributed data parallel.

    Attributes:
        size: number of copies; null = what `devices` leaves.
        reduction: `bucketed` starts a bucket's all-reduce when all its gradients are there; `overlap` starts each
            gradient's own the moment it is accumulated (with `bucket_cap_mb`, that of a small bucket).
        bucket_cap_mb: size of a communication bucket, MB; null = 25 for `bucketed`, one gradient for `overlap`.
        hook: what travels: the gradients (`none`), rounded to `fp16` or `bf16`, or low-rank factors (`powersgd`).
        powersgd_rank: rank of the factors; only read by `hook=powersgd`.
        powersgd_start_step: optimizer steps reduced whole before the first compressed one, at least 2; only read by
            `hook=powersgd`.
        find_unused_parameters: a parameter may get no gradient in a step, on some ranks or on all (slower).
        gradient_as_bucket_view: gradients are views of the communication buckets: one copy less.
        static_graph: the same parameters are used in every step: allows more overlap.
        broadcast_buffers: copy buffers (BatchNorm statistics) from rank 0 before each forward; with
            `reduction=overlap`, tp or pp at the end of each optimizer step.
        replica_check: every how many optimizer steps weights, gradients and optimizer settings of the copies are held
            against one another; null = never.
    """

    size: int | None = None
    reduction: str = "bucketed"
    bucket_cap_mb: float | None = None
    hook: str = "none"
    powersgd_rank: int = 1
    powersgd_start_step: int = 1000
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    broadcast_buffers: bool = True
    replica_check: int | None = None

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"strategy.reduction={self.reduction} is unknown; choose {' or '.join(REDUCTIONS)}.")
        if self.hook not in HOOKS:
            raise ValueError(f"strategy.hook={self.hook} is unknown; choose {', '.join(HOOKS[:-1])} or {HOOKS[-1]}.")
        if self.bucket_cap_mb is not None and self.bucket_cap_mb <= 0:
            raise ValueError(f"strategy.bucket_cap_mb={self.bucket_cap_mb} must be positive.")
        if self.powersgd_rank < 1:
            raise ValueError(f"strategy.powersgd_rank={self.powersgd_rank} must be at least 1.")
        if self.powersgd_start_step < 2:
            raise ValueError(
                f"strategy.powersgd_start_step={self.powersgd_start_step} must be at least 2: buckets are still sorted "
                "in the first step."
            )
        if self.replica_check is not None and self.replica_check < 1:
            raise ValueError(f"strategy.replica_check={self.replica_check} must be at least 1 step, or null for never.")

    @hookimpl
    def mesh_axes(self) -> Mapping[str, int | None]:
        """Copies on `dp_replicate`."""
        return {"dp_replicate": self.size}

    @hookimpl
    def requirements(self) -> Requirements:
        """Gives data parallelism; needs a sampler that shards."""
        return Requirements(
            needs=frozenset({"data_sharding"}),
            gives=frozenset({"data_parallel", "reduces_over_context"}),
            why={"data_sharding": "ranks would train on the same samples"},
            variants=("reduction=overlap",),
        )

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """Settings that nothing reads, or that can't be had together."""
        problems = []
        defaults = DDP()
        if self._own_reduction(plan):
            axes = [axis for axis in ("tp", "pp") if getattr(plan.mesh, axis) > 1]
            other = " and ".join(axes) or "strategy.reduction=overlap"
            problems += self._changed(
                WRAPPER_ONLY, f"only torch's DDP wrapper has it, and that doesn't work with {other}"
            )
            if self.hook == "powersgd":
                reason = f"PowerSGD works on the buckets of torch's DDP wrapper, which doesn't work with {other}"
                fix = "strategy.hook=bf16" if axes else "strategy.reduction=bucketed or strategy.hook=bf16"
                problems.append(Problem("strategy.hook=powersgd", reason, fix))
        if self.hook == "powersgd" and plan.chosen("precision") == "fp16-mixed":
            reason = "an overflow, by which the loss scale is found, would stay in PowerSGD's memory of errors for good"
            problems.append(Problem("strategy.hook=powersgd", reason, "precision=bf16-mixed or strategy.hook=fp16"))
        problems += [
            Problem(f"strategy.{name}={getattr(self, name)}", "only strategy.hook=powersgd reads it",
                    f"strategy.hook=powersgd or strategy.{name}={getattr(defaults, name)}")
            for name in ("powersgd_rank", "powersgd_start_step")
            if self.hook != "powersgd" and getattr(self, name) != getattr(defaults, name)
        ]  # fmt: skip
        if self.replica_check and plan.mesh.dp_replicate == 1:
            reason = "there is one copy, with nothing to hold it against"
            problems.append(Problem(f"strategy.replica_check={self.replica_check}", reason, "strategy.size=2"))
        return problems

    @hookimpl
    def make_callbacks(self, plan: RunPlan) -> Sequence[Any]:
        """The replica check, where it is on."""
        if not self.replica_check:
            return []
        from framework_plugins.strategy.replica_check import ReplicaCheck

        return [ReplicaCheck(self.replica_check)]

    @hookimpl
    def apply_data_parallel(self, part: ModelPart, mesh: Mesh, plan: RunPlan) -> None:
        """Wrap the model, or have its gradients reduced without a wrapper."""
        if not any(parameter.requires_grad for parameter in part.parameters()):
            return  # torch refuses; there is nothing to reduce
        if self._own_reduction(plan) or not part.root.automatic_optimization:
            self._reduce(part, mesh, plan)
        else:
            self._wrap(part, mesh)

    @hookimpl
    def check_model(self, plan: RunPlan, model: Any) -> Sequence[Problem]:
        """With manual optimization the wrapper, which expects one backward after each forward, can't be used."""
        if getattr(model, "automatic_optimization", True) or self._own_reduction(plan):
            return []
        reason = "only torch's DDP wrapper has it, and that reduces nothing under manual optimization"
        return self._changed([*WRAPPER_ONLY, *(["hook"] if self.hook == "powersgd" else [])], reason)

    def _changed(self, names: Sequence[str], reason: str) -> list[Problem]:
        """Return a complaint for each of these settings that isn't as it is by default."""
        defaults = DDP()
        return [
            Problem(
                f"strategy.{name}={str(getattr(self, name)).lower()}",
                reason,
                f"strategy.{name}={str(getattr(defaults, name)).lower()}",
            )
            for name in names
            if getattr(self, name) != getattr(defaults, name)
        ]

    def _own_reduction(self, plan: RunPlan) -> bool:
        return self.reduction == "overlap" or plan.mesh.tp > 1 or plan.mesh.pp > 1

    def _reduce(self, part: ModelPart, mesh: Mesh, plan: RunPlan) -> None:
        from framework.reduction import BUCKET_BYTES, GradientReduction
        from framework_plugins.strategy.compression import WIRE

        usual = BUCKET_BYTES if self.reduction == "bucketed" else 0
        part.reduction = GradientReduction.of_part(
            part,
            plan,
            mesh.reducing("dp_replicate").get_group(),
            bucket_bytes=usual if self.bucket_cap_mb is None else int(self.bucket_cap_mb * 2**20),
            buffers=self.broadcast_buffers,
            wire_dtype=WIRE[self.hook],
            find_unused=self.find_unused_parameters,
        )

    def _wrap(self, part: ModelPart, mesh: Mesh) -> None:
        import inspect

        from torch.nn.parallel import DistributedDataParallel

        from framework.errors import RunFailedError
        from framework.reduction import on_gradient_of_frozen
        from framework_plugins.strategy.compression import WIRE, powersgd, rounding

        settings: dict[str, Any] = {} if self.bucket_cap_mb is None else {"bucket_cap_mb": self.bucket_cap_mb}
        # torch 2.13 has a new name for it, and warns of the old one
        new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        settings["forward_sync_buffers" if new else "broadcast_buffers"] = self.broadcast_buffers
        group = mesh.reducing("dp_replicate").get_group()
        wrapped = part.module = DistributedDataParallel(
            part.module,
            process_group=group,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            **settings,
        )
        frozen = {name: parameter for name, parameter in part.root.named_parameters() if not parameter.requires_grad}
        names = {id(parameter): name for name, parameter in frozen.items()}

        def thawed(parameter: Any) -> None:
            name = names[id(parameter)]
            raise RunFailedError(
                f"{name} was frozen when the run began and has a gradient now, which torch's DDP wrapper "
                "doesn't average; type strategy.reduction=overlap."
            )

        on_gradient_of_frozen(frozen.values(), thawed)
        wire = WIRE.get(self.hook)
        if self.hook == "powersgd":
            wrapped.register_comm_hook(*powersgd(group, self.powersgd_rank, self.powersgd_start_step))
        elif wire is not None:
            wrapped.register_comm_hook(group, rounding(wire))
