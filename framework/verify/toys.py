"""A model and data for `verify --mutants`, written as a user would: they know no framework."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

IGNORED = -100


class Padded(LightningDataModule):
    """Random ids; sample i has between 1 and `length` targets that count.

    Args:
        vocabulary: ids.
        length: of a sample.
        samples: in all.
    """

    def __init__(self, vocabulary: int = 32, length: int = 16, samples: int = 256) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        ids = torch.randint(0, vocabulary, (samples, length + 1), generator=generator)
        self.inputs, self.targets = ids[:, :-1].contiguous(), ids[:, 1:].clone()
        for row, keep in enumerate(torch.randint(1, length + 1, (samples,), generator=generator)):
            self.targets[row, keep:] = IGNORED

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches `{"inputs": [samples, length], "targets": the same}`."""
        return DataLoader(TensorDataset(self.inputs, self.targets), batch_size=1, collate_fn=_named)


def _named(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    inputs, targets = zip(*rows, strict=True)
    return {"inputs": torch.stack(inputs), "targets": torch.stack(targets)}


class _Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.silu(self.up(x))))  # type: ignore[no-any-return]


class Biased(LightningModule):
    """Blocks of two linear layers with biases, and dropout of what is between them."""

    tp_plan: ClassVar = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self, vocabulary: int = 32, width: int = 16, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def init_weights(self) -> None:
        """Weights with which every part learns."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [samples, length] to logits [samples, length, vocabulary]."""
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        """Return the mean loss over the targets that count, and their number."""
        targets = batch["targets"]
        loss = F.cross_entropy(self(batch["inputs"]).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        return {"loss": loss, "weight": (targets != IGNORED).sum()}
