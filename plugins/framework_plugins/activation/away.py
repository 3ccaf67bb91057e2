"""Where saved tensors wait for backward, and how they come back as they were, by storage: views stay views of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from framework.adapters import torch_memory
from framework.adapters.torch_private import tree_leaves
from framework.errors import FrameworkError
from framework.precision import local
from framework_plugins.activation.recompute import unbound
from framework_plugins.activation.storages import storage_of


class OffloadError(FrameworkError):
    """Activations can't be written; the message names the folder and the cause."""


class Tier(Protocol):
    """A place outside of the memory that the run computes in."""

    def takes(self, device: torch.device) -> bool:
        """Whether what lies on `device` is elsewhere than this."""

    def put(self, content: Tensor) -> Tensor:
        """Return a copy of `content` (bytes, 1-d) that lies there; it is gone with the last reference to it."""


class Host:
    """This host's memory, pinned, so that copies don't wait; on the stream that computes, in order with it."""

    def takes(self, device: torch.device) -> bool:
        """From devices only."""
        return device.type != "cpu"

    def put(self, content: Tensor) -> Tensor:
        """Copy it to the host."""
        there = torch.empty(content.shape, dtype=content.dtype, pin_memory=content.is_cuda)
        return there.copy_(content, non_blocking=True)


class Disk:
    """Files without a name in a folder, mapped into memory: the system writes them out and reads them when touched.

    Args:
        folder: exists, or is made with the first file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def takes(self, device: torch.device) -> bool:
        """From anywhere."""
        return device.type != "meta"

    def put(self, content: Tensor) -> Tensor:
        """Copy it to a file. Raises OffloadError if there is no room."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, path = tempfile.mkstemp(prefix=".activation-", dir=self.folder)
            try:
                # without room set aside a full disk would end the process by a signal, at some later write
                os.posix_fallocate(descriptor, 0, content.numel())
                there = torch.from_file(path, shared=True, size=content.numel(), dtype=torch.uint8)
            finally:
                os.close(descriptor)
                os.unlink(path)  # the mapping stays
        except OSError as error:
            raise OffloadError(
                f"activation=offload: {content.numel():,} bytes can't be written to {self.folder} ({error.strerror}); "
                f"type activation.folder=<a disk with room> or activation=full"
            ) from error
        return there.copy_(content)


@dataclass(frozen=True)
class Away:
    """One saved tensor.

    Attributes:
        content: bytes of its whole storage, at the tier.
        device: where it was.
        dtype: its type.
        size: of this rank's piece.
        stride: of that.
        offset: of that, in elements.
        sharded: layout of the whole, None for a plain tensor.
    """

    content: Tensor
    device: torch.device
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    sharded: tuple[Any, Any, torch.Size, tuple[int, ...]] | None

    def back(self) -> Tensor:
        """Return the tensor where it was; a file of a run without devices is read in place."""
        content = self.content.to(self.device, non_blocking=True)
        piece = torch.empty(0, dtype=self.dtype, device=self.device)
        piece.set_(content.untyped_storage(), self.offset, self.size, self.stride)
        if self.sharded is None:
            return piece
        mesh, placements, shape, stride = self.sharded
        return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride)


def offload_(block: nn.Module, tier: Tier, min_bytes: int) -> None:
    """Have `block` put away what it saves for backward. Only `forward` of the instance changes.

    Args:
        block: any module; nothing is put away where no gradient is recorded.
        tier: where to.
        min_bytes: storages smaller than that stay.
    """
    run = unbound(block)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(self, *args, **kwargs)
        given = [leaf for leaf in tree_leaves([*args, *kwargs.values()]) if isinstance(leaf, Tensor)]
        stays = [*self.parameters(), *self.buffers(), *(leaf for leaf in given if not leaf.requires_grad)]
        call = _Call(tier, min_bytes, stays, {leaf.grad_fn for leaf in given if leaf.grad_fn is not None})
        with saved_tensors_hooks(call.pack, call.unpack):
            return run(self, *args, **kwargs)

    block.forward = MethodType(forward, block)


class _Call:
    """The hooks of one forward of a block."""

    def __init__(self, tier: Tier, min_bytes: int, stays: Iterable[Tensor], inputs: Collection[Any]) -> None:
        self.tier, self.min_bytes, self.inputs = tier, min_bytes, inputs
        # references are held, so that no address is used twice
        self.stays = {one.cdata: one for one in map(storage_of, stays)}
        self.done: dict[tuple[int, int], tuple[StorageWeakRef, Tensor]] = {}

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps in place of `tensor`."""
        piece = local(tensor)
        reference = storage_of(piece)
        size = piece.untyped_storage().nbytes()
        movable = type(piece) is Tensor and self.tier.takes(piece.device) and size >= max(1, self.min_bytes)
        if not movable or reference.cdata in self.stays or torch_memory.is_weight(tensor, self.inputs):
            # an output that is kept as it is would keep the graph that keeps it
            return tensor if tensor.grad_fn is None else tensor.detach()
        sharded = None
        if isinstance(tensor, DTensor):
            sharded = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        return Away(self._content(piece, reference), piece.device, piece.dtype, piece.shape, piece.stride(),
                    int(piece.storage_offset()), sharded)  # fmt: skip

    def _content(self, piece: Tensor, reference: StorageWeakRef) -> Tensor:
        """Put a storage away, once as long as nobody writes into it."""
        key = reference.cdata, torch_memory.version(piece)
        if key not in self.done:
            whole = torch.empty(0, dtype=torch.uint8, device=piece.device).set_(piece.untyped_storage())
            self.done[key] = reference, self.tier.put(whole)
        return self.done[key][1]

    @staticmethod
    @torch.no_grad()
    def unpack(packed: Any) -> Tensor:
        """Return what `pack` was given."""
        return packed.back() if isinstance(packed, Away) else packed
