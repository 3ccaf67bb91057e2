"""Attention over pieces of sequences equals torch's own over whole ones: outputs and gradients, in double precision."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from framework_plugins.cp.exchange import GatheredAttention, HeadsAttention
from framework_plugins.cp.ring_attention import RingAttention
from framework_plugins.cp.sequences import Pieces

WAYS = [
    (RingAttention, True), (RingAttention, False), (GatheredAttention, True), (GatheredAttention, False),
    (HeadsAttention, False),
]  # fmt: skip
HEADS = [(4, 4), (4, 2), (4, 1), (8, 4)]
"""Of queries, of keys and values."""
SAMPLES, LENGTH, SIZE, VALUE_SIZE = 2, 16, 6, 10
SCALES = (None, 0.7)


def tensors(heads: int, kv_heads: int) -> list[Tensor]:
    """Queries, keys, values, and a gradient of the output; large scores, so that a wrong merge shows."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(heads, SIZE), (kv_heads, SIZE), (kv_heads, VALUE_SIZE), (heads, VALUE_SIZE)]
    return [
        3 * torch.randn(SAMPLES, count, LENGTH, size, generator=generator, dtype=torch.float64)
        for count, size in shapes
    ]


def results(attend: Any, held: list[Tensor]) -> list[Tensor]:
    """Output and gradients of queries, keys and values."""
    inputs = [tensor.clone().requires_grad_() for tensor in held[:3]]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, held[3])]


def worst(case: tuple[Any, bool, int, int, float | None], recompute: bool) -> float:
    """Largest difference from whole attention on this rank, over the largest value; collective."""
    way, balanced, heads, kv_heads, scale = case
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = Pieces(rank, ranks, balanced)
    whole = tensors(heads, kv_heads)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=heads != kv_heads)

    split = way(pieces, dist.group.WORLD)

    def pieced(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if recompute:
            return checkpoint(split, q, k, v, scale, 0.0, use_reentrant=False)
        return split(q, k, v, scale, 0.0)

    want = [pieces.take(tensor, -2) for tensor in results(plain, whole)]
    got = results(pieced, [pieces.take(tensor, -2) for tensor in whole])
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))


def differences(cases: list[Any], recompute: bool) -> list[float]:
    return [worst(case, recompute) for case in cases]


@pytest.mark.parametrize("ranks", [2, 4])
def test_it_equals_whole_attention(pool: Any, ranks: int) -> None:
    cases = [(*way, *heads, scale) for way, heads, scale in product(WAYS, HEADS, SCALES)]
    for rank, found in enumerate(pool.run(differences, ranks, cases, False, timeout=120)):
        far = {str(case): value for case, value in zip(cases, found, strict=True) if not value < 1e-12}
        assert not far, f"rank {rank}"


def test_it_is_the_same_when_computed_again(pool: Any) -> None:
    cases = [(*way, 4, 2, None) for way in WAYS]
    for found in pool.run(differences, 2, cases, True, timeout=60):
        assert max(found) < 1e-12


def test_the_ring_computes_in_fp32_and_returns_what_it_got(pool: Any) -> None:
    assert pool.run(low_precision, 2, timeout=60) == [True, True]


def low_precision() -> bool:
    pieces = Pieces(dist.get_rank(), 2, True)
    exact = [tensor.bfloat16() for tensor in tensors(4, 2)]
    want = results(
        lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True),
        [tensor.double() for tensor in exact],
    )
    split = RingAttention(pieces, dist.group.WORLD)
    got = results(lambda *qkv: split(*qkv, None, 0.0), [pieces.take(tensor, -2) for tensor in exact])
    assert {tensor.dtype for tensor in got} == {torch.bfloat16}
    for a, b in zip(got, want, strict=True):  # as near as one rounding of the result, and of the output in backward
        torch.testing.assert_close(a.double(), pieces.take(b, -2), rtol=0.02, atol=0.02 * float(b.abs().max()))
    return True


def test_pieces_are_all_and_whole_is_the_inverse_of_take() -> None:
    x = torch.arange(48).view(2, 24)
    for ranks, balanced in product((1, 2, 4), (True, False)):
        held = [Pieces(rank, ranks, balanced) for rank in range(ranks)]
        assert sorted(piece for one in held for piece in one.mine) == list(range(held[0].count))
        assert torch.equal(held[0].whole([one.take(x, 1) for one in held], 1), x)
        if balanced:  # equal work under a causal mask
            assert len({sum(one.mine) for one in held}) == 1
