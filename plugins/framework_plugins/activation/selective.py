"""`activation=selective`: costly outputs (matrix products, attention) are kept, the cheap rest is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

from framework_plugins.activation.full import Full

if TYPE_CHECKING:
    from torch.utils.checkpoint import CheckpointPolicy

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
    """Selective activation checkpointing (Korthikanti et al., 2022; here by operator, as torch's SAC).

    Attributes:
        every: of the blocks, counted over the whole model from 0, those that are recomputed: 1 = all, 2 = every second.
        preserve_rng_state: draw the same random numbers again; false saves time if nothing in a block is random.
    """

    option: ClassVar[str] = "selective"

    def extra(self) -> dict[str, Any]:
        """Keep the outputs of `KEPT`."""
        return {"contexts": partial(contexts)}


def contexts() -> tuple[Any, Any]:
    """Return the contexts of forward and of recomputation, new ones for each call of a block."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    from framework.adapters.torch_private import RepeatableReplay

    forward, replay = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return forward, RepeatableReplay(replay)


def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Tell whether the output of one operator is kept.

    Attention that drops is computed again: a kept output would leave the random stream where it was, and whatever draws
    after it in the block would get another mask than in forward.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    name = operator.name().partition(".")[0]
    if name in KEPT and not _dropout(operator, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _dropout(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    position = _dropout_position(operator)
    if position is None:
        return 0.0
    return float(kwargs.get("dropout_p", args[position] if position < len(args) else 0.0))


@cache
def _dropout_position(operator: Any) -> int | None:
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None
