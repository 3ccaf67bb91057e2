"""Attention over pieces by one exchange before it: of keys and values (`allgather`), or of heads (`ulysses`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from framework.errors import UsageError
from framework_plugins.cp.sequences import Pieces
from framework_plugins.cp.ulysses import shareable


class Gather(torch.autograd.Function):
    """[...] on each of n ranks -> [n, ...] on all; the gradient of a piece is the sum of those of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Gather."""
        ctx.group, ctx.crosses_ranks = group, True
        ranks = dist.get_world_size(group)
        whole = x.new_empty(ranks * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
        return whole.view(ranks, *x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sum and scatter."""
        mine = gradient.new_empty(gradient.shape[1:])
        dist.reduce_scatter_tensor(mine, gradient.flatten(0, 1).contiguous(), group=ctx.group)
        return mine, None


class Trade(torch.autograd.Function):
    """[n, ...]: block s goes to rank s, and block s of the result came from rank s; its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Exchange."""
        ctx.group, ctx.crosses_ranks = group, True
        return _traded(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Send the gradients back."""
        return _traded(gradient, ctx.group), None


def _traded(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(result, x.contiguous(), group=group)
    return result


class GatheredAttention:
    """Queries of this rank attend to the gathered keys and values up to their own place.

    A mask of [tokens of a piece, tokens up to its end] is made for each piece but the first.
    """

    def __init__(self, pieces: Pieces, group: dist.ProcessGroup) -> None:
        self.pieces = pieces
        self.group = group

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
        """As `framework_plugins.cp.attention.Attend`."""
        both = Gather.apply(torch.cat((key, value), -1), self.group)  # type: ignore[no-untyped-call]
        whole = self.pieces.whole(list(both), -2)
        found = []
        for piece, mine in zip(self.pieces.mine, query.chunk(len(self.pieces.mine), -2), strict=True):
            tokens = mine.shape[-2]
            past = whole[..., : (piece + 1) * tokens, :]
            keys, values = torch.split(past, [key.shape[-1], value.shape[-1]], -1)
            mask = torch.ones(tokens, keys.shape[-2], dtype=torch.bool, device=query.device).tril(piece * tokens)
            found.append(
                F.scaled_dot_product_attention(
                    mine,
                    keys,
                    values,
                    attn_mask=mask if piece else None,
                    is_causal=piece == 0,
                    dropout_p=dropout,
                    scale=scale,
                    enable_gqa=query.shape[1] != key.shape[1],
                )
            )
        return torch.cat(found, -2)


class HeadsAttention:
    """Each rank attends with its share of the heads over whole sequences."""

    def __init__(self, pieces: Pieces, group: dist.ProcessGroup) -> None:
        self.pieces = pieces
        self.group = group

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
        """As `framework_plugins.cp.attention.Attend`."""
        ranks, heads, kv_heads = self.pieces.ranks, query.shape[1], key.shape[1]
        if not shareable(heads, kv_heads, ranks):
            raise UsageError(
                f"cp=ulysses can't share {heads} heads ({kv_heads} of keys and values) evenly over {ranks} ranks: type "
                "another cp.size, or cp=ring."
            )
        if kv_heads % ranks:  # fewer than ranks: each of those that need a head gets a copy
            key, value = (tensor.repeat_interleave(ranks // kv_heads, 1) for tensor in (key, value))
        query, key, value = (self._whole(tensor) for tensor in (query, key, value))
        found = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        samples, mine, _, size = found.shape
        pieces = found.reshape(samples, mine, ranks, -1, size).movedim(2, 0)  # to [ranks, samples, heads, tokens, size]
        return self._trade(pieces).movedim(0, 1).flatten(1, 2)

    def _whole(self, x: Tensor) -> Tensor:
        """[samples, heads, tokens of a rank, size] -> [samples, heads of a rank, tokens, size]."""
        blocks = x.reshape(x.shape[0], self.pieces.ranks, -1, *x.shape[2:]).movedim(1, 0)
        return self._trade(blocks).movedim(0, 2).flatten(2, 3)

    def _trade(self, blocks: Tensor) -> Tensor:
        result: Tensor = Trade.apply(blocks, self.group)  # type: ignore[no-untyped-call]
        return result
