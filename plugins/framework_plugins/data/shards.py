"""`data=shards`: token ids in many `.npy` files of a folder, read by memory map as if they were one row.

Shards come in the order of their paths. How many tokens each has is read once a run, by one rank of a host, into an
index in the run's folder; whoever goes on with the run holds the folder against it: a shard that is missing, new,
shorter or another one is named, for with it every sample after it would be another.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from framework import UsageError
from framework_plugins.data.text import JOINT, read_corpus, write_tokens
from framework_plugins.data.windows import TokenData, Tokens

OPEN = 128
"""Files that a process holds open at once; a shuffled run jumps between all of them."""

EDGE = 4096
"""Bytes at the start and the end of a file by which it is known again; reading all of it would take hours."""

BUNDLED = 16
"""Shards that the default text is cut into."""


@dataclass(frozen=True)
class Shard:
    """One file.

    Attributes:
        file: path in the folder.
        tokens: how many it has.
        dtype: of NumPy, as text.
        mark: of its size and edges, see `mark`.
    """

    file: str
    tokens: int
    dtype: str
    mark: str


def mark(file: Path) -> str:
    """Return 16 hex digits of the SHA-256 of a file's size and its first and last `EDGE` bytes."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(EDGE)
        stream.seek(max(0, size - EDGE))
        return hashlib.sha256(str(size).encode() + start + stream.read()).hexdigest()[:16]


def find(folder: Path) -> list[Shard]:
    """Return the shards of a folder, in the order of their paths.

    Raises:
        UsageError: there are none, or a file isn't a row of whole numbers, or is shorter than its header says.
    """
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.npy"))
    if not names:
        raise UsageError(f"There is no .npy file in data.path={folder}: type the path of your shards.")
    shards = []
    for name in names:
        tokens = _map(folder, name)
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer) or not len(tokens):
            raise UsageError(
                f"Shard {name} of data.path={folder} holds {tokens.dtype} of shape {tokens.shape}, where a row of "
                "whole numbers is needed: write it with numpy.save(file, token_ids)."
            )
        shards.append(Shard(name, len(tokens), str(tokens.dtype), mark(folder / name)))
    return shards


def compare(folder: Path, before: Sequence[Shard], now: Sequence[Shard]) -> None:
    """Raise UsageError that names the first shard which isn't what it was when the run began."""
    known, found = ({shard.file: shard for shard in shards} for shards in (before, now))
    for name in sorted(known.keys() | found.keys()):
        one, other = known.get(name), found.get(name)
        if one == other:
            continue
        if one is None or other is None:
            what = "is new" if one is None else "is missing"
        elif one.tokens != other.tokens:
            what = f"has {other.tokens} tokens and had {one.tokens}"
        else:
            what = "has other contents"
        raise UsageError(
            f"Shard {name} of data.path={folder} {what} since this run began, so samples would be others: bring back "
            "what was there, or start a new run_dir."
        )


def _map(folder: Path, name: str) -> NDArray[Any]:
    try:
        return np.load(folder / name, mmap_mode="r")  # type: ignore[no-any-return]
    except FileNotFoundError as error:
        raise UsageError(f"Shard {name} of data.path={folder} is missing: bring it back.") from error
    except (ValueError, EOFError) as error:
        raise UsageError(
            f"Shard {name} of data.path={folder} can't be read ({error}): it is no .npy file, or a part of one; write "
            "it again."
        ) from error


class Shards:
    """The tokens of many files as one row; files are mapped when something of them is read.

    Args:
        folder: that holds them.
        shards: in order.
        start: place in the row of all shards at which this one begins.
        stop: and ends; None = with the last token.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard], start: int = 0, stop: int | None = None) -> None:
        self.folder, self.shards = folder, shards
        self.ends = np.cumsum([shard.tokens for shard in shards], dtype=np.int64)
        self.start, self.stop = start, int(self.ends[-1]) if stop is None else stop
        self.dtype = np.result_type(*{shard.dtype for shard in shards})
        self._open: OrderedDict[int, NDArray[Any]] = OrderedDict()

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __getitem__(self, where: Any) -> Any:
        """Return a part of the row for a slice, and tokens of the same shape for an array of places."""
        if isinstance(where, slice):
            first, last, _ = where.indices(len(self))
            return Shards(self.folder, self.shards, self.start + first, self.start + last)
        places = where + self.start
        shard = np.searchsorted(self.ends, places, side="right")
        found = np.empty(places.shape, self.dtype)
        for number in np.unique(shard):
            here = shard == number
            begin = self.ends[number] - self.shards[number].tokens
            found[here] = self._tokens(int(number))[places[here] - begin]
        return found

    def __getstate__(self) -> dict[str, Any]:
        """A worker opens files itself."""
        return {**self.__dict__, "_open": OrderedDict()}

    def _tokens(self, number: int) -> NDArray[Any]:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        shard = self.shards[number]
        tokens = _map(self.folder, shard.file)
        if len(tokens) != shard.tokens:
            raise UsageError(
                f"Shard {shard.file} of data.path={self.folder} has {len(tokens)} tokens and had {shard.tokens} when "
                "this run began, so samples would be others: bring back what was there, or start a new run_dir."
            )
        if len(self._open) >= OPEN:
            self._open.popitem(last=False)
        self._open[number] = tokens
        return tokens


class ShardData(TokenData):
    """Shards of tokens, cut into a training and a held-out part, in windows, which go on from shard to shard.

    Args:
        path: folder of `.npy` files, each a row of token ids; None = the default text as bytes, written as shards into
            `cache_dir`.
        context: tokens of a window.
        stride: tokens between the starts of two training windows; None = context, so that each token is read once.
        val_fraction: part of all tokens, at the end of the last shards, that is held out.
        cache_dir: where the index is kept; None = `data` in the run's folder.
        num_workers: processes that read ahead, a rank.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        context: int = 128,
        stride: int | None = None,
        val_fraction: float = 0.1,
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
        self.path = path

    @property
    def folder(self) -> Path:
        """Where the shards are."""
        return self._folder() / "shards" if self.path is None else Path(self.path).expanduser()

    @cached_property
    def _bundled(self) -> NDArray[np.uint8]:
        return np.frombuffer(JOINT.join(read_corpus(None)[1]), dtype=np.uint8)

    def read(self) -> Tokens:
        """Return all tokens, in memory if there is no folder."""
        return self._bundled if self.path is None else Shards(self.folder, find(self.folder))

    def _index(self) -> Path:
        where = hashlib.sha256(str(self.folder.absolute()).encode()).hexdigest()[:16]
        return self._folder() / f"shards-{where}.json"

    def prepare_data(self) -> None:
        """Make the index, or hold the folder against the one that is there; Lightning calls it on one rank a host.

        Raises:
            UsageError: a shard isn't what it was.
        """
        index = self._index()
        if self.path is None and not index.exists():
            for number, piece in enumerate(np.array_split(self._bundled, BUNDLED)):
                write_tokens(self.folder / f"{number:05d}.npy", piece)
        shards = find(self.folder)
        if index.exists():
            compare(self.folder, self._known(), shards)
            return
        index.parent.mkdir(parents=True, exist_ok=True)
        unfinished = index.with_suffix(f".{uuid.uuid4().hex}.tmp")
        unfinished.write_text(json.dumps([asdict(shard) for shard in shards]))
        os.replace(unfinished, index)  # at once: whoever reads sees all or nothing

    def _known(self) -> list[Shard]:
        return [Shard(**shard) for shard in json.loads(self._index().read_text())]

    def setup(self, stage: str) -> None:
        """Read the index; no shard is opened."""
        if not self._index().exists():
            self.prepare_data()  # a host that Lightning's call didn't reach, or an object outside a run
        self._parts = self._split(Shards(self.folder, self._known()))

    def facts(self) -> dict[str, Any]:
        """Return what a plan keeps of the data; writes nothing."""
        if self.path is None:
            digest, count = hashlib.sha256(self._bundled.tobytes()), BUNDLED
        else:
            shards = find(self.folder)
            digest, count = hashlib.sha256("".join(shard.mark for shard in shards).encode()), len(shards)
        return {
            "corpus": self.path or "pydoc_data.topics",
            "corpus_sha256": digest.hexdigest(),
            "shards": count,
            **super().facts(),
        }
