"""`ShardedStore`: the `CheckpointStore` of `checkpoint=dcp`."""

from __future__ import annotations

import logging
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from framework import checkpoint_files as files
from framework.agreement import anywhere, gather, ranks, together
from framework.checkpoint_files import CheckpointError, DamagedError
from framework.plan import Checkpoint
from framework.versions import Clock
from framework_plugins.checkpoint.staging import Pieces, Staged, Staging
from framework_plugins.checkpoint.storage import (
    Index,
    Layout,
    ShardReader,
    Written,
    file_name,
    index_of,
    kind_of,
    write_pieces,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Took:
    """What a save took, in seconds: how long training waited, and until it was complete.

    Waiting is the save itself, and `held_s` of the next optimizer step, for what was copied until then.
    """

    path: Path
    waited_s: float
    complete_s: float
    held_s: float = 0.0


class ShardedStore:
    """Each rank writes what it holds; any mix reads it. Layout on disk: `framework.checkpoint_files`.

    Attributes:
        background: whether `save` returns as soon as this rank's pieces are copied, and a thread writes them. All ranks
            must agree; to be changed between saves.
        holds: whether `hold` will be called before what is called `optimizer.` changes, so that it may be copied after
            `save` has returned. False for whoever saves at a moment of their own.
        on_commit: called with the path of each checkpoint that is complete, in the thread that wrote it, on the rank
            that committed it: rank 0, and where hosts don't share the folder the first rank of each.
        copy: called on all ranks after that, in the same thread, with the path and the thread's group. Collective.
        apart: a folder that each host has for itself; None = hosts share all folders.
        last: what the last save took; None before the first is done.
    """

    def __init__(self, background: bool = False, ranks_a_host: int | None = None) -> None:
        self.background = background
        self.holds = False
        self.on_commit: Callable[[Path], None] | None = None
        self.copy: Callable[[Path, dist.ProcessGroup | None], None] | None = None
        self.apart: Path | None = None
        self._ranks_a_host = ranks_a_host
        self.last: Took | None = None
        self._layout: Layout | None = None
        self._staging = Staging()
        self._copied = False
        """Whether all ranks have buffers for this layout."""
        self._staged: Staged | None = None
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, path: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """See `CheckpointStore.save`. One save is in flight at a time: this waits for the one before."""
        began = time.perf_counter()
        self.wait()
        if not self.background:
            pieces = self._planned(tensors).pieces(tensors)
            self._write(Path(path), lambda: pieces, meta, None)
            self._note(Path(path), began, None)
            return
        self._staged = staged = self._stage(f"Saving {path}", tensors)
        if self._group is None and ranks()[1] > 1:
            self._group = dist.new_group(backend="gloo")  # the thread's own: it must not meet the steps' collectives
        staged.start()
        let_go = time.perf_counter()

        def write() -> None:
            try:
                self._write(Path(path), staged.whole, meta, self._group)
                self._note(Path(path), began, let_go, staged.waited_s)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """See `CheckpointStore.wait`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = self._staged = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def hold(self) -> None:
        """Return when optimizers may step: what they change is copied. To be called before each step."""
        if self._staged is not None:
            self._staged.hold()
            self._staged = None

    @property
    def saving(self) -> bool:
        """Whether a save is in flight."""
        return self._thread is not None and self._thread.is_alive()

    def _planned(self, tensors: Mapping[str, Tensor]) -> Layout:
        """Return the layout of these tensors: the last one, if it fits on all ranks."""
        if anywhere(not self._fits(tensors)) or self._layout is None:
            self._layout, self._copied = Layout(tensors), False
            self._staging.forget()
        return self._layout

    def _fits(self, tensors: Mapping[str, Tensor]) -> bool:
        return self._layout is not None and self._layout.kind == kind_of(tensors)

    def _stage(self, what: str, tensors: Mapping[str, Tensor]) -> Staged:
        """Return copies of this rank's pieces. Collective.

        Training waits for it, so ranks usually agree once: whether the last layout fits everywhere and is copied.
        """

        def copy() -> Staged:
            assert self._layout is not None
            return self._staging.copy(self._layout.pieces(tensors), tensors, self.holds)

        # buffers are there, so nothing can fail
        staged = copy() if self._copied and self._fits(tensors) else None
        if not anywhere(staged is None) and staged is not None:
            return staged
        self._planned(tensors)
        self._copied = False
        staged = together(what, copy, CheckpointError)
        self._copied = True
        return staged

    def _write(
        self, final: Path, pieces: Callable[[], Pieces], meta: Mapping[str, Any],
        group: dist.ProcessGroup | None,
    ) -> None:  # fmt: skip
        """Write, agree, commit. Collective, over `group` if it isn't the main thread that writes."""
        what = f"Saving {final}"
        rank, world = ranks()
        clock = meta.get("clock")
        version = "" if clock is None else str(Clock.from_dict(clock))
        # The name is this life's alone: what a rank of an earlier one still writes doesn't get into it.
        temporary = final.with_name(f".{final.name}.{clock['life'] if clock else 0}.tmp")
        apart = final.parent == self.apart and self._ranks_a_host is not None and self._ranks_a_host < world
        first = rank % (self._ranks_a_host or world) == 0 if apart else rank == 0

        def prepare() -> None:
            if first:
                for left in final.parent.glob(f".{escape(final.name)}.*tmp"):  # of saves that were killed
                    shutil.rmtree(left, ignore_errors=True)
                temporary.mkdir(parents=True)

        def describe() -> tuple[dict[str, bytes], dict[str, Any]] | None:
            if rank != 0:
                return None
            assert self._layout is not None
            sizes = {file_name(number): one.size for number, one in enumerate(written) if one.size}
            missing = [] if apart else [name for name in sizes if not (temporary / name).is_file()]
            if missing:
                raise CheckpointError(
                    f"{missing[0]} was written but rank {rank} can't see it: run_dir must be on a file system that all"
                    f" hosts share"
                )
            texts = {
                files.INDEX: files.json_bytes(index_of(self._layout, written, version)),
                files.STATE: files.json_bytes(meta),
            }
            sizes |= {name: len(content) for name, content in texts.items()}
            hashes = {name: sha256(content).hexdigest() for name, content in texts.items()}
            return texts, files.new_mark(final.parent, sizes, int(meta["step"]), world, hashes, clock)

        def commit() -> None:
            if first:
                assert described is not None
                texts, mark = described
                for name, content in texts.items():
                    files.write_bytes(temporary / name, content)
                files.put_in_place(temporary, final, mark)
                if self.on_commit is not None:
                    self.on_commit(final)

        together(what, prepare, CheckpointError, group)
        try:
            own = together(what, lambda: write_pieces(temporary, pieces(), version), CheckpointError, group)
            written: list[Written] = gather(own, group)
            described = together(what, describe, CheckpointError, group)
            if apart:
                described = gather(described, group)[0]
            together(what, commit, CheckpointError, group)
        except CheckpointError as error:
            if first:  # makes room: a full disk is the usual cause
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(f"{str(error).rstrip('.')}. Earlier checkpoints are intact.") from error
        if self.copy is not None:
            self.copy(final, group)

    def _note(self, path: Path, began: float, let_go: float | None, held_s: float = 0.0) -> None:
        ended = time.perf_counter()
        self.last = Took(path, (let_go or ended) - began + held_s, ended - began, held_s)
        if ranks()[0] == 0:
            log.info("%s: training waited %.2f s, complete after %.2f s.", path.name, self.last.waited_s, ended - began)

    def load(self, path: str, tensors: Mapping[str, Tensor], scope: Sequence[str] = ()) -> Mapping[str, Any]:
        """See `CheckpointStore.load`."""
        what = f"Loading {path}"
        index = together(what, lambda: self._index(path), CheckpointError)
        wanted = set().union(*gather(set(tensors)))
        saved = {name for name in index.tensors if name.startswith(tuple(scope))} if scope else set()
        missing, unexpected = wanted - set(index.tensors), saved - wanted
        if missing or unexpected:
            raise CheckpointError(f"{path} doesn't fit this run: {_difference(missing, unexpected)}")
        damaged = gather(together(what, lambda: _read(index, tensors), CheckpointError))
        if any(damaged):
            raise DamagedError(f"{path} is damaged: {'; '.join(sorted(set().union(*damaged)))}")
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


def _read(index: Index, tensors: Mapping[str, Tensor]) -> list[str]:
    """Fill this rank's tensors; asks no other rank.

    Returns:
        What isn't as it was written, in words.

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
    if reader.damaged:
        return reader.damaged
    short = {}
    for name, tensor in tensors.items():
        expected = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()
        if reader.restored[name] != expected:
            short[name] = f"{name} ({reader.restored[name]} of {expected} elements)"
    if short:
        raise CheckpointError(
            f"only {len(tensors) - len(short)} of {len(tensors)} tensors were restored: {_list(short.values())}"
        )
    return []


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
