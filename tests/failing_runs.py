"""A small model and data by `_target_`, and a probe that makes trouble at a chosen place: for P36, P37 and P39."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

RANK = "RANK"
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


class Numbered(Dataset[dict[str, Tensor]]):
    """Sample i is its own number; sample `broken` can't be read by rank `broken_on`."""

    def __init__(self, size: int, broken: int | None = None, broken_on: int = 0) -> None:
        self.size, self.broken, self.broken_on = size, broken, broken_on

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.broken is not None and index >= self.broken and int(os.environ[RANK]) == self.broken_on:
            assert get_worker_info() is not None
            raise ValueError("boom7")
        return {"id": torch.tensor(index), "x": torch.full((4,), index / self.size)}


class NumberedData(LightningDataModule):
    """Shuffled numbers for training, five for validation."""

    def __init__(self, size: int = 12, workers: int = 0, broken: int | None = None, broken_on: int = 0) -> None:
        super().__init__()
        self.size, self.workers, self.broken, self.broken_on = size, workers, broken, broken_on

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches of one."""
        data = Numbered(self.size, self.broken, self.broken_on)
        return DataLoader(data, batch_size=1, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader[Any]:
        """Batches of one."""
        return DataLoader(Numbered(8), batch_size=1)


class Tiny(LightningModule):
    """One linear layer; writes which samples each rank trained at which step to `ids_<rank>.jsonl`."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Fit a line."""
        entry = {"attempt": int(os.environ[ATTEMPT]), "step": self.trainer.global_step, "ids": batch["id"].tolist()}
        with open(Path(self.folder) / f"ids_{os.environ[RANK]}.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")
        return (self.layer(batch["x"]).squeeze(-1) - batch["id"]).square().mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log something."""
        self.log("val_loss", self.layer(batch["x"]).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Momentum, so that the optimizer has a state."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class ManualTiny(Tiny):
    """Makes its optimizer steps itself."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Fit a line."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Trouble(Callback):
    """Raises, or sends a signal to its own process, on one rank of the first attempt.

    Args:
        rank: which.
        where: `setup`, `train`, `validation`, `save` or `teardown`.
        step: optimizer steps done (`train`, `save`).
        what: `raise` or a signal's name.
    """

    def __init__(self, rank: int, where: str, step: int = 0, what: str = "raise") -> None:
        self.rank, self.where, self.step, self.what = rank, where, step, what

    def _make(self, where: str) -> None:
        if where != self.where or int(os.environ[RANK]) != self.rank or int(os.environ[ATTEMPT]) > 0:
            return
        if self.what == "raise":
            raise ValueError("boom7")
        os.kill(os.getpid(), getattr(signal, self.what))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before the model is set up."""
        self._make("setup")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Before a step."""
        if trainer.global_step == self.step:
            self._make("train")

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """In the second batch of the first validation."""
        if batch_idx == 1:
            self._make("validation")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """While a checkpoint is being made."""
        if trainer.global_step == self.step:
            self._make("save")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """After the last barrier."""
        self._make("teardown")
