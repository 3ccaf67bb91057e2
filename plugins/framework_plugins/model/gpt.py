"""`model=gpt`: a decoder-only transformer in the shape of Llama, as a user would write it: it knows no framework.

RMSNorm (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021), SwiGLU (Shazeer, 2020), grouped queries (Ainslie
et al., 2023), scaled dot-product attention; Touvron et al., Llama 2 (2023), for the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F


def rotation(positions: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [*positions, size / 2] of the rotary angles, fp32: pair i turns theta^(-2i/size) each.

    Computed at each forward: it costs next to nothing, and there is no table to keep on the right device and in the
    right precision, or to initialise.
    """
    rates = theta ** (-torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size)
    angles = positions[..., None].float() * rates
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [batch, heads, length, size]: element i of the first half is paired with element i of the second."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def within(documents: Tensor | None) -> Tensor | None:
    """Return a mask [batch, 1, queries, keys]: True where the key isn't after the query and of the same document.

    Args:
        documents: number of each token's document, [batch, length]; None = a row is one, and no mask is needed.
    """
    if documents is None:
        return None
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


class Attention(nn.Module):
    """Causal self-attention; how many heads there are is read from the projections, which may be parts of the whole."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.wq = nn.Linear(width, heads * self.head_size, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head_size, bias=False)
        self.wo = nn.Linear(heads * self.head_size, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map [batch, length, width] to the same shape; `mask` as from `within`."""
        q, k, v = (y.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for y in (self.wq(x), self.wk(x), self.wv(x)))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
        out: Tensor = self.wo(y.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1(x)) * w3(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to the same shape."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on the normalised residual stream and added to it."""

    def __init__(
        self, width: int, feed_forward: nn.Module, *, heads: int, kv_heads: int, dropout: float, norm_eps: float
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, norm_eps)
        self.attention = Attention(width, heads, kv_heads)
        self.feed_forward_norm = nn.RMSNorm(width, norm_eps)
        self.feed_forward = feed_forward
        self.residual_dropout = nn.Dropout(dropout)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Return the residual stream [batch, length, width] after the attention."""
        out: Tensor = x + self.residual_dropout(self.attention(self.attention_norm(x), cos, sin, mask))
        return out

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map [batch, length, width] to the same shape; `mask` as from `within`."""
        x = self.attend(x, cos, sin, mask)
        out: Tensor = x + self.residual_dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out


class LanguageModel(LightningModule):
    """The step methods of a model over token ids, around the subclass's `loss`."""

    loss: Callable[[dict[str, Tensor]], dict[str, Tensor]]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the mean loss and its weight in tokens."""
        result = self.loss(batch)
        self.log("train_loss", result["loss"], prog_bar=True)
        return result

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Log the loss of held-out text."""
        result = self.loss(batch)
        self.log("val_loss", result["loss"], prog_bar=True)
        return result

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        """Log the loss of test text."""
        result = self.loss(batch)
        self.log("test_loss", result["loss"])
        return result


class Decoder(LanguageModel):
    """What `GPT` and `MoE` share: embedding, blocks, norm, head.

    Args:
        block: makes one block.
        vocab_size, width, layers, heads, context, tied, norm_eps, rope_theta: as in `GPT`.
    """

    reads_documents: ClassVar[bool] = True
    """Says to `data=packed` that attention keeps to the tokens with the same number in `batch["documents"]`."""

    def __init__(
        self,
        block: Callable[[], nn.Module],
        *,
        vocab_size: int,
        width: int,
        layers: int,
        heads: int,
        context: int,
        tied: bool,
        norm_eps: float,
        rope_theta: float,
    ) -> None:
        super().__init__()
        self.vocab_size, self.context = vocab_size, context
        self.head_size, self.rope_theta = width // heads, rope_theta
        self.depth = layers
        # in the order of execution
        self.tokens = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.norm = nn.RMSNorm(width, norm_eps)
        self.output = nn.Linear(width, vocab_size, bias=False)
        if tied:
            self.output.weight = self.tokens.weight
        self.init_weights()

    def init_weights(self) -> None:
        """Draw all weights: normal with deviation 0.02; what is added to the residual stream, 0.02 / sqrt(2 layers).

        That the method exists says that the model may be built without memory and filled later.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                nn.init.ones_(parameter)
            else:
                onto_residual = name.removesuffix(".weight").endswith(("wo", "w2"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.depth) if onto_residual else 0.02)

    def angles(self, inputs: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for token ids [batch, length] at `positions`; None = 0, 1, 2, ..."""
        length = inputs.shape[-1]
        if length > self.context:
            raise ValueError(f"A sequence of {length} tokens is longer than context={self.context}.")
        if positions is None:
            positions = torch.arange(length, device=inputs.device)
        cos, sin = rotation(positions, self.head_size, self.rope_theta)  # [length, ...] or [batch, length, ...]
        return (cos, sin) if cos.ndim == 2 else (cos.unsqueeze(1), sin.unsqueeze(1))  # the same for all heads


def cross_entropy(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return `loss`, the mean in nats over the targets that count (not -100), and `weight`, how many they are."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    return {"loss": loss, "weight": (targets != -100).sum()}


def check_shape(width: int, heads: int, kv_heads: int) -> None:
    """Raise ValueError if the heads don't fit."""
    if width % (2 * heads):
        raise ValueError(f"width={width} must be a multiple of 2 x heads={heads}: rotary positions turn pairs.")
    if heads % kv_heads:
        raise ValueError(f"heads={heads} must be a multiple of kv_heads={kv_heads}.")


def hidden_size(width: int) -> int:
    """Return the usual width inside a SwiGLU: 8/3 width, rounded up to a multiple of 64."""
    return -(-8 * width // (3 * 64)) * 64


class GPT(Decoder):
    """A language model over token ids.

    A batch is `{"inputs": [batch, length], "targets": the same}`, int64; a target of -100 doesn't count. An entry
    `positions`, the same shape, says where in its sequence each token stands; without it a row is a whole sequence. An
    entry `documents`, the same shape, numbers the documents in a row: tokens see those of their own alone.

    Args:
        vocab_size: number of token ids; 256 = bytes.
        width: of the residual stream.
        layers: blocks.
        heads: of attention; each has width / heads elements, an even number.
        kv_heads: heads of keys and values, shared by heads / kv_heads queries each; None = heads.
        hidden: width inside the feed-forward part; None = 8/3 width, rounded up to a multiple of 64.
        context: longest sequence.
        tied: the head uses the embedding's matrix.
        dropout: on what is added to the residual stream; on attention weights it would depend on the mix.
        norm_eps: of RMSNorm.
        rope_theta: base of the rotary angles.
    """

    tp_plan: ClassVar[dict[str, str]] = {
        "tokens": "embedding",
        "layers.*.attention_norm": "norm",
        "layers.*.attention.wq": "colwise",
        "layers.*.attention.wk": "colwise",
        "layers.*.attention.wv": "colwise",
        "layers.*.attention.wo": "rowwise",
        "layers.*.feed_forward_norm": "norm",
        "layers.*.feed_forward.w1": "colwise",
        "layers.*.feed_forward.w2": "rowwise",
        "layers.*.feed_forward.w3": "colwise",
        "norm": "norm",
        "output": "head",
    }
    """Which layer may be split how over tensor-parallel ranks."""

    cp_plan: ClassVar[dict[str, int]] = {"inputs": 1, "targets": 1, "positions": 1}
    """Which entries of a batch are sequences, along which dim; `positions` is read where it is there."""

    def __init__(
        self,
        *,
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
        kv_heads = heads if kv_heads is None else kv_heads
        check_shape(width, heads, kv_heads)
        hidden = hidden_size(width) if hidden is None else hidden
        super().__init__(
            lambda: Block(
                width,
                FeedForward(width, hidden),
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

    def forward(self, inputs: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Map token ids [batch, length] to logits [batch, length, vocab_size]; `positions` None = 0, 1, 2, ..."""
        cos, sin = self.angles(inputs, positions)
        mask = within(documents)
        x = self.tokens(inputs)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        logits: Tensor = self.output(self.norm(x))
        return logits

    def loss(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean cross entropy in nats over the targets that count, and how many they are."""
        logits = self(batch["inputs"], batch.get("positions"), batch.get("documents"))
        return cross_entropy(logits, batch["targets"])
