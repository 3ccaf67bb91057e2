"""`cp=ulysses`: an all-to-all before attention trades pieces of sequences for heads (Jacobs et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from framework import Problem, RunPlan, hookimpl
from framework_plugins.cp.option import ContextParallel

if TYPE_CHECKING:
    from framework.mesh import Mesh
    from framework_plugins.cp.attention import Attend
    from framework_plugins.cp.sequences import Pieces

HEADS = ("heads", "n_heads", "num_heads", "n_head", "num_attention_heads")
KV_HEADS = ("kv_heads", "n_kv_heads", "num_kv_heads", "n_kv_head", "num_key_value_heads")
"""Arguments in which models are told how many heads they have."""


@dataclass(kw_only=True, eq=False)
class Ulysses(ContextParallel):
    """For attention each rank has some heads of whole sequences, so their work is equal without balancing.

    Attributes:
        size: ranks that share each sequence; null = 2, or what `devices` leaves. It must divide the heads of a
            tensor-parallel rank, and it or the heads of keys and values must divide the other.
        seq_dims: batch entry -> dim of its sequence; null = the model's `cp_plan`.
    """

    option: ClassVar[str] = "ulysses"

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """Heads that the ranks can't share, where the model's arguments say how many there are."""
        problems = list(super().check_plan(plan))
        spec, cp, tp = plan.components.get("model") or {}, plan.mesh.cp, plan.mesh.tp
        heads = next((spec[name] for name in HEADS if isinstance(spec.get(name), int)), None)
        if cp == 1 or heads is None or heads % tp:  # heads that tensor parallelism can't share are its own complaint
            return problems
        kv_heads = next((spec[name] for name in KV_HEADS if isinstance(spec.get(name), int)), heads)
        if not shareable(heads // tp, max(1, kv_heads // tp), cp):
            said = f"{heads} heads ({kv_heads} of keys and values)" + (f" over tp {tp}" if tp > 1 else "")
            fit = next(n for n in range(cp, 0, -1) if shareable(heads // tp, max(1, kv_heads // tp), n))
            fix = f"cp.size={fit}, or cp=ring" if fit > 1 else "cp=ring"
            problems.append(Problem(f"cp.size={cp}", f"{cp} ranks can't share {said} evenly", fix))
        return problems

    def attend(self, pieces: Pieces, mesh: Mesh) -> Attend:
        """Exchange over axis cp."""
        from framework_plugins.cp.exchange import HeadsAttention

        return HeadsAttention(pieces, mesh.group("cp"))


def shareable(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether `ranks` can each have as many heads of queries, and of keys and values (copied where they are few)."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
