"""Which piece of each sequence a rank has, and the cutting of batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from framework.dropout import Masks, Tokens
from framework.errors import UsageError
from framework_plugins.cp.option import POSITIONS


@dataclass(frozen=True)
class Pieces:
    """The cut of every sequence into equal pieces, numbered from its start.

    Attributes:
        rank: this one's place on axis cp.
        ranks: size of axis cp.
        balanced: two pieces a rank, r and 2 x ranks - 1 - r; else one, r.
    """

    rank: int
    ranks: int
    balanced: bool

    @property
    def count(self) -> int:
        """Pieces of a sequence."""
        return 2 * self.ranks if self.balanced else self.ranks

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the pieces that `rank` has, in the order in which it holds them."""
        return (rank, self.count - 1 - rank) if self.balanced else (rank,)

    @property
    def mine(self) -> tuple[int, ...]:
        """The pieces of this rank."""
        return self.of(self.rank)

    def take(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's pieces of a whole `tensor`, whose `dim` the number of pieces divides."""
        chunks = tensor.chunk(self.count, dim)
        return chunks[self.mine[0]] if len(self.mine) == 1 else torch.cat([chunks[at] for at in self.mine], dim)

    def whole(self, held: list[Tensor], dim: int) -> Tensor:
        """Return the whole tensor from what each rank holds; the inverse of `take`."""
        where = {piece: (rank, at) for rank in range(self.ranks) for at, piece in enumerate(self.of(rank))}
        chunks = [tensor.chunk(len(self.mine), dim) for tensor in held]
        return torch.cat([chunks[where[piece][0]][where[piece][1]] for piece in range(self.count)], dim)


class BatchCut:
    """Cuts the sequences of each batch, and puts in positions where the data has none.

    Args:
        pieces: of this rank.
        dims: batch entry -> dim of its sequence, None = whole on each rank.
        option: for messages.
        masks: of dropout; told which tokens this rank has.
    """

    def __init__(self, pieces: Pieces, dims: Mapping[str, int | None], option: str, masks: Masks | None = None) -> None:
        self.pieces = pieces
        self.masks = masks
        self.dims = dims
        self.option = option
        self.length = 0
        """Tokens that this rank has of each sequence of the last batch."""
        self.positions: Tensor | None = None
        """Those of the last batch."""

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Return the batch with this rank's pieces.

        Raises:
            UsageError: it isn't a mapping, its sequences differ in length or can't be cut evenly, or an entry is as
                long as a sequence and the plan doesn't name it.
        """
        if not isinstance(batch, Mapping):
            raise UsageError(
                f"cp={self.option} cuts the entries of a batch by name, and this batch is a {type(batch).__name__}; "
                'return a dict like {"inputs": ..., "targets": ...} from the dataset.'
            )
        whole = dict(batch)
        named = {name: dim for name, dim in self.dims.items() if dim is not None and name in whole}
        lengths = {name: whole[name].size(dim) for name, dim in named.items()}
        if len(set(lengths.values())) != 1:
            said = f"lengths {lengths}" if lengths else f"none of {', '.join(self.dims)}"
            raise UsageError(f"cp={self.option} needs sequences of one length in a batch, and this one has {said}.")
        length = next(iter(lengths.values()))
        self._check(whole, named, length)
        if POSITIONS not in whole:
            first = whole[next(iter(named))]
            samples = first.size(0) if next(iter(named.values())) else first.size(1)
            positions = torch.arange(length, device=first.device).expand(samples, length)
            whole[POSITIONS] = positions if self.dims[POSITIONS] == 1 else positions.T
            named[POSITIONS] = self.dims[POSITIONS] or 0
        for name, dim in named.items():
            whole[name] = self.pieces.take(whole[name], dim).contiguous()
        self.length = length // self.pieces.ranks
        if self.masks is not None:
            self.masks.tokens = Tokens(self.pieces.take(torch.arange(length), 0), length)
        self.positions = whole[POSITIONS]
        return whole

    def _check(self, batch: Mapping[str, Any], named: Mapping[str, int], length: int) -> None:
        count = self.pieces.count
        if length % count:
            below = length // count * count
            near = f"{below} or {below + count}" if below else str(count)
            less = ", or type cp.balance=none" if self.pieces.balanced and length % self.pieces.ranks == 0 else ""
            raise UsageError(
                f"cp={self.option} cuts sequences into {count} equal pieces, and {length} tokens don't divide by that: "
                f"make them {near} long{less}."
            )
        for name, value in batch.items():
            if isinstance(value, Tensor) and name not in self.dims and length in value.shape[1:]:
                dim = value.shape.index(length, 1)
                raise UsageError(
                    f"The batch has an entry '{name}' of shape {tuple(value.shape)}, which looks like a sequence of "
                    f"{length} tokens, and the plan of cp={self.option} doesn't name it: add '{name}': {dim} to "
                    f"cp_plan, or '{name}': None if each rank needs it whole."
                )
