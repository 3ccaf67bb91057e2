"""One hash a step, the same on all ranks and under every mix.

Each sample of an optimizer step has a 64-bit hash of its number and of its place in the step; the sum of their halves
doesn't depend on which rank adds which, so two float64 numbers a step are all that ranks have to add up. The chain's
next link is SHA-256 over the last one, step, epoch, position and those sums.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

START = "0" * 32
"""The link before the first step."""

_U = np.uint64
_KEY, _GOLDEN, _PLACE = _U(0x6C65646765722D30), _U(0x9E3779B97F4A7C15), _U(0xD1342543DE82EF95)
_LOW, _HALF = _U(0xFFFFFFFF), _U(32)
_MIX = ((_U(30), _U(0xBF58476D1CE4E5B9)), (_U(27), _U(0x94D049BB133111EB)))


class Stretch(NamedTuple):
    """Optimizer steps, one after another, whose samples have the same places: what one rank trained in them.

    Attributes:
        steps: how many.
        places: of the samples in their step over all ranks, from 0, by micro-step.
        numbers: of the samples of all steps, int64 in bytes.
    """

    steps: int
    places: tuple[range, ...]
    numbers: bytes


def digests(stretches: Iterable[Stretch]) -> list[float]:
    """Return for each step the sum of its samples' hashes: of their lower and of their upper 32 bits.

    Fewer than 2^21 samples a step, or the sums aren't exact any more.
    """
    values: list[float] = []
    for steps, places, numbers in stretches:
        keys = _keys(places)
        samples = np.frombuffer(numbers, _U).reshape(steps, len(keys))
        sums = np.empty((steps, 2), _U)
        rows = max(1, BLOCK // max(1, len(keys)))
        for start in range(0, steps, rows):
            block = slice(start, start + rows)
            z = samples[block] * _GOLDEN
            t = np.empty_like(z)
            np.bitwise_xor(z, keys, out=z)
            _finalize(z, t)
            sums[block, 0] = np.bitwise_and(z, _LOW, out=t).sum(axis=1)
            sums[block, 1] = np.right_shift(z, _HALF, out=t).sum(axis=1)
        values += sums.astype(np.float64).ravel().tolist()
    return values


BLOCK = 1 << 14
"""Samples that are hashed together: what fits into a core's cache is five times as fast."""


@lru_cache(maxsize=256)  # of all ranks, when a ledger is read
def _keys(places: tuple[range, ...]) -> NDArray[np.uint64]:
    """Return the hash of each place."""
    z = np.concatenate([np.empty(0, np.int64), *(np.arange(p.start, p.stop, p.step) for p in places)]).view(_U)
    np.multiply(z, _PLACE, out=z)
    np.add(z, _KEY, out=z)
    _finalize(z, np.empty_like(z))
    return z


def _finalize(z: NDArray[np.uint64], t: NDArray[np.uint64]) -> None:
    """Spread the bits of `z` in place, as SplitMix64 does at its end; `t` is overwritten."""
    for by, factor in _MIX:
        np.right_shift(z, by, out=t)
        np.bitwise_xor(z, t, out=z)
        np.multiply(z, factor, out=z)


def links(last: str, step: int, epoch: int, ats: Iterable[int], sums: Sequence[float]) -> list[str]:
    """Return the chain's next links, 32 hexadecimal digits each, of steps that follow one another in an epoch.

    Args:
        last: the link before.
        step: number of the first of these optimizer steps, from 1.
        epoch: from 0.
        ats: of each step, the samples of the epoch that were consumed before.
        sums: of each step, two numbers: `digests` summed up over all ranks.
    """
    found, link = [], bytes.fromhex(last)
    for number, at in enumerate(ats):
        link = sha256(link + _LINK(step + number, epoch, at, sums[2 * number], sums[2 * number + 1])).digest()[:16]
        found.append(link.hex())
    return found


_LINK = struct.Struct("<3q2d").pack
