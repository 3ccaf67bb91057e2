"""`data=digits`: 1,797 scanned digits of 8 x 8 pixels, as scikit-learn brings them (Alpaydin and Kaynak, 1998)."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from framework import UsageError


class Samples(Dataset[dict[str, Tensor]]):
    """`{"inputs": [64] fp32 from 0 to 1, "targets": 0-dim int64}` for each image."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one image."""
        return {"inputs": self.inputs[index], "targets": self.targets[index]}


class Digits(LightningDataModule):
    """The digits, split into a training and a held-out part.

    Args:
        val_fraction: part that is held out, drawn once at random, the same in every run.
        num_workers: processes that read ahead, a rank.
    """

    def __init__(self, *, val_fraction: float = 0.2, num_workers: int = 0) -> None:
        super().__init__()
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction} must be between 0 and 1.")
        self.val_fraction, self.num_workers = val_fraction, num_workers

    @cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise UsageError("data=digits needs scikit-learn: pip install 'lightning-framework[digits]'.") from error
        images, labels = load_digits(return_X_y=True)
        return torch.from_numpy(images).float() / 16.0, torch.from_numpy(labels).long()

    @cached_property
    def _parts(self) -> tuple[Samples, Samples]:
        inputs, targets = self._all
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
        held_out = int(len(targets) * self.val_fraction)
        train, val = order[held_out:], order[:held_out]
        return Samples(inputs[train], targets[train]), Samples(inputs[val], targets[val])

    def _loader(self, samples: Samples, shuffle: bool) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(
            samples,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The training part, shuffled; how many make a batch is the framework's affair."""
        return self._loader(self._parts[0], shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The held-out part."""
        return self._loader(self._parts[1], shuffle=False)

    def facts(self) -> dict[str, Any]:
        """Return what a plan keeps of the data."""
        inputs, targets = self._all
        digest = hashlib.sha256(inputs.numpy().tobytes() + targets.numpy().tobytes())
        return {
            "corpus": "sklearn.datasets.load_digits",
            "corpus_sha256": digest.hexdigest(),
            "classes": int(targets.max()) + 1,
            "train_samples": len(self._parts[0]),
            "val_samples": len(self._parts[1]),
        }
