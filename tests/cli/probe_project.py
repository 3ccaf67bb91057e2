"""A user's project for the command-line tests: a scalar model that notes what each rank saw, and fails on request."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Probe(LightningModule):
    """Learns one number.

    Args:
        lr: of plain SGD.
        log: file that gets a line of JSON a rank.
        fail: text of an error in the first step; None = no error.
    """

    def __init__(self, lr: float = 0.1, log: str | None = None, fail: str | None = None) -> None:
        super().__init__()
        self.lr, self.log_file, self.fail = lr, log, fail
        self.weight = nn.Parameter(torch.ones(1))

    def on_train_start(self) -> None:
        if self.log_file is not None:
            said = {"rank": self.global_rank, "world": self.trainer.world_size, "lr": self.lr, "pid": os.getpid()}
            with open(Path(self.log_file), "a") as file:
                file.write(json.dumps(said | {"run_dir": self.trainer.default_root_dir}) + "\n")

    def training_step(self, batch, batch_idx):
        if self.fail is not None:
            raise RuntimeError(self.fail)
        loss = (batch[0] * self.weight).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (batch[0] * self.weight).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Numbers(LightningDataModule):
    """The numbers 1 to `n`, eight times smaller."""

    def __init__(self, n: int = 8) -> None:
        super().__init__()
        self.samples = TensorDataset(torch.arange(1.0, n + 1)[:, None] / 8)

    def train_dataloader(self):
        return DataLoader(self.samples)

    def val_dataloader(self):
        return DataLoader(self.samples)
