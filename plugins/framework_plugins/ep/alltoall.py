"""`ep=alltoall`: experts spread over ranks, tokens sent there and back by all-to-all (Lepikhin et al., 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework import Problem, Requirements, RunPlan, hookimpl
from framework.patterns import matches

if TYPE_CHECKING:
    from framework.mesh import Mesh
    from framework.parts import ModelPart


@dataclass(kw_only=True, eq=False)
class AllToAll:
    """Expert parallelism over ranks that it borrows from axis dp_shard: they read different samples all the same.

    Attributes:
        size: ranks that share the experts; None = 2.
        plan: patterns of the modules that hold stacked experts, names relative to the LightningModule, `*` for one part
            of a name; None = the model's own attribute `ep_plan`.
    """

    size: int | None = None
    plan: list[str] | None = None

    def __post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"ep.size={self.size} must be at least 1.")

    @hookimpl
    def mesh_axes(self) -> Mapping[str, int | None]:
        """Axis ep, inside of dp_shard."""
        return {"ep": self.size}

    @hookimpl
    def requirements(self) -> Requirements:
        """Needs a strategy that shards experts over the ranks that are left beside those of ep."""
        return Requirements(
            needs=frozenset({"expert_sharding"}),
            why={"expert_sharding": "experts are spread over ranks of dp_shard, so type strategy=fsdp"},
        )

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """A router must see whole sequences; a kept output must be found again."""
        found = []
        if plan.mesh.ep > 1 and plan.mesh.cp > 1:
            reason = "a rank would route pieces of sequences, and nobody has shown that this equals one process"
            found.append(Problem("ep=alltoall", f"with cp={plan.chosen('cp')} {reason}", "cp=none or ep=none"))
        if plan.mesh.ep > 1 and plan.mesh.pp > 1 and plan.chosen("activation") == "selective":
            reason = "experts are gathered inside of blocks, which torch can't recompute twice with some outputs kept"
            found.append(Problem("activation=selective", f"with ep and pp {reason}", "activation=full"))
        return found

    @hookimpl
    def check_model(self, plan: RunPlan, model: Any) -> Sequence[Problem]:
        """Every module of experts that can't be spread, by name."""
        if plan.mesh.ep == 1:
            return []
        from framework_plugins.ep.checks import problems

        tensor = (plan.components.get("tp") or {}).get("plan") or getattr(model, "tp_plan", None) or {}
        return problems(model, self._patterns(model), plan.mesh.ep, tensor if plan.mesh.tp > 1 else {})

    @hookimpl
    def apply_expert_parallel(self, part: ModelPart, mesh: Mesh) -> None:
        """Give this rank its experts of one stage; on the meta device too."""
        if mesh.size("ep") == 1:
            return
        from framework_plugins.ep.exchange import spread_

        for name, module in part.owned.items():
            if any(matches(pattern, name) for pattern in self._patterns(part.root) or ()):
                spread_(module, mesh["ep"])
                part.experts[name] = module

    def _patterns(self, model: Any) -> Sequence[str] | None:
        return self.plan if self.plan is not None else getattr(model, "ep_plan", None)
