"""`model=mlp`: a small classifier, as a user would write it: nothing here knows the framework."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F


class MLP(LightningModule):
    """Linear layers with ReLU between them.

    A batch is `{"inputs": [batch, ...] floating point, "targets": [batch] int64}`.

    Args:
        inputs: elements of a sample.
        width: of the hidden layers.
        layers: hidden layers of width x width after the first one; 0 = inputs to width to classes.
        classes: outputs.
        dropout: after each ReLU.
    """

    def __init__(
        self, *, inputs: int = 64, width: int = 64, layers: int = 4, classes: int = 10, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)) for _ in range(layers)
        )
        self.output = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [batch, ...] to scores [batch, classes]."""
        x = self.first(inputs.flatten(1))
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.output(x)
        return scores

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy in nats."""
        loss = F.cross_entropy(self(batch["inputs"]), batch["targets"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy of the held-out samples."""
        self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy of the test samples."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: dict[str, Tensor], stage: str) -> None:
        scores, targets = self(batch["inputs"]), batch["targets"]
        self.log(f"{stage}_loss", F.cross_entropy(scores, targets), prog_bar=True)
        self.log(f"{stage}_accuracy", (scores.argmax(1) == targets).to(torch.float64).mean(), prog_bar=True)
