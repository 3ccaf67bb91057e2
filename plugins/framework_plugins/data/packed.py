"""`data=packed`: documents of different lengths, one after the other in windows of one context.

The row of all documents is cut every `context` tokens, so a window holds as many documents as fit, a long document goes
on in the next window, and no token is lost but those after the last whole window. Which documents are in sample i
follows from the documents and the settings alone.

What crosses the border of two documents doesn't count: a document's last token has the target -100. And attention stays
inside of each document, if the model can confine it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from framework import UsageError
from framework_plugins.data.text import JOINT, Text, write_tokens
from framework_plugins.data.windows import Tokens, Windows

IGNORED = -100
"""The target that doesn't count."""

ATTENTIONS = ("document", "window")


class Packs(Windows):
    """Windows of documents that follow one another.

    Args:
        tokens: of all documents.
        context: tokens of a window.
        ends: of each document, the place after its last token; ascending, the last one is the end of the row.
        confined: whether batches say which tokens are of one document.
    """

    def __init__(self, tokens: Tokens, context: int, ends: NDArray[np.int64], confined: bool) -> None:
        super().__init__(tokens, context, context)
        self.ends = ends
        self.confined = confined

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return a batch, each entry [len(indices), context] int64.

        Beside `inputs` and `targets`, if `confined`: `documents`, the number of each token's document in its window,
        and `positions`, its place in what the window has of the document.
        """
        batch = super().__getitems__(indices)
        begins = self._begins(np.asarray(indices, dtype=np.int64) * self.context)
        batch["targets"][torch.from_numpy(begins[:, 1:])] = IGNORED
        if self.confined:
            places = np.arange(self.context)
            batch["documents"] = torch.from_numpy(np.cumsum(begins[:, :-1], 1, dtype=np.int64))
            newest = np.maximum.accumulate(np.where(begins[:, :-1], places, 0), 1)
            batch["positions"] = torch.from_numpy(places - newest)
        return batch

    def _begins(self, starts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return where in each window, and just after it, another document begins: [windows, context + 1]."""
        first = np.searchsorted(self.ends, starts, side="right")
        count = np.searchsorted(self.ends, starts + self.context, side="right") - first
        window = np.repeat(np.arange(len(starts)), count)
        number = np.arange(len(window)) + np.repeat(first - (np.cumsum(count) - count), count)
        begins = np.zeros((len(starts), self.context + 1), dtype=bool)
        begins[window, self.ends[number] - starts[window]] = True
        return begins


class Packed(Text):
    """A text of many documents, cut into a training and a held-out part, in windows that hold several documents.

    Args:
        path: file or folder of text, or `package:NAME`; None = the running Python's documentation.
        separator: text that ends a document, and stays at its end; None = each file is a document.
        attention: `document`: batches say which tokens are of one document, and the model's attention keeps to it (it
            must have the class attribute `reads_documents`); `window`: a token sees all that stands before it in its
            window, other documents too.
        context: tokens of a window.
        val_fraction: part of the text, at its end, that is held out, to the nearest document.
        tokenizer: a `tokenizer.json` of the package tokenizers, for each document alone; None = bytes.
        cache_dir: where token files are kept; None = `data` in the run's folder.
        num_workers: processes that read ahead, a rank.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        separator: str | None = "\n\n",
        attention: str = "document",
        context: int = 128,
        val_fraction: float = 0.1,
        tokenizer: str | None = None,
        cache_dir: str | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            path=path,
            context=context,
            val_fraction=val_fraction,
            tokenizer=tokenizer,
            cache_dir=cache_dir,
            num_workers=num_workers,
        )
        if separator == "":
            raise ValueError("separator is empty; null makes each file a document.")
        if attention not in ATTENTIONS:
            raise ValueError(f"attention={attention} is unknown; choose {' or '.join(ATTENTIONS)}.")
        self.separator, self.attention = separator, attention

    def documents(self) -> list[bytes]:
        """Return the documents, which make the whole text when joined."""
        if self.separator is None:
            *others, last = self._files[1]
            return [file + JOINT for file in others] + [last]
        mark = self.separator.encode()
        *others, last = self._corpus[1].split(mark)
        return [document + mark for document in others] + ([last] if last else [])

    @cached_property
    def _encoded(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The tokens of all documents, and the end of each."""
        encoded = [self.encode(document) for document in self.documents()]
        return np.concatenate(encoded), np.cumsum([len(one) for one in encoded], dtype=np.int64)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """The end of each document; `setup` reads it from disk."""
        return self._encoded[1]

    def read(self) -> Tokens:
        """Return the tokens of all documents."""
        return self._encoded[0]

    def _file(self) -> Path:
        words = "files" if self.separator is None else self.separator.encode().hex()
        return self._folder() / f"{self.sha256[:16]}-packed-{words}.npy"

    def _ends_file(self) -> Path:
        return self._file().with_suffix(".ends.npy")

    def prepare_data(self) -> None:
        """Write tokens and ends to disk, unless they are there; Lightning calls it on one rank a host."""
        if not self._file().exists():
            write_tokens(self._ends_file(), self._encoded[1])
            write_tokens(self._file(), self._encoded[0])  # last: where it is, both are

    def setup(self, stage: str) -> None:
        """Map the tokens into memory.

        Raises:
            UsageError: the model doesn't say that it reads which tokens are of one document.
        """
        module = None if self.trainer is None else self.trainer.lightning_module
        if self.attention == "document" and module is not None and not getattr(module, "reads_documents", False):
            raise UsageError(
                f"data.attention=document: {type(module).__name__} has no class attribute reads_documents = True, by "
                'which a model says that it keeps attention to the tokens with the same number in batch["documents"]: '
                "type data.attention=window to let tokens see other documents of their window."
            )
        self.prepare_data()
        self._ends = np.load(self._ends_file())
        super().setup(stage)

    def _border(self, tokens: Tokens) -> int:
        """Return the end of a document that is nearest to the wanted place; not of the last one, if there are more."""
        ends = self._ends[:-1] if len(self._ends) > 1 else self._ends
        return int(ends[np.abs(ends - super()._border(tokens)).argmin()])

    def windows(self, part: int) -> Packs:
        """Return the windows of the training part (0), or of the held-out one (1)."""
        tokens, border = self._part(part), len(self._part(0))
        ends = self._ends[self._ends > border] - border if part else self._ends[self._ends <= border]
        return Packs(tokens, self.context, ends, self.attention == "document")

    def _pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        before, after = super()._pairs()
        inside = np.ones(len(before), dtype=bool)
        inside[self.windows(1).ends[:-1] - 1] = False
        return before[inside], after[inside]

    def facts(self) -> dict[str, Any]:
        """Return what a plan keeps of the data; reads it all, writes nothing."""
        return {**super().facts(), "documents": len(self._ends)}
