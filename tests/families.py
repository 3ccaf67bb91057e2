"""Twelve kinds of model as their authors write them: plain LightningModules that know no framework and no pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from user_modules import Rows

WIDTH = 16


class Trained(LightningModule):
    """What all of them share: SGD with momentum, and a step that logs its loss and, in evaluation, `val_loss`."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError


class Gpt(Trained):
    """Decoder: learned positions, causal mask, pre-norm blocks; the head uses the embedding's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, WIDTH)
        self.positions = nn.Parameter(torch.randn(8, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Layer(causal=True) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["ids"]).flatten(0, 1), batch["next"].flatten())


class Layer(nn.Module):
    """A transformer's layer: self-attention, attention to a memory if there is one, a feed-forward net."""

    def __init__(self, causal: bool = False, memory: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.cross = Attention() if memory else None
        self.cross_norm = nn.LayerNorm(WIDTH) if memory else None
        self.ff = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, mask=mask, causal=self.causal)
        if self.cross is not None:
            x = x + self.cross(self.cross_norm(x), memory, mask=mask)
        return x + self.ff(x)


class Attention(nn.Module):
    """Four heads; queries from one sequence, keys and values from another."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        q, (k, v) = self.q(x), self.kv(y).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k, v))
        if mask is not None:
            mask = mask[:, None, None, :]
        return self.out(F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal).transpose(1, 2).flatten(-2))


class Bert(Trained):
    """Encoder with a padding mask and two losses: masked tokens, and a class of the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(16, WIDTH), nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.pooler, self.classes, self.masked = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 16)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x, mask=mask)
        return {"tokens": self.masked(x), "classes": self.classes(torch.tanh(self.pooler(x[:, 0])))}

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        out = self(batch["ids"], mask=batch["ids"] != 0)
        tokens = F.cross_entropy(out["tokens"].flatten(0, 1), batch["next"].flatten())
        return tokens + 0.5 * F.cross_entropy(out["classes"], batch["class"])


class T5(Trained):
    """Encoder and decoder of one vocabulary: the encoding and a mask are used by every layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(16, WIDTH)
        self.encoder = nn.ModuleList(Layer() for _ in range(2))
        self.decoder = nn.ModuleList(Layer(causal=True, memory=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.shared(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.shared(target)
        for layer in self.decoder:
            x = layer(x, None, memory=memory)
        return self.head(x)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["ids"], target=batch["next"]).flatten(0, 1), batch["next"].flatten())


class Vit(Trained):
    """Patches, a class token and positions as bare parameters, then an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 5, WIDTH) * 0.1)
        self.encoder = nn.Sequential(*(Layer() for _ in range(4)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), 1) + self.pos
        return self.head(self.encoder(x)[:, 0])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["image"]), batch["class"])


class Residual(nn.Module):
    """A basic block of a residual net, with activations in place."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        same = inner == outer and stride == 1
        self.shortcut = (
            None if same else nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)


class ResNet(Trained):
    """Residual net with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(Residual(8, 8, 1), Residual(8, 8, 1))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16, 1))
        self.fc = nn.Linear(16, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(image))).mean((2, 3)))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["image"]), batch["class"])


class UNet(Trained):
    """Down and up again with skip connections over the whole depth."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(self.pair(a, b) for a, b in ((3, 8), (8, 12)))
        self.bottom = self.pair(12, 16)
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in ((16, 12), (12, 8)))
        self.merge = nn.ModuleList(self.pair(a, b) for a, b in ((24, 12), (16, 8)))
        self.out = nn.Conv2d(8, 3, 1)

    @staticmethod
    def pair(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(a, b, 3, 1, 1), nn.GroupNorm(2, b), nn.SiLU(), nn.Conv2d(b, b, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat((up(x), skips.pop()), 1))
        return self.out(x)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(self(batch["image"]), batch["image"].roll(1, -1))


class Experts(nn.Module):
    """All experts on all tokens, weighted by the two largest gates; also how evenly they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.gate(x).softmax(-1)
        weights, chosen = gates.topk(2)
        routed = torch.zeros_like(gates).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
        out = torch.stack([expert(x) for expert in self.experts], -2)
        return x + (routed.unsqueeze(-1) * out).sum(-2), (gates**2).mean()


class Moe(Trained):
    """Mixture of experts; a term of the loss comes from every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, WIDTH)
        self.mixes = nn.ModuleList(Experts() for _ in range(3))
        self.attends = nn.ModuleList(Layer(causal=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, 16)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x, balance = self.tokens(batch["ids"]), 0.0
        for attend, mix in zip(self.attends, self.mixes, strict=True):
            x, term = mix(attend(x))
            balance = balance + term
        self.log("balance", balance)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["next"].flatten()) + 0.1 * balance


class Lstm(Trained):
    """Language model of two recurrent layers, the second from the first one's last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.first, self.second = nn.LSTM(WIDTH, 24, batch_first=True), nn.LSTM(24, 24, batch_first=True)
        self.head = nn.Linear(24, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x, state = self.first(self.embed(ids))
        x, _ = self.second(F.relu(x), state)
        return self.head(x)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["ids"]).flatten(0, 1), batch["next"].flatten())


class Vae(Trained):
    """Variational autoencoder; its noise comes with the batch, so that it can be compared; no `forward` at all."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU())
        self.mean, self.logvar = nn.Linear(24, 6), nn.Linear(24, 6)
        self.decoder = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 192))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        h = self.encoder(batch["image"])
        mean, logvar = self.mean(h), self.logvar(h)
        kl = -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum(-1).mean()
        self.log("kl", kl)
        z = mean + (0.5 * logvar).exp() * batch["noise"]
        return F.mse_loss(self.decoder(z), batch["image"].flatten(1)) + 0.01 * kl


class Mlp(Trained):
    """Layers of different shapes in one Sequential."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (192, 48, 40, 32, 24, 3)
        self.net = nn.Sequential(nn.Flatten())
        for a, b in pairwise(sizes):
            self.net.extend([nn.Linear(a, b), nn.Tanh()])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch["image"]), batch["class"])


class Graph(Trained):
    """Message passing by `index_add_` into a fresh tensor, along edges that each sample brings."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, WIDTH)
        self.messages = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.updates = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, 3)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        samples, nodes, _ = batch["nodes"].shape
        offset = torch.arange(samples, device=self.device)[:, None] * nodes
        source, target = ((batch["edges"][..., end] + offset).flatten() for end in (0, 1))
        h = torch.relu(self.enter(batch["nodes"].flatten(0, 1)))
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat((h[source], h[target]), -1)).relu()
            gathered = torch.zeros(samples * nodes, WIDTH, device=self.device)
            gathered.index_add_(0, target, sent)
            h = update(gathered, h)
        return F.cross_entropy(self.out(h.view(samples, nodes, -1).mean(1)), batch["class"])


class Gan(LightningModule):
    """Two optimizers, turn by turn, in every batch: manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 192))
        self.critic = nn.Sequential(nn.Linear(192, 24), nn.ReLU(), nn.Linear(24, 1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        made = self.generator(batch["noise"])
        real = batch["image"].flatten(1)
        for optimizer, loss in zip(
            self.optimizers(),
            (
                lambda: F.softplus(-self.critic(made)).mean(),
                lambda: F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(made.detach())).mean(),
            ),
            strict=True,
        ):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in (self.generator, self.critic)]


def samples(count: int, seed: int = 3) -> Rows:
    """Return samples that have what any of the families reads."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 16, (count, 9), generator=g)
    return Rows(
        **{
            "ids": ids[:, :-1].contiguous(),
            "next": ids[:, 1:].contiguous(),
            "class": torch.randint(0, 3, (count,), generator=g),
            "image": torch.randn(count, 3, 8, 8, generator=g, dtype=torch.float64),
            "noise": torch.randn(count, 6, generator=g, dtype=torch.float64),
            "nodes": torch.randn(count, 5, 3, generator=g, dtype=torch.float64),
            "edges": torch.randint(0, 5, (count, 8, 2), generator=g),
        }
    )


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
        name: as in the table.
        make: builds it.
        batch_norm: whether its result depends on how a batch is cut: it is held against one process that runs the same
            micro-batches.
    """

    name: str
    make: Callable[[], LightningModule]
    batch_norm: bool = False


FAMILIES = [
    Family("GPT, tied head", Gpt),
    Family("BERT", Bert),
    Family("T5 (encoder-decoder)", T5),
    Family("ViT", Vit),
    Family("ResNet", ResNet, batch_norm=True),
    Family("U-Net", UNet),
    Family("MoE (dense routing)", Moe),
    Family("LSTM", Lstm),
    Family("VAE", Vae),
    Family("MLP", Mlp),
    Family("graph net", Graph),
    Family("GAN", Gan),
]
