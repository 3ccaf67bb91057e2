"""`framework.ledger.chain`: the hash of a step's samples, and links."""

from __future__ import annotations

from array import array

import numpy as np

from framework.ledger.chain import BLOCK, START, Stretch, digests, links


def summed(numbers: range, places: range) -> tuple[float, ...]:
    return tuple(digests([Stretch(1, (places,), array("q", numbers).tobytes())]))


def test_the_sum_is_exact_and_of_every_part() -> None:
    whole = summed(range(1 << 12), range(1 << 12))
    halves = zip(summed(range(100), range(100)), summed(range(100, 1 << 12), range(100, 1 << 12)), strict=True)
    assert tuple(one + other for one, other in halves) == whole
    assert max(whole) < 2**44, "512 times as many still are exact"
    assert whole != summed(range(1 << 12), range(1, 1 + (1 << 12)))
    assert whole != summed(range(1, 1 + (1 << 12)), range(1 << 12))
    assert len({*links(START, 1, 0, [0], whole), *links(START, 2, 0, [0], whole), *links(START, 1, 0, [8], whole)}) == 3


def test_steps_are_summed_one_by_one() -> None:
    places, steps, samples = (range(4), range(8, 12)), 3 + BLOCK // 8, np.arange(8 * (3 + BLOCK // 8))
    each = [digests([Stretch(1, places, row.tobytes())]) for row in samples.reshape(steps, 8)]
    assert digests([Stretch(steps, places, samples.tobytes())]) == [part for one in each for part in one]
    nothing = Stretch(2, (), b"")
    assert digests([Stretch(1, places, samples[:8].tobytes()), nothing]) == [*each[0], 0.0, 0.0, 0.0, 0.0]
    assert digests([]) == []


def test_links_follow_one_another() -> None:
    sums = [float(number) for number in range(6)]
    first, second, third = links(START, 7, 1, [0, 8, 16], sums)
    assert links(START, 7, 1, [0], sums[:2]) == [first]
    assert links(first, 8, 1, [8, 16], sums[2:]) == [second, third]


def test_the_hash_is_the_documented_one() -> None:
    """In plain integers, as docs/data.md has it; records of old runs must go on to be read."""

    def mix(z: int) -> int:
        for by, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ z >> by) * factor % 2**64
        return z

    samples = [(3, 0), (1 << 40, 1), (7, 9)]
    hashes = [
        mix(number * 0x9E3779B97F4A7C15 % 2**64 ^ mix((place * 0xD1342543DE82EF95 + 0x6C65646765722D30) % 2**64))
        for number, place in samples
    ]
    wanted = [sum(one % 2**32 for one in hashes), sum(one >> 32 for one in hashes)]
    numbers = array("q", [number for number, _ in samples]).tobytes()
    assert digests([Stretch(1, (range(0, 2), range(9, 10)), numbers)]) == wanted
