"""Tensors in pieces: what each rank has of each, and whole ones put together from that.

Nothing crosses a wire while a mix runs: ranks copy what they have, and who compares puts it together afterwards. A
collective a tensor and step would cost more than the steps do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from framework.adapters.torch_private import global_indices

SAME = 1e-9
"""Relative distance up to which two copies of one tensor are equal."""

Place = tuple[Sequence[int], ...]
"""For each dim the indices in the whole tensor, in order: a `range` where they follow one another."""


@dataclass(frozen=True)
class Piece:
    """What a rank has of a tensor.

    Attributes:
        shape: of the whole.
        place: where the values are in it.
        values: on the host, a copy.
    """

    shape: tuple[int, ...]
    place: Place
    values: Tensor


Pieces = Mapping[str, Piece]
"""Name -> what one rank has."""

Norms = Mapping[str, tuple[Place, float]]
"""Name -> where a rank's piece is, and the norm of that piece alone."""


def of(named: Iterable[tuple[str, Tensor]]) -> dict[str, Piece]:
    """Return what this rank has of the tensors that aren't on the meta device.

    Sums that are still outstanding are made, which is collective over a tensor's mesh; else nothing is sent.
    """
    return {name: _piece(tensor) for name, tensor in named if not tensor.is_meta}


def _piece(tensor: Tensor) -> Piece:
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        tensor = tensor.full_tensor()
    if isinstance(tensor, DTensor):
        place: Place = tuple(map(_as_range, global_indices(tensor)))
        local = tensor.to_local()
    else:
        place, local = tuple(map(range, tensor.shape)), tensor
    return Piece(tuple(tensor.shape), place, local.detach().cpu().clone())


def _as_range(indices: Tensor) -> Sequence[int]:
    numbers = indices.tolist()
    following = range(numbers[0], numbers[0] + len(numbers)) if numbers else range(0)
    return following if list(following) == numbers else tuple(numbers)


def norms(mine: Pieces, order: float) -> dict[str, tuple[Place, float]]:
    """Return the norm (`order` 2 or infinity) of each piece, which takes less memory than the piece."""
    return {name: (piece.place, float(piece.values.double().norm(order))) for name, piece in mine.items()}


def global_norm(everyone: Iterable[Norms], order: float) -> float:
    """Return the norm of tensors from those of all ranks' pieces; what several ranks have counts once."""
    distinct = {(name, place): size for theirs in everyone for name, (place, size) in theirs.items()}
    if math.isinf(order):
        return max(distinct.values(), default=0.0)
    return float(sum(size**order for size in distinct.values()) ** (1 / order))


def whole(everyone: Sequence[Pieces]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Put tensors together from what the ranks have, by rank.

    Returns:
        The tensors, and by name what can't be relied on: the relative distance of a copy from the first rank's that has
        it, infinite if the two are not even of one shape, or if some elements are on no rank.
    """
    made: dict[str, Tensor] = {}
    apart: dict[str, float] = {}
    for name, held in _by_name(everyone):
        first = next(iter(held.values()))
        at_place: dict[Place, Tensor] = {}
        for rank, piece in held.items():
            known = at_place.setdefault(piece.place, piece.values)
            if piece.shape != first.shape or piece.values.dtype != first.values.dtype:
                distance = math.inf
            else:
                distance = _apart(known, piece.values)
            if not distance <= SAME:
                apart[f"{name} on rank {rank}"] = distance
        made[name] = _joined(first, at_place)
        if sum(values.numel() for values in at_place.values()) != made[name].numel():
            apart[f"{name}, of which the ranks have too few or too many elements"] = math.inf
    return made, apart


def _by_name(everyone: Sequence[Pieces]) -> Iterator[tuple[str, dict[int, Piece]]]:
    """Yield each name with the piece of each rank that has one."""
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        yield name, {rank: theirs[name] for rank, theirs in enumerate(everyone) if name in theirs}


def _joined(first: Piece, at_place: Mapping[Place, Tensor]) -> Tensor:
    if len(at_place) == 1 and first.values.shape == first.shape:
        return first.values
    tensor = torch.zeros(first.shape, dtype=first.values.dtype)
    for place, values in at_place.items():
        if values.numel() and len(place) == tensor.ndim:
            tensor[_index(place)] = values.to(tensor.dtype)
    return tensor


def _index(place: Place) -> Any:
    """Return what selects the elements at a place."""
    if all(isinstance(indices, range) for indices in place):
        return tuple(slice(indices[0], indices[-1] + 1) for indices in place)
    axes = [torch.tensor(indices) for indices in place]
    return tuple(axis.view(-1, *[1] * (len(axes) - 1 - dim)) for dim, axis in enumerate(axes))


def _apart(first: Tensor, other: Tensor) -> float:
    """Return the relative distance of two copies; infinite if they aren't even of one shape."""
    if torch.equal(first, other):
        return 0.0
    if first.shape != other.shape or first.dtype != other.dtype:
        return math.inf
    return float((first.double() - other.double()).norm() / first.double().norm().clamp(min=1e-12))
