"""By which memory a tensor is known again, whatever its shape: what counts and moves activations goes by storages."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from framework.precision import local


def held(tensor: Tensor) -> Tensor:
    """Return this rank's piece of a tensor, recorded by no graph."""
    with torch.no_grad():
        return local(tensor)


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """Return a weak reference to the memory of this rank's piece; as long as it is held, no other has its `cdata`."""
    return StorageWeakRef(held(tensor).untyped_storage())  # type: ignore[no-untyped-call] # torch has no type for it
