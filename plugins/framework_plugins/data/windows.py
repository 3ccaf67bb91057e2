"""Windows over a row of tokens: what every option of token data is made of, wherever the tokens lie."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from framework import UsageError


class Tokens(Protocol):
    """A row of token ids: an array of NumPy, in memory or mapped; or files that look like one."""

    def __len__(self) -> int:
        """Return the number of tokens."""

    def __getitem__(self, where: Any, /) -> Any:
        """Return a part of the row for a slice, and an array of the same shape for an array of places."""


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of a row: sample i holds the tokens from i * stride on, as inputs and as targets one token later.

    Args:
        tokens: the row.
        context: tokens of a window.
        stride: distance between the starts of two windows.
    """

    def __init__(self, tokens: Tokens, context: int, stride: int) -> None:
        self.tokens = tokens
        self.context = context
        self.stride = stride

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1 - self.context) // self.stride + 1)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return inputs and targets, [context] int64."""
        return {name: column[0] for name, column in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return a whole batch, [len(indices), context]: one read for all, where a DataLoader would stack samples."""
        starts = np.asarray(indices, dtype=np.int64)[:, None] * self.stride
        rows = torch.from_numpy(self.tokens[starts + np.arange(self.context + 1)].astype(np.int64))
        # copies: of one row a slice is contiguous, and the two would share memory
        return {"inputs": rows[:, :-1].clone(), "targets": rows[:, 1:].clone()}


def as_it_is(batch: Any) -> Any:
    """Collate nothing: `Windows` gives whole batches."""
    return batch


class TokenData(LightningDataModule):
    """A row of tokens, cut into a training and a held-out part, in windows; subclasses say where tokens come from.

    Args:
        context: tokens of a window.
        stride: tokens between the starts of two training windows.
        val_fraction: part of the row, at its end, that is held out.
        cache_dir: where files are kept; None = `data` in the run's folder.
        num_workers: processes that read ahead, a rank.
    """

    def __init__(
        self, *, context: int, stride: int, val_fraction: float, cache_dir: str | None, num_workers: int
    ) -> None:
        super().__init__()
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction} must be between 0 and 1.")
        if context < 1 or stride < 1:
            raise ValueError(f"context={context} and stride={stride} must be at least 1.")
        self.context, self.stride = context, stride
        self.val_fraction, self.cache_dir, self.num_workers = val_fraction, cache_dir, num_workers
        self._parts: tuple[Tokens, Tokens] | None = None

    @abstractmethod
    def read(self) -> Tokens:
        """Return all tokens where there is no run, and write nothing."""

    def windows(self, part: int) -> Windows:
        """Return the windows of the training part (0), or of the held-out one (1), side by side."""
        return Windows(self._part(part), self.context, self.context if part else self.stride)

    def _folder(self) -> Path:
        """Return where files are kept."""
        if self.cache_dir is not None:
            return Path(self.cache_dir)
        if self.trainer is None:
            raise UsageError("data.cache_dir isn't set, and there is no run whose folder could hold the tokens.")
        return Path(self.trainer.default_root_dir) / "data"

    def _border(self, tokens: Tokens) -> int:
        """Return the place at which the held-out part begins."""
        return len(tokens) - int(len(tokens) * self.val_fraction)

    def _split(self, tokens: Tokens) -> tuple[Tokens, Tokens]:
        """Cut off the held-out end.

        Raises:
            UsageError: a part is shorter than one window.
        """
        border = self._border(tokens)
        parts: tuple[Tokens, Tokens] = tokens[:border], tokens[border:]
        if min(map(len, parts)) <= self.context:
            raise UsageError(
                f"The data has {len(tokens)} tokens, cut into {len(parts[0])} and {len(parts[1])} (data.val_fraction="
                f"{self.val_fraction}), which doesn't give each part a window of data.context={self.context} + 1."
            )
        return parts

    def _part(self, index: int) -> Tokens:
        if self._parts is None:
            self._parts = self._split(self.read())  # outside a run
        return self._parts[index]

    def _loader(self, part: int, shuffle: bool) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(
            self.windows(part),
            shuffle=shuffle,
            collate_fn=as_it_is,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Windows of the training part, shuffled; how many make a batch is the framework's affair."""
        return self._loader(0, shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Windows of the held-out part, side by side."""
        return self._loader(1, shuffle=False)

    def facts(self) -> dict[str, Any]:
        """Return what a plan keeps of the data; writes nothing."""
        return {
            "train_tokens": len(self._part(0)),
            "val_tokens": len(self._part(1)),
            "train_samples": len(self.windows(0)),
            "val_samples": len(self.windows(1)),
        }
