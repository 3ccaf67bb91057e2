"""`Staging`: this rank's pieces in main memory, for a thread to write while training changes the originals.

Parameters and buffers are copied before training goes on. What only an optimizer's step changes, two thirds of a state
with Adam, is copied beside the next forward and backward, and that step waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch
from torch import Tensor

from framework.adapters.torch_memory import version
from framework.checkpoint_files import CheckpointError
from framework_plugins.checkpoint.storage import Piece

Pieces = Sequence[tuple[str, Piece, Tensor]]
"""Name of a tensor, piece of it, its values."""
Items = list[tuple[str, Tensor, Tensor]]
"""Name of a tensor, values, and where they are copied to."""
STEADY = "optimizer."
"""Names of tensors that nothing but an optimizer's step changes begin so."""


@dataclass
class Staged:
    """Copies of a state's pieces, some of them still to be made.

    Attributes:
        copies: of all pieces; what `copy_rest` copies has no values before.
        waited_s: how long optimizers had to wait for them.
    """

    copies: Pieces
    copier: ThreadPoolExecutor
    copy_rest: Callable[[], None]
    rest: Future[None] = field(default_factory=Future)
    waited_s: float = 0.0

    def start(self) -> None:
        """Copy the rest in a thread; to be called when all ranks have copied what comes first: they share cores."""
        self.rest = self.copier.submit(self.copy_rest)

    def hold(self) -> None:
        """Return when everything is copied: optimizers may step."""
        if not self.rest.done():
            began = time.perf_counter()
            wait([self.rest])
            self.waited_s += time.perf_counter() - began

    def whole(self) -> Pieces:
        """Return the copies, complete.

        Raises:
            CheckpointError: a piece was changed while it was copied.
        """
        self.rest.result()
        return self.copies


class Staging:
    """Copies pieces into buffers that it keeps for the next save. One save at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copier = ThreadPoolExecutor(1, "staging")
        self._stream: torch.cuda.Stream | None = None

    def forget(self) -> None:
        """Give the buffers back: the next save's pieces are others."""
        self._buffers.clear()

    def copy(self, pieces: Pieces, tensors: Mapping[str, Tensor], holds: bool) -> Staged:
        """Copy this rank's pieces.

        Args:
            pieces: of `tensors`.
            tensors: tell whether somebody writes to them; of a DTensor and its shard each counts its own writes.
            holds: `STEADY` ones may be copied later, in a thread: somebody calls `hold`.

        Raises:
            CheckpointError: there is no room for them. Smaller batches wouldn't help, so it isn't called out of memory.
        """
        copies = [(name, piece, self._buffer(name, piece, data)) for name, piece, data in pieces]
        now: Items = []
        later: Items = []
        for (name, _, data), (_, _, buffer) in zip(pieces, copies, strict=True):
            (later if holds and name.startswith(STEADY) else now).append((name, data, buffer))
        _copy(now)
        return Staged(copies, self._copier, self._beside(later, tensors))

    def _buffer(self, name: str, piece: Piece, data: Tensor) -> Tensor:
        if piece.key not in self._buffers:
            try:
                self._buffers[piece.key] = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
            except RuntimeError as error:
                self._buffers.clear()
                text = f"there is no room for a copy of {name}, {data.nbytes:,} bytes; type checkpoint.mode=sync"
                raise CheckpointError(text) from error
        return self._buffers[piece.key]

    def _beside(self, items: Items, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Return a function that copies, to be called in another thread."""

        def writes() -> list[int]:
            return [version(data) + version(tensors[name]) for name, data, _ in items]

        before = writes()
        ready = None
        if any(data.is_cuda for _, data, _ in items):  # not in the steps' stream: neither waits for the other
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            ready = torch.cuda.current_stream().record_event()

        def copy() -> None:
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            with torch.cuda.stream(self._stream):
                _copy(items)
            changed = [name for (name, *_), old, new in zip(items, before, writes(), strict=True) if old != new]
            if changed:
                raise CheckpointError(
                    f"{changed[0]} was changed outside of an optimizer's step while it was copied; with"
                    f" checkpoint.mode=sync training waits for copies"
                )

        return copy


def _copy(items: Items) -> None:
    for _, data, buffer in items:
        buffer.copy_(data, non_blocking=True)
    if any(data.is_cuda for _, data, _ in items):
        torch.cuda.current_stream().synchronize()
