"""Put recomputation around one block without changing a parameter's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

if TYPE_CHECKING:
    from framework.dropout import Masks

ContextMaker = Callable[[], Any]
Chooser = Callable[..., dict[str, Any]]


def recompute_(
    block: nn.Module,
    *,
    masks: Masks | None = None,
    preserve_rng_state: bool = True,
    contexts: ContextMaker = noop_context_fn,
    choose: Chooser | None = None,
) -> None:
    """Make `block` drop its activations after forward and compute them again in backward (Chen et al., 2016).

    Only `forward` of the instance changes, so names, hooks and data-parallel wraps (which act in `__call__`) stay as
    they are, and a deep copy of the block is bound to itself. Nothing is dropped where no gradient is recorded.

    Args:
        block: has no recomputation yet; what was already put on its `forward` (tensor parallelism) is recomputed too.
        masks: of dropout in the block, which are drawn again whatever is computed in between.
        preserve_rng_state: draw the same random numbers again.
        contexts: makes the pair of contexts of forward and recomputation (`torch.utils.checkpoint.checkpoint`).
        choose: called before each forward that learns with what will be run (as often as one likes: it drops the same),
            the block and its arguments; returns further arguments of `checkpoint`. None = there are none.
    """
    run = unbound(block)
    # the compiler can't trace a call that is given the default
    chosen: dict[str, Any] = {} if contexts is noop_context_fn else {"context_fn": contexts}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(self, *args, **kwargs)
        again = run if masks is None else masks.recomputed(run)
        return checkpoint(
            again,
            self,
            *args,
            use_reentrant=False,
            preserve_rng_state=preserve_rng_state,
            **(chosen if choose is None else choose(again, self, *args, **kwargs)),
            **kwargs,
        )

    block.forward = MethodType(forward, block)


def unbound(block: nn.Module) -> Callable[..., Any]:
    """Return the `forward` of `block` as a function of the block, to be bound again.

    A bound method that was merely wrapped would have a deep copy of the block run the original's weights.
    """
    inner = block.forward
    return inner.__func__ if isinstance(inner, MethodType) and inner.__self__ is block else _without_self(inner)


def _without_self(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return run


def every_nth(blocks: Mapping[str, nn.Module], every: int) -> list[nn.Module]:
    """Return those blocks whose number in the whole model is a multiple of `every`, whatever stage they are on."""
    chosen = []
    for position, (name, block) in enumerate(blocks.items()):
        key = name.rpartition(".")[2]
        if (int(key) if key.isdecimal() else position) % every == 0:
            chosen.append(block)
    return chosen
