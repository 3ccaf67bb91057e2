"""`data=text`: token ids of a text, read from disk by memory map, in windows of one context.

The default text is the reference documentation that comes with the running Python (`pydoc_data.topics`, about 465,000
characters of English), so that nothing is downloaded or copied.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from framework import UsageError
from framework_plugins.data.windows import TokenData, Tokens

JOINT = b"\n\n"
"""What stands between two files of a folder."""

PACKAGE = "package:"


def read_corpus(path: str | None) -> tuple[str, list[bytes]]:
    """Return the name of a text and its files, in order.

    Args:
        path: a file; or a folder, whose files (hidden ones left out) come in the order of their paths; or
            `package:NAME`, the Python files of an installed package; None = the running Python's documentation topics,
            in the order of their names.

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
        return "pydoc_data.topics", [topics[name].encode() for name in sorted(topics)]
    if path.startswith(PACKAGE):
        files = _files_of(path.removeprefix(PACKAGE))
        if not files:
            raise UsageError(f"data.path={path} names no installed package with Python files: type a path of yours.")
        return path, [file.read_bytes() for file in files]
    place = Path(path).expanduser()
    if place.is_file():
        return str(place), [place.read_bytes()]
    files = sorted(file for file in place.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(place)))
    if not files:
        raise UsageError(
            f"data.path={path} is neither a file nor a folder with files in it: type the path of your text."
        )
    return str(place), [file.read_bytes() for file in files]


def _files_of(package: str) -> list[Path]:
    """Return the Python files of an installed package, in the order of their paths; none if there is no package."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return []
    places = (spec and spec.submodule_search_locations) or []
    return [file for place in places for file in sorted(Path(place).rglob("*.py"))]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def write_tokens(file: Path, tokens: NDArray[Any]) -> None:
    """Write an `.npy` file at once: whoever reads sees all or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{uuid.uuid4().hex}.tmp")
    with unfinished.open("wb") as stream:
        np.save(stream, tokens)
    os.replace(unfinished, file)


class Text(TokenData):
    """A text, cut into a training and a held-out part, in windows.

    Args:
        path: file or folder of text, or `package:NAME`; None = the running Python's documentation.
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
        super().__init__(
            context=context,
            stride=context if stride is None else stride,
            val_fraction=val_fraction,
            cache_dir=cache_dir,
            num_workers=num_workers,
        )
        self.path, self.tokenizer = path, tokenizer

    # -- text and tokens -------------------------------------------------------------------------------------------
    @cached_property
    def _files(self) -> tuple[str, list[bytes]]:
        return read_corpus(self.path)

    @cached_property
    def _corpus(self) -> tuple[str, bytes]:
        return self._files[0], JOINT.join(self._files[1])

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

    def encode(self, text: bytes) -> NDArray[Any]:
        """Return the token ids of a text, of the smallest of the unsigned types that fits.

        Raises:
            UsageError: there is a tokenizer, and the text isn't UTF-8.
        """
        if self.tokenizer is None:
            return np.frombuffer(text, dtype=np.uint8)
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{self._corpus[0]} isn't UTF-8 ({error}), which data.tokenizer needs: leave it out for bytes."
            ) from error
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        return np.array(self._vocabulary.encode(decoded).ids, dtype=dtype)

    def read(self) -> Tokens:
        """Return the tokens of the whole text."""
        return self.encode(self._corpus[1])

    def _file(self) -> Path:
        return self._folder() / f"{self.sha256[:16]}.npy"

    # -- Lightning's hooks -----------------------------------------------------------------------------------------
    def prepare_data(self) -> None:
        """Write the tokens to disk, unless they are there; Lightning calls it on one rank a host."""
        if not self._file().exists():
            write_tokens(self._file(), self.encode(self._corpus[1]))

    def setup(self, stage: str) -> None:
        """Map the token file into memory; several ranks share its pages."""
        self.prepare_data()  # a host that Lightning's call didn't reach, or an object outside a run
        self._parts = self._split(np.load(self._file(), mmap_mode="r"))
        module = None if self.trainer is None else self.trainer.lightning_module
        known = getattr(module, "vocab_size", None)
        if known is not None and known < self.vocab_size:
            raise UsageError(
                f"The data has {self.vocab_size} token ids, but the model knows {known}: "
                f"type model.vocab_size={self.vocab_size}."
            )

    # -- what is known of the text ---------------------------------------------------------------------------------
    @cached_property
    def bigram_entropy(self) -> float:
        """Entropy of a token given the one before it, in nats, by the counts of the held-out part itself.

        H = -sum over pairs (a, b) of n(a, b) / n * log(n(a, b) / n(a)): the loss of the best model that sees one token
        back and knows the counts in advance; one that is estimated from the training part has a higher loss.
        """
        before, after = self._pairs()
        seen, count = np.unique(before * self.vocab_size + after, return_counts=True)
        first, of_first = np.unique(before, return_counts=True)
        total = of_first[np.searchsorted(first, seen // self.vocab_size)]
        return float(-(count * np.log(count / total)).sum() / len(before))

    def _pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each held-out token that has a target, and that target."""
        held_out = self._part(1)[:].astype(np.int64)
        return held_out[:-1], held_out[1:]

    def facts(self) -> dict[str, Any]:
        """Return what a plan keeps of the data; reads it all, writes nothing."""
        return {
            "corpus": self._corpus[0],
            "corpus_bytes": len(self._corpus[1]),
            "corpus_sha256": self.sha256,
            "vocabulary": self.vocab_size,
            **super().facts(),
        }
