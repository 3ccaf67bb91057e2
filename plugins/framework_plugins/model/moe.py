"""`model=moe`: the GPT with a mixture of experts in each block, as a user would write it: it knows no framework.

Shazeer et al., 2017; one expert a token as in Fedus et al., Switch Transformer (2021), several with weights that add up
to 1 as in Lepikhin et al., GShard (2020) and Jiang et al., Mixtral (2024).

Everything that sees more than one token is defined within a sequence, so that it doesn't depend on how a batch is cut:

* the balance loss is the sequence-wise one of DeepSeek-V3 (2024, eq. 17-20); the usual one is a product of two means
  over the micro-batch, which isn't a sum over samples: it would be another loss for every number of ranks;
* the capacity of an expert is so many tokens of each sequence; beyond it, later positions are dropped first.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from framework_plugins.model.gpt import GPT, Block, Decoder, check_shape, cross_entropy, hidden_size, within


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype in which scores are computed: float32, float64 where `x` is."""
    return torch.promote_types(x.dtype, torch.float32)


class Experts(nn.Module):
    """SwiGLU networks side by side, with their weights stacked: `[experts, out, in]`."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, hidden, width))
        self.w2 = nn.Parameter(torch.empty(experts, width, hidden))
        self.w3 = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Map tokens [n, width] to the same shape; the first counts[0] rows go through expert 0, the next to 1, ..."""
        parts: tuple[Tensor, ...] = torch.split(tokens, counts.tolist())
        # an expert without tokens takes part too: its gradient is zero, not missing
        return torch.cat(
            [
                F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
                for x, w1, w2, w3 in zip(parts, self.w1, self.w2, self.w3, strict=True)
            ]
        )


class Mixture(nn.Module):
    """Sends each token to its `top_k` experts and adds up what they return, weighted.

    Args:
        width: of the residual stream.
        hidden: width inside an expert.
        experts: how many there are.
        top_k: how many a token goes to.
        capacity_factor: an expert takes at most `ceil(factor * top_k * length / experts)` tokens of a sequence, by
            position; None = all.
    """

    def __init__(self, width: int, hidden: int, experts: int, top_k: int, capacity_factor: float | None) -> None:
        super().__init__()
        self.top_k, self.capacity_factor = top_k, capacity_factor
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map [batch, length, width] to the same shape, and return [batch, 2]: balance loss, share dropped."""
        if x.is_meta:  # a pipeline asks what other stages return; where tokens go isn't known without values
            return torch.empty_like(x), x.new_empty(x.shape[0], 2, dtype=wide(x))
        logits = self.router(x)
        scores = logits.softmax(-1, wide(x))
        weights, chosen = scores.topk(self.top_k)
        if self.top_k > 1:  # of one alone the weight would be 1, and the router would learn nothing
            weights = weights / weights.sum(-1, keepdim=True)
        kept = self.within_capacity(chosen)
        dropped = 1 - kept.to(scores.dtype).mean((1, 2))
        y = self.dispatch(x, weights, chosen, kept)
        return y, torch.stack((balance(scores, chosen), dropped), -1)

    def within_capacity(self, chosen: Tensor) -> Tensor:
        """Return which of the choices [batch, length, top_k] their experts have room for."""
        if self.capacity_factor is None:
            return torch.ones_like(chosen, dtype=torch.bool)
        experts, length = self.router.out_features, chosen.shape[1]
        capacity = math.ceil(self.capacity_factor * self.top_k * length / experts)
        asked = F.one_hot(chosen.flatten(1), experts)  # [batch, length * top_k, experts]
        before = (asked.cumsum(1) - asked).gather(-1, chosen.flatten(1).unsqueeze(-1)).view_as(chosen)
        return before < capacity

    def dispatch(self, x: Tensor, weights: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
        """Run the experts on what is theirs; a dropped choice adds nothing.

        Args:
            x: [batch, length, width].
            weights: of the choices, [batch, length, top_k].
            chosen: experts, same shape.
            kept: whether a choice counts, same shape.
        """
        experts = self.router.out_features
        target = chosen.where(kept, experts).flatten()  # what is dropped comes after the last expert
        order = target.argsort(stable=True)
        counts = target.bincount(minlength=experts + 1)[:experts]
        if self.capacity_factor is not None:
            order = order[: int(counts.sum())]
        tokens = x.reshape(-1, x.shape[-1])
        y = self.experts(tokens[order // self.top_k], counts)
        choices = y.new_zeros(len(target), y.shape[-1]).index_copy(0, order, y)
        weighted = choices.unflatten(0, (-1, self.top_k)) * weights.reshape(-1, self.top_k, 1).to(y.dtype)
        out: Tensor = weighted.sum(1).view_as(x).to(x.dtype)
        return out


def balance(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return the balance loss of each sequence, [batch]: 1 where all experts are asked alike, `experts` at worst.

    `experts * sum_e f_e P_e` with f_e the share of a sequence's choices that fall on expert e, and P_e its mean score;
    what capacity drops counts as chosen.

    Args:
        scores: of all experts, [batch, length, experts], adding up to 1.
        chosen: [batch, length, top_k].
    """
    experts = scores.shape[-1]
    share = F.one_hot(chosen, experts).to(scores.dtype).mean((1, 2))
    return experts * (share * scores.mean(1)).sum(-1)


class MixtureBlock(Block):
    """One layer of the GPT, whose feed-forward part is a `Mixture`."""

    def forward(  # type: ignore[override]
        self, x: Tensor, gauges: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map [batch, length, width] to the same shape, and add this layer's gauges to those [batch, 2] given."""
        x = self.attend(x, cos, sin, mask)
        y, gauge = self.feed_forward(self.feed_forward_norm(x))
        return x + self.residual_dropout(y), gauges + gauge


class MoE(Decoder):
    """A language model over token ids, with a mixture of experts in each block.

    A batch is that of `GPT`. What is minimised is the mean cross entropy + `balance_weight` x the mean over layers and
    over targets that count of their sequence's balance loss; both are logged.

    Args:
        experts: in each block.
        top_k: experts that a token goes to.
        capacity_factor: of an expert, see `Mixture`; None = no token is ever dropped.
        balance_weight: of the balance loss.
        hidden: width inside an expert; None = 8/3 width, rounded up to a multiple of 64.
        vocab_size, width, layers, heads, kv_heads, context, tied, dropout, norm_eps, rope_theta: as in `GPT`.
    """

    tp_plan: ClassVar[dict[str, str]] = {
        pattern: word for pattern, word in GPT.tp_plan.items() if ".feed_forward." not in pattern
    }
    """Attention and vocabulary are split; router and experts are computed alike on every tensor-parallel rank."""

    ep_plan: ClassVar[tuple[str, ...]] = ("layers.*.feed_forward.experts",)
    """Which modules hold stacked experts that may be spread over ranks."""

    def __init__(
        self,
        *,
        experts: int = 8,
        top_k: int = 2,
        capacity_factor: float | None = None,
        balance_weight: float = 0.01,
        vocab_size: int = 256,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        kv_heads: int | None = None,
        hidden: int | None = None,
        context: int = 128,
        tied: bool = False,
        dropout: float = 0.0,
        norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
    ) -> None:
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k={top_k} must be between 1 and experts={experts}.")
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"capacity_factor={capacity_factor} must be positive, or null for no limit.")
        kv_heads = heads if kv_heads is None else kv_heads
        check_shape(width, heads, kv_heads)
        hidden = hidden_size(width) if hidden is None else hidden
        super().__init__(
            lambda: MixtureBlock(
                width,
                Mixture(width, hidden, experts, top_k, capacity_factor),
                heads=heads,
                kv_heads=kv_heads,
                dropout=dropout,
                norm_eps=norm_eps,
            ),
            vocab_size=vocab_size,
            width=width,
            layers=layers,
            heads=heads,
            context=context,
            tied=tied,
            norm_eps=norm_eps,
            rope_theta=rope_theta,
        )
        self.balance_weight = balance_weight
        self.drops = capacity_factor is not None

    def forward(
        self, inputs: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map token ids [batch, length] to logits [batch, length, vocab_size] and gauges [batch, 2].

        The gauges are means over layers of each sequence: its balance loss, and the share of choices dropped. They go
        from block to block, as a pipeline stage knows nothing of the others but what its last block returned.
        """
        cos, sin = self.angles(inputs, positions)
        mask = within(documents)
        x = self.tokens(inputs)
        gauges = x.new_zeros(len(inputs), 2, dtype=wide(x))
        for layer in self.layers:
            x, gauges = layer(x, gauges, cos, sin, mask)
        return self.output(self.norm(x)), gauges / self.depth

    def loss(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return means over the targets that count: `loss`, `balance`, `dropped`; and `weight`, how many they are."""
        logits, gauges = self(batch["inputs"], batch.get("positions"), batch.get("documents"))
        result = cross_entropy(logits, batch["targets"])
        count = (batch["targets"] != -100).sum(-1, keepdim=True)  # of each sequence
        balance_loss, dropped = ((gauges * count).sum(0) / result["weight"]).unbind()
        return {**result, "balance": balance_loss, "dropped": dropped}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the objective and its weight in tokens."""
        result = self.loss(batch)
        self.log("train_loss", result["loss"], prog_bar=True)
        self.log("balance", result["balance"])
        if self.drops:
            self.log("dropped", result["dropped"])
        return {"loss": result["loss"] + self.balance_weight * result["balance"], "weight": result["weight"]}
