"""`activation=selective`: costly outputs are kept, by operator or up to a budget, and the rest is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

from framework import Problem, RunPlan, hookimpl
from framework_plugins.activation.full import Full

if TYPE_CHECKING:
    from torch.utils.checkpoint import CheckpointPolicy

    from framework.parts import ModelPart

KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::linear",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "aten::convolution",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "_c10d_functional::all_reduce",
    "_c10d_functional::reduce_scatter_tensor",
    "_c10d_functional::all_to_all_single",
)
"""Operators whose outputs are kept: the ones that cost compute or the network. `all_gather` isn't: its output is large
and every rank holds a piece of it anyway."""


@dataclass(kw_only=True, eq=False)
class Selective(Full):
    """Selective activation checkpointing (Korthikanti et al., 2022; here by operator, as torch's SAC, or by budget).

    Attributes:
        every: of the blocks, counted over the whole model from 0, those that are recomputed: 1 = all, 2 = every second.
        preserve_rng_state: draw the same random numbers again; false saves time if nothing in a block is random.
        budget: part of what a block would keep without recomputation that it may keep beside its input, from 0 (as
            `full`) to 1 (as without the option), spent on the outputs with the most compute a byte; None = by operator.
    """

    option: ClassVar[str] = "selective"

    budget: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is not None and not 0 <= self.budget <= 1:
            raise ValueError(
                f"activation.budget={self.budget} is a part of what a block keeps without recomputation, from 0 to 1."
            )

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """Where blocks can't be measured, or not be computed again to their end."""
        if self.budget in (None, 0, 1):
            return []
        asked, problems = f"activation.budget={self.budget}", []
        if plan.chosen("compile") is not None:
            reason = "blocks are measured when they first run, which a compiler can't trace"
            problems.append(Problem(asked, reason, "activation.budget=null or compile=none"))
        if plan.mesh.ep > 1:
            reason = "experts are gathered inside of blocks, which torch can't compute again to their end"
            problems.append(Problem(asked, f"with ep={plan.chosen('ep')} {reason}", "activation.budget=null"))
        return problems

    @hookimpl
    def apply_activation_checkpointing(self, part: ModelPart) -> None:
        """Wrap the `forward` of the part's blocks."""
        if self.budget != 1:
            self.wrap(part)

    def extra(self) -> dict[str, Any]:
        """Keep the outputs of `KEPT`, or those that fit into the budget."""
        if self.budget is None:
            return {"contexts": partial(contexts)}
        if self.budget == 0:
            return {}
        from framework_plugins.activation.budget import Budget

        return {"choose": Budget(self.budget, KEPT.__contains__, contexts)}


def contexts(choice: Any = None) -> tuple[Any, Any]:
    """Return the contexts of forward and of recomputation, new ones for each call of a block.

    Args:
        choice: policy of this call; None = by operator.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    from framework.adapters.torch_private import RepeatableReplay

    forward, replay = create_selective_checkpoint_contexts(choice or policy)  # type: ignore[no-untyped-call]
    return forward, RepeatableReplay(replay)


def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Tell whether the output of one operator is kept.

    Attention that drops is computed again: a kept output would leave the random stream where it was, and whatever draws
    after it in the block would get another mask than in forward.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    if operator_name(operator) in KEPT and not dropped(operator, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def operator_name(operator: Any) -> str:
    """Return `aten::mm` for `aten.mm.default`."""
    return str(operator.name()).partition(".")[0]


def dropped(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Return the share that a call of an operator drops by its own argument; None if it has no such argument."""
    position = _dropout_position(operator)
    if position is None:
        return None
    return float(kwargs.get("dropout_p", args[position] if position < len(args) else 0.0))


@cache
def _dropout_position(operator: Any) -> int | None:
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None
