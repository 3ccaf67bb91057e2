"""Storage of `checkpoint=dcp`: torch.distributed.checkpoint's planners over safetensors files and JSON, without
pickle.

torch plans who writes which piece (each once) and which pieces a rank needs; here is only how pieces lie in files.
torch's own writers were tried first: `FileSystemWriter` pickles its metadata; `HuggingFaceStorageWriter` holds each
file in memory twice and derives a tensor's size from the shards it happens to find, so a lost file goes unnoticed.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, WriteItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from framework.agreement import gather, ranks
from framework.checkpoint_files import INDEX, read_json
from framework.encoding import dtype_of
from framework_plugins.checkpoint.tensor_file import VERSION, hash_of, read_header, version_in, write_tensors


@dataclass(frozen=True)
class Piece:
    """A box of a tensor in a file.

    Attributes:
        offsets: the box's first corner.
        sizes: its size.
        file: name of the file.
        key: in the file.
        sha256: of its bytes; empty in format 1.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str
    sha256: str = ""


def file_name(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


class Layout:
    """Which pieces of which tensors this rank writes: torch's plan, in which each piece is written once.

    Of plain tensors the lowest rank's is written, since replicas may differ (batch statistics). Making a layout is
    collective; it serves until tensors of other names, shapes or placements come.

    Attributes:
        kind: what it was made for, as `kind_of` has it.
        tensors: name -> dtype and global shape, of all ranks.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        rank = ranks()[0]
        self.kind = kind_of(tensors)
        self._planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        self._planner.set_up_planner(dict(tensors), None, rank == 0)
        plans, metadata = self._planner.create_global_plan(gather(self._planner.create_local_plan()))
        self._items = self._planner.finish_plan(plans[rank]).items
        self.tensors: dict[str, tuple[str, list[int]]] = {}
        for name, whole in metadata.state_dict_metadata.items():
            assert isinstance(whole, TensorStorageMetadata)  # the store passes nothing else
            self.tensors[name] = (str(whole.properties.dtype).removeprefix("torch."), list(whole.size))

    def pieces(self, tensors: Mapping[str, Tensor]) -> list[tuple[str, Piece, Tensor]]:
        """Return name, piece (without its hash) and values of what this rank writes; nothing is copied."""
        self._planner.set_up_planner(dict(tensors), None, ranks()[0] == 0)
        found = []
        for item in self._items:
            data = self._planner.resolve_data(item)
            assert isinstance(data, Tensor)
            found.append((item.index.fqn, _piece(item, file_name(ranks()[0])), data.detach()))
        self._planner.set_up_planner({}, None, ranks()[0] == 0)  # it would hold the whole state until the next save
        return found


def kind_of(tensors: Mapping[str, Tensor]) -> Any:
    """Return what a layout depends on."""
    return [
        (name, tensor.dtype, tuple(tensor.shape), (tensor.device_mesh, tensor.placements))
        if isinstance(tensor, DTensor)
        else (name, tensor.dtype, tuple(tensor.shape), None)
        for name, tensor in tensors.items()
    ]


@dataclass(frozen=True)
class Written:
    """What a rank wrote.

    Attributes:
        pieces: name of the tensor, and piece with its hash.
        header: SHA-256 of the file's header; empty if there was nothing to be written.
        size: of the file, bytes.
    """

    pieces: list[tuple[str, Piece]]
    header: str = ""
    size: int = 0


def write_pieces(folder: Path, pieces: Sequence[tuple[str, Piece, Tensor]], version: str) -> Written:
    """Hash this rank's pieces, write them into one file and flush it to disk.

    Args:
        folder: of the checkpoint.
        pieces: as `Layout.pieces` gives them.
        version: of the state, in words; it is kept in the file.
    """
    tensors = {piece.key: data.detach().cpu().contiguous() for _, piece, data in pieces}
    if not tensors:
        return Written([])
    path = folder / file_name(ranks()[0])
    header, hashes = write_tensors(path, tensors, version)
    written = [(name, replace(piece, sha256=hashes[piece.key])) for name, piece, _ in pieces]
    return Written(written, header, path.stat().st_size)


def index_of(layout: Layout, written: Sequence[Written], version: str) -> dict[str, Any]:
    """Return the index of what all ranks wrote."""
    tensors: dict[str, Any] = {}
    headers: dict[str, str] = {}
    for of_rank in written:
        for name, piece in of_rank.pieces:
            dtype, shape = layout.tensors[name]
            entry = tensors.setdefault(name, {"dtype": dtype, "shape": shape, "pieces": []})
            entry["pieces"].append([list(piece.offsets), list(piece.sizes), piece.file, piece.key, piece.sha256])
            headers[piece.file] = of_rank.header
    return {"tensors": tensors, "headers": headers, VERSION: version}


def _piece(item: WriteItem, file: str) -> Piece:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    key = item.index.fqn
    if tuple(chunk.sizes) != tuple(item.tensor_data.size):
        key += "@" + ",".join(map(str, chunk.offsets))
    return Piece(tuple(chunk.offsets), tuple(chunk.sizes), file, key)


class Index:
    """What a checkpoint's `index.json` says: name -> dtype, global shape, pieces; file -> hash of its header."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...], list[Piece]]] = {}
        content = read_json(folder / INDEX)
        self.headers: dict[str, str] = content.get("headers", {})
        self.version: str = content.get(VERSION, "")
        for name, entry in content["tensors"].items():
            pieces = [Piece(tuple(offsets), tuple(sizes), *at) for offsets, sizes, *at in entry["pieces"]]
            self.tensors[name] = (dtype_of(entry["dtype"]), tuple(entry["shape"]), pieces)


class ShardReader(StorageReader):
    """Reads the pieces that a rank needs. Called by `torch.distributed.checkpoint.load`.

    Attributes:
        restored: name -> number of elements copied so far.
        damaged: what isn't as it was written, in words; nothing of it was copied.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.restored: dict[str, int] = defaultdict(int)
        self.damaged: list[str] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: a reader is for one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index in torch's terms."""
        metadata: dict[str, Any] = {}
        storage: dict[MetadataIndex, Piece] = {}
        for name, (dtype, shape, pieces) in self.index.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in pieces]
            metadata[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
            storage |= {MetadataIndex(name, one.offsets): one for one in pieces}
        return Metadata(state_dict_metadata=metadata, storage_data=storage)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keep where the pieces are."""
        self._pieces: dict[MetadataIndex, Piece] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave torch's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave torch's plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the parts of pieces that the plan lists into its tensors, one file after the other.

        Pieces are read whole, since their hashes are of the whole.
        """
        by_file: dict[str, dict[Piece, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            piece = self._pieces[item.storage_index]
            by_file[piece.file][piece].append(item)
        for file, wanted in by_file.items():
            try:
                self._read_file(file, wanted, planner)
            except (OSError, SafetensorError) as error:
                self.damaged.append(f"{file} can't be read ({error})")
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_file(self, file: str, wanted: Mapping[Piece, Sequence[ReadItem]], planner: LoadPlanner) -> None:
        path, expected = self.index.folder / file, self.index.headers.get(file)
        header = read_header(path)
        if expected is not None and hashlib.sha256(header).hexdigest() != expected:
            version = version_in(header)
            if version and version != self.index.version:
                self.damaged.append(f"{file} holds the state of {version}, but this checkpoint is of"
                                    f" {self.index.version}: it came late and isn't taken")  # fmt: skip
            else:
                self.damaged.append(f"the header of {file} isn't the one that was written")
            return
        with safe_open(path, framework="pt") as opened:
            for piece, items in wanted.items():
                source = opened.get_tensor(piece.key)
                if piece.sha256 and hash_of(source) != piece.sha256:
                    self.damaged.append(f"the bytes of {piece.key} in {file} aren't those that were written")
                    continue
                for item in items:
                    ends = zip(item.storage_offsets, item.lengths, strict=True)
                    box = tuple(slice(start, start + length) for start, length in ends)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(source[box] if box else source)
                    planner.commit_tensor(item, target)
                    self.restored[item.dest_index.fqn] += prod(item.lengths)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by path: False."""
        return False
