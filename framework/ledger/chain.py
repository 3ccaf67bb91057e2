"""One hash a step, the same on all ranks and under every mix.

Each sample of an optimizer step has a 64-bit hash of its number and of its place in the step; the sum of their halves
doesn't depend on which rank adds which, so two float64 numbers a step are all that ranks have to add up. The chain's
next link is SHA-256 over the last one, step, epoch, position and those sums.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

START = "0" * 32
"""The link before the first step."""

_U = np.uint64
_KEY, _GOLDEN, _PLACE = _U(0x6C65646765722D30), _U(0x9E3779B97F4A7C15), _U(0xD1342543DE82EF95)
_MIX = ((_U(30), _U(0xBF58476D1CE4E5B9)), (_U(27), _U(0x94D049BB133111EB)))


def digests(steps: Sequence[Sequence[tuple[bytes, range]]]) -> list[float]:
    """Return for each step the sum of its samples' hashes: of their lower and of their upper 32 bits.

    Fewer than 2^21 samples a step, or the sums aren't exact any more.

    Args:
        steps: of each, by micro-step, the samples' numbers (int64) and their places in the step over all ranks, from 0.
    """
    numbers = np.frombuffer(b"".join(numbers for step in steps for numbers, _ in step), _U)
    places = [np.arange(one.start, one.stop, one.step, dtype=np.int64) for step in steps for _, one in step]
    z = np.concatenate([np.empty(0, np.int64), *places]).astype(_U) * _PLACE + _KEY
    z = _finalized(numbers * _GOLDEN ^ _finalized(z))
    sums = np.zeros((len(z) + 1, 2), _U)
    np.cumsum(z.view(np.uint32).reshape(-1, 2), axis=0, dtype=_U, out=sums[1:])
    ends = np.cumsum([0, *(sum(len(one) for _, one in step) for step in steps)])
    values: list[float] = (sums[ends[1:]] - sums[ends[:-1]]).astype(np.float64).ravel().tolist()
    return values


def _finalized(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread the bits, as SplitMix64 does at its end."""
    for by, factor in _MIX:
        z = (z ^ (z >> by)) * factor
    return z


def link(last: str, step: int, epoch: int, position: int, total: Sequence[float]) -> str:
    """Return the chain's next link, 32 hexadecimal digits.

    Args:
        last: the link before.
        step: number of the optimizer step, from 1.
        epoch: from 0.
        position: samples of the epoch that were consumed before this step.
        total: sums over all samples of the step, two numbers.
    """
    return hashlib.sha256(bytes.fromhex(last) + struct.pack("<3q2d", step, epoch, position, *total)).hexdigest()[:32]
