"""`data=text`: token ids of a text, read from disk by memory map, in windows of one context.

The default text is the reference documentation that comes with the running Python (`pydoc_data.topics`, about 465,000
characters of English), so that nothing is downloaded or copied.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from framework import UsageError

Tokens = NDArray[np.unsignedinteger[Any]]


def read_corpus(path: str | None) -> tuple[str, bytes]:
    """Return the name of a text and its bytes.

    Args:
        path: a file; or a folder, whose files (hidden ones left out) are joined in the order of their paths, with an
            empty line between them; None = the running Python's documentation topics, in the order of their names.

    Raises:
        UsageError: there is nothing there.
    """
    if path is None:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise UsageError(
                "This Python came without pydoc_data.topics, the default text: type data.path=<file or folder of text>."
            ) from error
        return "pydoc_data.topics", "\n\n".join(topics[name] for name in sorted(topics)).encode()
    place = Path(path).expanduser()
    if place.is_file():
        return str(place), place.read_bytes()
    files = sorted(file for file in place.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(place)))
    if not files:
        raise UsageError(
            f"data.path={path} is neither a file nor a folder with files in it: type the path of your text."
        )
    return str(place), b"\n\n".join(file.read_bytes() for file in files)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of a text: sample i holds the tokens from i * stride on, as inputs and as targets one token later.

    Args:
        tokens: of the text.
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
        return {"inputs": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def as_it_is(batch: Any) -> Any:
    """Collate nothing: `Windows` gives whole batches."""
    return batch


class Text(LightningDataModule):
    """A text, cut into a training and a held-out part, in windows.

    Args:
        path: file or folder of text; None = the running Python's documentation.
        context: tokens of a window.
        stride: tokens between the starts of two training windows; None = context, so that each token is read once.
        val_fraction: part of the text, at its end, that is held out.
        tokenizer: a `tokenizer.json` of the package tokenizers; None = bytes.
        cache_dir: where token files are kept; None = `data` in the run's folder.
        num_workers: processes that read ahead, a rank.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        context: int = 128,
        stride: int | None = None,
        val_fraction: float = 0.1,
        tokenizer: str | None = None,
        cache_dir: str | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction} must be between 0 and 1.")
        if context < 1 or (stride is not None and stride < 1):
            raise ValueError(f"context={context} and stride={stride} must be at least 1.")
        self.path, self.tokenizer, self.cache_dir = path, tokenizer, cache_dir
        self.context, self.stride = context, stride or context
        self.val_fraction, self.num_workers = val_fraction, num_workers
        self._parts: tuple[Tokens, Tokens] | None = None

    # -- text and tokens -------------------------------------------------------------------------------------------
    @cached_property
    def _corpus(self) -> tuple[str, bytes]:
        return read_corpus(self.path)

    @cached_property
    def _vocabulary(self) -> Any:
        """The tokenizer; None = bytes."""
        if self.tokenizer is None:
            return None
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise UsageError(
                "data.tokenizer needs the package tokenizers: pip install 'lightning-framework[tokenizers]'."
            ) from error
        if not Path(self.tokenizer).is_file():
            raise UsageError(f"data.tokenizer={self.tokenizer} is no file: type the path of a tokenizer.json.")
        return Tokenizer.from_file(self.tokenizer)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return 256 if self.tokenizer is None else int(self._vocabulary.get_vocab_size())

    @cached_property
    def sha256(self) -> str:
        """Of the text's bytes and, if there is one, the tokenizer's file."""
        digest = hashlib.sha256(self._corpus[1])
        if self._vocabulary is not None:
            digest.update(Path(str(self.tokenizer)).read_bytes())
        return digest.hexdigest()

    def _encode(self) -> Tokens:
        name, text = self._corpus
        if self.tokenizer is None:
            return np.frombuffer(text, dtype=np.uint8)
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{name} isn't UTF-8 ({error}), which data.tokenizer needs: leave it out for bytes."
            ) from error
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        return np.array(self._vocabulary.encode(decoded).ids, dtype=dtype)

    def _file(self) -> Path:
        folder = self.cache_dir
        if folder is None:
            if self.trainer is None:
                raise UsageError("data.cache_dir isn't set, and there is no run whose folder could hold the tokens.")
            folder = str(Path(self.trainer.default_root_dir) / "data")
        return Path(folder) / f"{self.sha256[:16]}.npy"

    # -- Lightning's hooks -----------------------------------------------------------------------------------------
    def prepare_data(self) -> None:
        """Write the tokens to disk, unless they are there; Lightning calls it on one rank a host."""
        file = self._file()
        if file.exists():
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{uuid.uuid4().hex}.tmp")
        with unfinished.open("wb") as stream:
            np.save(stream, self._encode())
        os.replace(unfinished, file)  # at once: whoever reads sees all or nothing

    def setup(self, stage: str) -> None:
        """Map the token file into memory; several ranks share its pages."""
        self.prepare_data()  # a host that Lightning's call didn't reach, or an object outside a run
        tokens = np.load(self._file(), mmap_mode="r")
        self._parts = self._split(tokens)
        module = None if self.trainer is None else self.trainer.lightning_module
        known = getattr(module, "vocab_size", None)
        if known is not None and known < self.vocab_size:
            raise UsageError(
                f"The data has {self.vocab_size} token ids, but the model knows {known}: "
                f"type model.vocab_size={self.vocab_size}."
            )

    def _split(self, tokens: Tokens) -> tuple[Tokens, Tokens]:
        """Cut off the held-out end.

        Raises:
            UsageError: a part is shorter than one window.
        """
        held_out = int(len(tokens) * self.val_fraction)
        parts = tokens[: len(tokens) - held_out], tokens[len(tokens) - held_out :]
        if min(map(len, parts)) <= self.context:
            raise UsageError(
                f"The text has {len(tokens)} tokens, cut into {len(parts[0])} and {len(parts[1])} (data.val_fraction="
                f"{self.val_fraction}), which doesn't give each part a window of data.context={self.context} + 1."
            )
        return parts

    def _part(self, index: int) -> Tokens:
        if self._parts is None:
            self._parts = self._split(self._encode())  # outside a run
        return self._parts[index]

    def _loader(self, tokens: Tokens, stride: int, shuffle: bool) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(
            Windows(tokens, self.context, stride),
            shuffle=shuffle,
            collate_fn=as_it_is,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Windows of the training part, shuffled; how many make a batch is the framework's affair."""
        return self._loader(self._part(0), self.stride, shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Windows of the held-out part, side by side."""
        return self._loader(self._part(1), self.context, shuffle=False)

    # -- what is known of the text ---------------------------------------------------------------------------------
    @cached_property
    def bigram_entropy(self) -> float:
        """Entropy of a token given the one before it, in nats, by the counts of the held-out part itself.

        H = -sum over pairs (a, b) of n(a, b) / n * log(n(a, b) / n(a)): the loss of the best model that sees one token
        back and knows the counts in advance; one that is estimated from the training part has a higher loss.
        """
        held_out = self._part(1).astype(np.int64)
        pairs = held_out[:-1] * self.vocab_size + held_out[1:]
        seen, count = np.unique(pairs, return_counts=True)
        before, of_before = np.unique(held_out[:-1], return_counts=True)
        total = of_before[np.searchsorted(before, seen // self.vocab_size)]
        return float(-(count * np.log(count / total)).sum() / len(pairs))

    def facts(self) -> dict[str, Any]:
        """Return what a plan keeps of the data; reads it all, writes nothing."""
        return {
            "corpus": self._corpus[0],
            "corpus_bytes": len(self._corpus[1]),
            "corpus_sha256": self.sha256,
            "vocabulary": self.vocab_size,
            "train_tokens": len(self._part(0)),
            "val_tokens": len(self._part(1)),
            "train_samples": len(Windows(self._part(0), self.context, self.stride)),
            "val_samples": len(Windows(self._part(1), self.context, self.context)),
        }
