"""A small GPT as a user would write it, with what makes tensor parallelism hard: biases, query norms, dropout, ties."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, *, width: int, heads: int, kv_heads: int, head_dim: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.dropout = heads, kv_heads, head_dim, dropout
        self.wq = nn.Linear(width, heads * head_dim, bias=bias)
        self.wk = nn.Linear(width, kv_heads * head_dim, bias=False)  # a key bias has no gradient
        self.wv = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.q_norm = nn.LayerNorm(head_dim)
        self.wo = nn.Linear(heads * head_dim, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (self.wq(x), self.wk(x), self.wv(x)))
        y = F.scaled_dot_product_attention(
            self.q_norm(q), k, v, is_causal=True, enable_gqa=True, dropout_p=self.dropout if self.training else 0.0
        )
        return self.wo(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=bias)
        self.w3 = nn.Linear(width, hidden, bias=bias)
        self.drop = nn.Dropout(dropout)
        self.w2 = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.drop(F.silu(self.w1(x)) * self.w3(x)))


class Block(nn.Module):
    def __init__(
        self, *, width: int, heads: int, kv_heads: int, head_dim: int, hidden: int, dropout: float, bias: bool
    ):
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = Attention(
            width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dropout=dropout, bias=bias
        )
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, hidden, dropout, bias)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Gpt(LightningModule):
    tp_plan: ClassVar = {
        "tokens": "embedding",
        "positions": "embedding",
        "layers.*.norm1": "norm",
        "layers.*.norm2": "norm",
        "layers.*.attention.w[qkv]": "colwise",
        "layers.*.attention.q_norm": "shared",
        "layers.*.attention.wo": "rowwise",
        "layers.*.mlp.w1": "colwise",
        "layers.*.mlp.w3": "colwise",
        "layers.*.mlp.w2": "rowwise",
        "norm": "norm",
        "head": "head",
    }

    def __init__(
        self,
        *,
        vocab: int = 12,
        width: int = 16,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 4,
        hidden: int = 24,
        depth: int = 2,
        context: int = 8,
        dropout: float = 0.0,
        bias: bool = True,
        tied: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        shape = {"width": width, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        shape |= {"hidden": hidden, "dropout": dropout, "bias": bias}
        self.layers = nn.ModuleList(
            Block(
                width=width,
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                hidden=hidden,
                dropout=dropout,
                bias=bias,
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight
        self.to(dtype)

    def init_weights(self, seed: int = 3) -> Gpt:
        """Every parameter random, biases and norms too: a bias of 0 would hide that it is added twice."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                shift = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3 + shift
                parameter.copy_(values)
        return self

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Any:
        logits = self(batch["ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)
        return {"loss": loss, "weight": (batch["targets"] != -100).sum()}


class ByHand(Attention):
    """Numbers of heads in its views, keys and values repeated, products and softmax by hand."""

    def forward(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        q = self.q_norm(self.wq(x).view(samples, length, self.heads, self.head_dim)).transpose(1, 2)
        k = self.wk(x).view(samples, length, self.kv_heads, self.head_dim).transpose(1, 2).repeat_interleave(2, dim=1)
        v = self.wv(x).view(samples, length, self.kv_heads, -1).transpose(1, 2).repeat_interleave(2, dim=1)
        later = torch.ones(8, 8, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-2, -1)) / self.head_dim**0.5
        y = torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1) @ v
        return self.wo(y.transpose(1, 2).reshape(samples, length, -1))


class Unplanned(Gpt):
    """A model that says nothing of tensor parallelism, for samples of 8 tokens."""

    tp_plan = None  # type: ignore[assignment]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for layer in self.layers:
            layer.attention.__class__ = ByHand


def batches(steps: int = 6, samples: int = 4, length: int = 8, vocab: int = 12) -> list[dict[str, Tensor]]:
    """Random tokens; some targets don't count."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for _ in range(steps):
        ids = torch.randint(0, vocab, (samples, length + 1), generator=generator)
        targets = ids[:, 1:].clone()
        targets[0, length // 2 :] = -100
        result.append({"ids": ids[:, :-1], "targets": targets})
    return result
