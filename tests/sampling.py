"""Which rows of a large table the suite runs; the others belong to the campaign."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

Row = TypeVar("Row")


def cover(
    rows: Sequence[Row], words: Callable[[Row], Collection[str]], ranks: Callable[[Row], int], times: int, least: int
) -> list[Row]:
    """Return few rows, small worlds first, in which each word stands in `times` rows, or in all that have it.

    Args:
        rows: the table.
        words: of a row.
        ranks: of a row: what it costs.
        times: how often a word must stand.
        least: how many rows at least; what is missing is drawn with a fixed seed.
    """
    left = list(rows)
    random.Random(0).shuffle(left)
    have = Counter(word for row in rows for word in words(row))
    missing = {word: min(times, count) for word, count in have.items()}
    chosen = []
    while left and (any(missing.values()) or len(chosen) < least):
        best = max(left, key=lambda row: sum(missing[word] > 0 for word in words(row)) / ranks(row))
        left.remove(best)
        chosen.append(best)
        missing.update({word: missing[word] - 1 for word in words(best) if missing[word]})
    return [row for row in rows if row in chosen]
