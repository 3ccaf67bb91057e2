"""`ShardedStore`: the `CheckpointStore` of `checkpoint=dcp`."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from framework import checkpoint_files as files
from framework.agreement import gather, ranks, together
from framework.checkpoint_files import CheckpointError
from framework.plan import Checkpoint
from framework_plugins.checkpoint.storage import Index, ShardReader, ShardWriter

log = logging.getLogger(__name__)


class ShardedStore:
    """Each rank writes what it holds; any mix reads it. Layout on disk: `framework.checkpoint_files`."""

    def save(self, path: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """See `CheckpointStore.save`."""
        final = Path(path)
        what = f"Saving {final}"
        temporary = final.with_name(f".{final.name}.tmp")
        first = ranks()[0] == 0

        def prepare() -> None:
            if first:
                if temporary.exists():
                    shutil.rmtree(temporary)
                temporary.mkdir(parents=True)

        def commit() -> None:
            if first:
                files.write_json(temporary / files.STATE, meta)
                files.commit(temporary, final, step=int(meta["step"]), world_size=ranks()[1])

        together(what, prepare, CheckpointError)
        try:
            _write(temporary, tensors)
            together(what, commit, CheckpointError)
        except (CheckpointError, CheckpointException) as error:
            if first:  # makes room: a full disk is the usual cause
                shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{what} failed on {_causes(error)}. Earlier checkpoints are intact.") from error

    def load(self, path: str, tensors: Mapping[str, Tensor], scope: Sequence[str] = ()) -> Mapping[str, Any]:
        """See `CheckpointStore.load`."""
        what = f"Loading {path}"
        index = together(what, lambda: self._index(path), CheckpointError)
        wanted = set().union(*gather(set(tensors)))
        saved = {name for name in index.tensors if name.startswith(tuple(scope))} if scope else set()
        missing, unexpected = wanted - set(index.tensors), saved - wanted
        if missing or unexpected:
            raise CheckpointError(f"{path} doesn't fit this run: {_difference(missing, unexpected)}")
        together(what, lambda: _read(index, tensors), CheckpointError)
        return self.read_meta(path)

    def entries(self, path: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """See `CheckpointStore.entries`."""
        return {name: (dtype, shape) for name, (dtype, shape, _) in self._index(path).tensors.items()}

    def read_meta(self, path: str) -> Mapping[str, Any]:
        """See `CheckpointStore.read_meta`."""
        mark = files.read_mark(path)
        meta: Mapping[str, Any] = files.read_json(mark.path / files.STATE)
        return meta

    def is_complete(self, path: str) -> bool:
        """See `CheckpointStore.is_complete`."""
        return files.is_complete(path)

    def newest_complete(self, run_dir: str) -> Checkpoint | None:
        """See `CheckpointStore.newest_complete`."""
        return files.newest_complete(run_dir)

    def remove(self, path: str) -> None:
        """See `CheckpointStore.remove`."""
        files.remove(path)

    def _index(self, path: str) -> Index:
        return Index(files.read_mark(path).path)


def _write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write all ranks' tensors; of plain ones the lowest rank's, since replicas may differ (batch statistics)."""
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(dict(tensors), storage_writer=ShardWriter(folder), planner=planner, no_dist=ranks()[1] == 1)


def _read(index: Index, tensors: Mapping[str, Tensor]) -> None:
    """Fill this rank's tensors; asks no other rank.

    Raises:
        CheckpointError: a shape differs, a file can't be read, or not every element was restored.
    """
    for name, tensor in tensors.items():
        shape = index.tensors[name][1]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name} has shape {list(tensor.shape)} here, but {list(shape)} in the checkpoint")
    reader = ShardReader(index)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(
                dict(tensors), storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False), no_dist=True
            )
    except CheckpointException as error:  # a BaseException: `except Exception` would let it pass
        raise CheckpointError(_causes(error)) from error
    short = {}
    for name, tensor in tensors.items():
        expected = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()
        if reader.restored[name] != expected:
            short[name] = f"{name} ({reader.restored[name]} of {expected} elements)"
    if short:
        raise CheckpointError(
            f"only {len(tensors) - len(short)} of {len(tensors)} tensors were restored: {_list(short.values())}"
        )


def _causes(error: CheckpointException) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, (cause, _) in sorted(error.failures.items()):
        text = str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
        by_text.setdefault(text, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, failing))}: {text}" for text, failing in by_text.items())


def _difference(missing: set[str], unexpected: set[str]) -> str:
    parts = []
    if missing:
        parts.append(f"this run wants {_list(missing)}, which the checkpoint doesn't have")
    if unexpected:
        parts.append(f"the checkpoint has {_list(unexpected)}, which nothing in this run takes")
    return "; ".join(parts)


def _list(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
