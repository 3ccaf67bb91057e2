"""All ranks start from the same weights: those of rank 0."""

from __future__ import annotations

import hashlib
import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.agreement import gather, odd_rank, ranks
from framework.errors import RunFailedError

log = logging.getLogger(__name__)


@torch.no_grad()
def take_from_first(module: nn.Module, device: torch.device) -> None:
    """Copy every parameter and buffer that holds values (isn't on the meta device) from rank 0; collective.

    To be called before the module is cut, split or sharded: afterwards ranks hold different pieces, and pieces of
    different weights would make up a model that nobody has. A rank that had other values says so in its log.

    Args:
        module: whole, built alike on all ranks.
        device: of the collectives.

    Raises:
        RunFailedError: ranks built modules whose parameters or buffers differ in name, shape, dtype or order.
    """
    if ranks()[1] == 1:
        return
    tensors = dict(_named(module))
    described = [f"{name} {tuple(t.shape)} {t.dtype} {t.is_meta}" for name, t in tensors.items()]
    digests = gather(hashlib.sha256("\n".join(described).encode()).hexdigest())
    if other := odd_rank(digests):
        everyone = gather(described)
        apart = sorted(set(everyone[0]) ^ set(everyone[other]))
        raise RunFailedError(
            f"Rank {other} built another module than rank 0: they differ in {apart[0] if apart else 'the order'}; "
            "build the same module on all ranks."
        )
    changed = [
        name for name, tensor in tensors.items() if not tensor.is_meta and tensor.numel() and _receive(tensor, device)
    ]
    if changed:
        log.warning(
            "This rank built the module with other values of %s%s; it starts from those of rank 0, as all ranks do.",
            changed[0],
            f" and {len(changed) - 1} more" if len(changed) > 1 else "",
        )


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _receive(tensor: Tensor, device: torch.device) -> bool:
    """Overwrite `tensor` by rank 0's; return whether it differed."""
    first = _bits(tensor).to(device, copy=True)  # as bytes: not every backend sends every dtype
    dist.broadcast(first, src=0)
    first = first.to(tensor.device)
    if torch.equal(first, _bits(tensor)):
        return False
    tensor.copy_(first.view(tensor.dtype).view(tensor.shape))
    return True


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
