"""Random numbers that are a function of a key and a position: the same whoever computes them, in whatever order.

Everything that must not depend on the mix (the order of samples, initial weights) is drawn here and not from a
generator with a state. The bits are those of SplitMix64 (Steele, Lea and Flood, Fast Splittable Pseudorandom Number
Generators, 2014), seeded with the key; number i is its output i. Reproducible in any language with 64-bit integers.
"""

from __future__ import annotations

import hashlib
from array import array

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def derive(*parts: int | str) -> int:
    """Return a 64-bit key: the first 8 bytes (big endian) of SHA-256 of the parts as text, joined by zero bytes."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def _signed(value: int) -> int:
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value


def _shift(bits: Tensor, by: int) -> Tensor:
    """Shift right, filling with zeros: torch's own shift of int64 keeps the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def bits(key: int, positions: Tensor) -> Tensor:
    """Return 64 random bits for each of `positions` (int64, any shape), as int64."""
    z = positions * _signed(GOLDEN) + _signed(key + GOLDEN)
    for by, factor in _MIX:
        z = (z ^ _shift(z, by)) * _signed(factor)
    return z ^ _shift(z, 31)


def at(key: int, position: int) -> int:
    """Return the 64 bits of one position as an unsigned number."""
    mask = 0xFFFFFFFFFFFFFFFF
    z = (key + (position + 1) * GOLDEN) & mask
    for by, factor in _MIX:
        z = (z ^ (z >> by)) * factor & mask
    return z ^ (z >> 31)


def uniform(key: int, positions: Tensor) -> Tensor:
    """Return float64 numbers in the open interval (0, 1): the upper 52 bits plus a half, times 2^-52."""
    return (_shift(bits(key, positions), 12).double() + 0.5) * 2.0**-52


def normal(key: int, positions: Tensor) -> Tensor:
    """Return standard normal float64 numbers: the inverse distribution function of `uniform`.

    `ndtri` is computed element by element, so a value doesn't depend on where in a tensor it stands; the vectorised
    logarithm and cosine of Box and Muller's method may differ in the last bit between the middle and the end of one.
    """
    numbers: Tensor = torch.special.ndtri(uniform(key, positions))
    return numbers


def epoch_order(seed: int, epoch: int, size: int) -> array[int]:
    """Return the order in which all ranks together read a shuffled dataset of `size` samples in an epoch."""
    return array("q", permutation(derive("order", seed, epoch), size).numpy().tobytes())


def permutation(key: int, size: int) -> Tensor:
    """Return 0 to size - 1 (int64) in random order: sorted by their `bits` as unsigned numbers, ties by number."""
    keys = bits(key, torch.arange(size)) ^ _signed(1 << 63)  # unsigned order under a signed comparison
    return torch.argsort(keys, stable=True)
