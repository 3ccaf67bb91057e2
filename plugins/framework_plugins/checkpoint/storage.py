"""Storage of `checkpoint=dcp`: torch.distributed.checkpoint's planners over safetensors files and JSON, without
pickle.

torch plans who writes which piece (each once) and which pieces a rank needs; here is only how pieces lie in files.
torch's own writers were tried first: `FileSystemWriter` pickles its metadata; `HuggingFaceStorageWriter` holds each
file in memory twice and derives a tensor's size from the shards it happens to find, so a lost file goes unnoticed.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from framework.checkpoint_files import INDEX, CheckpointError, read_json, sync_folder, write_json
from framework.encoding import dtype_of


@dataclass(frozen=True)
class Piece:
    """A box of a tensor in a file: the box's first corner and size, file name, key in the file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


def file_name(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


class ShardWriter(StorageWriter):
    """Writes a rank's pieces into one safetensors file, and on the coordinator the index of all.

    Called by `torch.distributed.checkpoint.save`. `folder` exists and is empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: a writer is for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the rank."""
        self.rank = int(kwargs.get("rank") or 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave torch's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Leave torch's plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and flush it to disk."""
        tensors: dict[str, Tensor] = {}
        results = []
        for item in plan.items:
            piece = _piece(item, file_name(self.rank))
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)  # the store passes nothing else
            tensor = _on_cpu(data)
            tensors[piece.key] = tensor
            results.append(WriteResult(item.index, tensor.nbytes, piece))
        if tensors:
            write_tensors(self.folder / file_name(self.rank), tensors)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index (coordinator only) after all ranks wrote."""
        tensors: dict[str, Any] = {}
        for result in (one for of_rank in results for one in of_rank):
            name, piece = result.index.fqn, result.storage_data
            whole = metadata.state_dict_metadata[name]
            assert isinstance(whole, TensorStorageMetadata)
            entry = {
                "dtype": str(whole.properties.dtype).removeprefix("torch."),
                "shape": list(whole.size),
                "pieces": [],
            }
            tensors.setdefault(name, entry)["pieces"].append(
                [list(piece.offsets), list(piece.sizes), piece.file, piece.key]
            )
            if not (self.folder / piece.file).is_file():
                raise CheckpointError(
                    f"{piece.file} was written but rank {self.rank} can't see it: run_dir must be on a file system that"
                    f" all hosts share"
                )
        write_json(self.folder / INDEX, {"tensors": tensors})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by path: False."""
        return False


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file and flush it to disk. Raises OSError or safetensors' own error (full disk)."""
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets the owner alone read
    with path.open("rb") as file:
        os.fsync(file.fileno())
    sync_folder(path.parent)


def _piece(item: WriteItem, file: str) -> Piece:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    key = item.index.fqn
    if tuple(chunk.sizes) != tuple(item.tensor_data.size):
        key += "@" + ",".join(map(str, chunk.offsets))
    return Piece(tuple(chunk.offsets), tuple(chunk.sizes), file, key)


def _on_cpu(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU tensor that shares no memory with another one: what safetensors takes."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


class Index:
    """What a checkpoint's `index.json` says: name -> dtype, global shape, pieces."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...], list[Piece]]] = {}
        for name, entry in read_json(folder / INDEX)["tensors"].items():
            pieces = [Piece(tuple(offsets), tuple(sizes), *at) for offsets, sizes, *at in entry["pieces"]]
            self.tensors[name] = (dtype_of(entry["dtype"]), tuple(entry["shape"]), pieces)


class ShardReader(StorageReader):
    """Reads the pieces that a rank needs. Called by `torch.distributed.checkpoint.load`.

    Attributes:
        restored: name -> number of elements copied so far.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.restored: dict[str, int] = defaultdict(int)

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
        """Copy the parts of pieces that the plan lists into its tensors, one file after the other."""
        by_file = defaultdict(list)
        for item in plan.items:
            by_file[self._pieces[item.storage_index].file].append(item)
        for file, items in by_file.items():
            with safe_open(self.index.folder / file, framework="pt") as opened:
                for item in items:
                    piece = self._pieces[item.storage_index]
                    ends = zip(item.storage_offsets, item.lengths, strict=True)
                    box = tuple(slice(start, start + length) for start, length in ends)
                    source = opened.get_slice(piece.key)[box] if box else opened.get_tensor(piece.key)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(source)
                    planner.commit_tensor(item, target)
                    self.restored[item.dest_index.fqn] += prod(item.lengths)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by path: False."""
        return False
