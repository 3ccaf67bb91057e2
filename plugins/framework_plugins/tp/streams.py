"""Which random stream dropout draws from, region by region (the rule of Megatron-LM; Shoeybi et al., 2019).

Where all tensor-parallel ranks compute the same thing they must draw the same mask: that is the main stream, the
device's default generator, which the seed makes equal over tp. Where each works on its own piece (attention heads, the
hidden units of an MLP, with sequence parallelism its own tokens) the masks must differ: there the default generator is
put on a stream of the rank's own. Dropout modules, whose masks don't depend on the mix (`framework.dropout`), don't
draw from these; they are told which piece of what they drop from is here.

The own stream starts from a number drawn from the main stream, mixed with the tp rank. So it needs no state of its own:
whoever restores the main stream at the start of a block (activation checkpointing does) gets the same masks again.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from framework.dropout import Masks, Split

CUDA_DRAWS = 4
"""By how much one draw moves the offset of a CUDA generator, whose numbers come in fours."""


class Streams:
    """Switches the default generator of one device between the main stream and this rank's own.

    Args:
        rank: coordinate on axis tp.
        device_type: `cpu` or `cuda`.
        ranks: size of the axis.
        masks: of dropout modules; None = there are none.
    """

    def __init__(self, rank: int, device_type: str, ranks: int, masks: Masks | None = None) -> None:
        self.rank = rank
        self.device_type = device_type
        self.ranks = ranks
        self.masks = masks
        self._main: Tensor | None = None

    @property
    def split(self) -> bool:
        """Whether the generator is on this rank's own stream."""
        return self._main is not None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_own(self, cut: str) -> None:
        """Go to this rank's own stream, if it isn't there; `cut`: what each rank has a piece of (`dropout.Split`)."""
        if self.masks is not None:
            self.masks.split = Split(cut, self.rank, self.ranks)
        if self._main is not None:
            return
        generator = self._generator()
        if self.device_type == "cpu":
            seed = int(torch.randint(0, 2**62, (), generator=generator))
        else:  # a draw would have to come back to the host; seed and offset are known there
            offset = generator.get_offset()
            seed = generator.initial_seed() ^ (offset << 32)
            generator.set_offset(offset + CUDA_DRAWS)
        self._main = generator.get_state()
        generator.manual_seed(_mix(seed, self.rank))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_main(self) -> None:
        """Go back to where the main stream was left; nothing if it is there already."""
        if self.masks is not None:
            self.masks.split = None
        if self._main is not None:
            self._generator().set_state(self._main)
            self._main = None

    def _generator(self) -> torch.Generator:
        if self.device_type == "cpu":
            return torch.default_generator
        generator: torch.Generator = torch.cuda.default_generators[torch.cuda.current_device()]
        return generator


def _mix(seed: int, rank: int) -> int:
    """Spread (seed, rank) over 63 bits: the CPU generator uses the lowest 32 only, so they must differ by rank."""
    digest = blake2b(f"{seed} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
