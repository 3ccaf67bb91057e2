"""Ring attention (Liu et al., 2023): blocks of attention, merged by their log-sum-exp (Milakov and Gimelshein, 2018).

In step t a rank has the keys and values of the rank t before it, and skips what lies behind its own queries. Backward
goes round once more: probabilities are computed again from the kept log-sum-exp (as Dao et al., 2022), and the
gradients of keys and values travel along with them, home in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from framework.errors import UsageError
from framework_plugins.cp.sequences import Pieces

KEYS, GRADIENTS = 0, 1
"""What is in a message."""


class RingAttention:
    """Causal attention over the pieces of all ranks; scores are computed in fp32, or fp64 for fp64 tensors."""

    def __init__(self, pieces: Pieces, group: dist.ProcessGroup) -> None:
        self.pieces = pieces
        self.group = group

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
        """As `framework_plugins.cp.attention.Attend`."""
        if dropout > 0.0:
            raise UsageError(
                f"cp=ring can't drop attention weights (dropout_p={dropout}): those of a query are spread over steps; "
                "set attention's dropout to 0, or type cp=ulysses."
            )
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        result: Tensor = _Ring.apply(query, key, value, scale, self.pieces, self.group)  # type: ignore[no-untyped-call]
        return result


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, pieces: Pieces, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.crosses_ranks = True  # for `zero_leaf_gradients`
        wide = torch.promote_types(query.dtype, torch.float32)
        both = torch.cat((key, value), -1)
        with torch.autocast(query.device.type, enabled=False):
            queries = _grouped(query, key.shape[1], pieces)
            out = [torch.zeros(*q.shape[:-1], value.shape[-1], dtype=wide, device=q.device) for q in queries]
            total = [torch.full((*q.shape[:-1], 1), -torch.inf, dtype=wide, device=q.device) for q in queries]
            for step in range(pieces.ranks):
                arriving = _pass_on(both, group, KEYS) if step < pieces.ranks - 1 else None
                for i, k, v, diagonal in _blocks(both, key.shape[-1], pieces, step):
                    scores = _scores(queries[i].to(wide), k.to(wide), scale, diagonal)
                    block = scores.logsumexp(-1, keepdim=True)
                    out[i], total[i] = merge(out[i], total[i], (scores - block).exp() @ v.to(wide), block)
                both = both if arriving is None else arriving()
        result = torch.cat(out, -2).flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, result, torch.cat(total, -2))
        ctx.scale, ctx.pieces, ctx.group = scale, pieces, group
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, total = ctx.saved_tensors
        pieces, scale, heads, size = ctx.pieces, ctx.scale, key.shape[1], key.shape[-1]
        wide = total.dtype
        both = torch.cat((key, value), -1)
        with torch.autocast(query.device.type, enabled=False):
            queries, results = _grouped(query, heads, pieces), _grouped(result, heads, pieces)
            gradients = _grouped(gradient, heads, pieces)
            totals = total.chunk(len(queries), -2)
            drift = [(g.to(wide) * r.to(wide)).sum(-1, keepdim=True) for g, r in zip(gradients, results, strict=True)]
            d_query = [torch.zeros_like(q, dtype=wide) for q in queries]
            d_both = torch.zeros_like(both, dtype=wide)
            homing: Callable[[], Tensor] | None = None
            for step in range(pieces.ranks):
                arriving = _pass_on(both, ctx.group, KEYS) if step < pieces.ranks - 1 else None
                fresh = torch.zeros_like(d_both)
                targets = _blocks(fresh, size, pieces, step)
                for (i, k, v, diagonal), (_, d_k, d_v, _) in zip(
                    _blocks(both, size, pieces, step), targets, strict=True
                ):
                    q, g = queries[i].to(wide), gradients[i].to(wide)
                    weights = (_scores(q, k.to(wide), scale, diagonal) - totals[i]).exp()
                    d_scores = weights * (g @ v.to(wide).mT - drift[i]) * scale
                    d_query[i] = d_query[i] + d_scores @ k.to(wide)
                    d_k.add_((d_scores.mT @ q).sum(2, keepdim=True))  # over the queries of a group
                    d_v.add_((weights.mT @ g).sum(2, keepdim=True))
                d_both = fresh if homing is None else homing() + fresh
                homing = _pass_on(d_both, ctx.group, GRADIENTS)
                both = both if arriving is None else arriving()
            assert homing is not None
            d_both = homing()
        d_key, d_value = torch.split(d_both.to(key.dtype), [size, value.shape[-1]], -1)
        return torch.cat(d_query, -2).flatten(1, 2).to(query.dtype), d_key, d_value, None, None, None


def merge(out: Tensor, total: Tensor, more: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention over two sets of keys, and the log of its sum of exponentials, from those of each set."""
    merged = torch.logaddexp(total, block)
    return out * (total - merged).exp() + more * (block - merged).exp(), merged


def _grouped(x: Tensor, kv_heads: int, pieces: Pieces) -> list[Tensor]:
    """[samples, heads, tokens, size] -> [samples, heads of keys, queries of each, tokens, size] of each piece."""
    return list(x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]).chunk(len(pieces.mine), -2))


def _blocks(both: Tensor, size: int, pieces: Pieces, step: int) -> Iterator[tuple[int, Tensor, Tensor, bool]]:
    """Yield the pairs of a piece of queries and one of `both` that lies before it or is it.

    Args:
        both: keys, `size` wide, and values of the rank `step` before this one.
        size: of a head of keys.
        pieces: of this rank.
        step: of the ring.

    Yields:
        Which of this rank's pieces of queries; keys and values, views [samples, heads, 1, tokens, size]; whether the
        two are one piece, so that a causal mask is needed.
    """
    theirs = pieces.of((pieces.rank - step) % pieces.ranks)
    held = both.unsqueeze(2).chunk(len(theirs), -2)
    for i, query_piece in enumerate(pieces.mine):
        for piece, tensor in zip(theirs, held, strict=True):
            if piece <= query_piece:
                yield i, tensor[..., :size], tensor[..., size:], piece == query_piece


def _scores(q: Tensor, k: Tensor, scale: float, diagonal: bool) -> Tensor:
    scores = q @ k.mT * scale
    if not diagonal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -torch.inf)


def _pass_on(tensor: Tensor, group: dist.ProcessGroup, tag: int) -> Callable[[], Tensor]:
    """Start to send `tensor` to the next rank; the result waits for the one of the rank before."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sent, received = tensor.contiguous(), torch.empty_like(tensor, memory_format=torch.contiguous_format)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, tag=tag, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, group=group, tag=tag, group_peer=(rank - 1) % ranks),
        ]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        assert sent.shape == received.shape  # keeps what is being sent alive
        return received

    return wait
