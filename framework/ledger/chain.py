"""One hash a step, the same on all ranks and under every mix.

Each sample of an optimizer step has a 64-bit hash of its number and of its place in the step; the sum of their halves
doesn't depend on which rank adds which, so two float64 numbers a step are all that ranks have to add up. The chain's
next link is SHA-256 over the last one, step, epoch, position and those sums.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

START = "0" * 32
"""The link before the first step."""

_U = np.uint64
_KEY, _GOLDEN, _PLACE = _U(0x6C65646765722D30), _U(0x9E3779B97F4A7C15), _U(0xD1342543DE82EF95)
_LOW, _HALF = _U(0xFFFFFFFF), _U(32)
_MIX = ((_U(30), _U(0xBF58476D1CE4E5B9)), (_U(27), _U(0x94D049BB133111EB)))


def digests(steps: Sequence[Sequence[tuple[bytes, range]]]) -> list[float]:
    """Return for each step the sum of its samples' hashes: of their lower and of their upper 32 bits.

    Fewer than 2^21 samples a step, or the sums aren't exact any more.

    Args:
        steps: of each, by micro-step, the samples' numbers (int64) and their places in the step over all ranks, from 0.
    """
    values: list[float] = []
    numbers: list[bytes] = []
    places: list[range] = []
    ends: list[int] = []
    size = 0
    for step in steps:
        if size > BLOCK:
            values += _digests(numbers, places, ends)
            numbers, places, ends, size = [], [], [], 0
        for own, one in step:
            numbers.append(own)
            places.append(one)
            size += len(one)
        ends.append(size)
    return values + _digests(numbers, places, ends)


BLOCK = 1 << 14
"""Samples after which a block of steps is hashed: what fits into a core's cache is five times as fast."""


def _digests(parts: Sequence[bytes], places: Sequence[range], ends: Sequence[int]) -> list[float]:
    """Return the two sums of each step of a block; `ends`: how many samples lie before each step's end."""
    numbers = np.frombuffer(b"".join(parts), _U)
    z = _joined(places).view(_U)
    t = np.empty_like(z)
    np.multiply(z, _PLACE, out=z)
    np.add(z, _KEY, out=z)
    _finalize(z, t)
    np.multiply(numbers, _GOLDEN, out=t)
    np.bitwise_xor(z, t, out=z)
    _finalize(z, t)
    sums = np.zeros((len(ends), 2), _U)
    bounds = np.array([0, *ends])
    filled = np.flatnonzero(np.diff(bounds))
    if len(filled):
        starts = bounds[filled]
        sums[filled, 0] = np.add.reduceat(np.bitwise_and(z, _LOW, out=t), starts)
        sums[filled, 1] = np.add.reduceat(np.right_shift(z, _HALF, out=t), starts)
    found: list[float] = sums.astype(np.float64).ravel().tolist()
    return found


def _joined(ranges: Sequence[range]) -> NDArray[np.int64]:
    """Return the numbers of all ranges, one after the other."""
    if len({(len(one), one.step) for one in ranges}) == 1:  # as usual
        length, step = len(ranges[0]), ranges[0].step
        starts = np.array([one.start for one in ranges], np.int64)
        return np.add.outer(starts, np.arange(0, length * step, step, dtype=np.int64)).ravel()
    return np.concatenate(
        [np.empty(0, np.int64), *(np.arange(r.start, r.stop, r.step, dtype=np.int64) for r in ranges)]
    )


def _finalize(z: NDArray[np.uint64], t: NDArray[np.uint64]) -> None:
    """Spread the bits of `z` in place, as SplitMix64 does at its end; `t` is overwritten."""
    for by, factor in _MIX:
        np.right_shift(z, by, out=t)
        np.bitwise_xor(z, t, out=z)
        np.multiply(z, factor, out=z)


def link(last: str, step: int, epoch: int, position: int, low: float, high: float) -> str:
    """Return the chain's next link, 32 hexadecimal digits.

    Args:
        last: the link before.
        step: number of the optimizer step, from 1.
        epoch: from 0.
        position: samples of the epoch that were consumed before this step.
        low: sum over all samples of the step of the lower 32 bits of their hashes.
        high: the same of the upper 32 bits.
    """
    return sha256(bytes.fromhex(last) + _LINK(step, epoch, position, low, high)).hexdigest()[:32]


_LINK = struct.Struct("<3q2d").pack
