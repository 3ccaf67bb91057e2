"""The mixes that `verify` goes through: every legal product of what the options of the mesh's concerns say they can."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, TypeVar

MESH_SLOTS = ("strategy", "tp", "pp", "cp", "ep")
"""Concerns that have an axis of the mesh."""

SIZES = (2, 4)

Row = TypeVar("Row")


@dataclass(frozen=True)
class Mix:
    """One mix.

    Attributes:
        words: as typed, `devices` not among them.
        ranks: processes.
        others: what else was typed for this mix: settings of concerns that have no axis.
    """

    words: tuple[str, ...]
    ranks: int
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([*(self.words or ["one process"]), *self.others])


Options = Mapping[str, Mapping[str, Sequence[str]]]
"""Slot -> option -> its variants (`framework.plan.Requirements`)."""


def every(options: Options, most_ranks: int) -> Iterator[Mix]:
    """Yield the mixes that fit into `most_ranks`, small worlds first; not all are legal.

    They are all products of options. An axis that stands alone has each of `SIZES`, several have 2 each. A variant of
    an option goes with each option of each other concern, in pairs: settings of three at once would add but time. One
    that is a part of another variant stands alone only.
    """
    found: dict[tuple[str, ...], Mix] = {}
    ways: dict[str, list[tuple[str, ...]]] = {}
    for slot in MESH_SLOTS:
        ways[slot] = [()]
        for option, variants in options.get(slot, {}).items():
            words = [tuple(f"{slot}.{setting}" for setting in variant.split()) for variant in ("", *variants)]
            ways[slot] += [(f"{slot}={option}", *settings) for settings in words]
    parts = {way for some in ways.values() for way in some if any(set(way) < set(other) for other in some)}
    for product_of_all in product(*ways.values()):
        chosen = [way for way in product_of_all if way]
        varied = [way for way in chosen if len(way) > 1]
        if varied and (len(chosen) > 2 or (len(chosen) == 2 and parts.intersection(varied))):
            continue
        for mix in _sized(chosen, most_ranks):
            found.setdefault((*mix.words, str(mix.ranks)), mix)
    yield from sorted(found.values(), key=lambda mix: (mix.ranks, mix.words))


def _sized(chosen: Sequence[tuple[str, ...]], most_ranks: int) -> Iterator[Mix]:
    """Yield one choice of options with each choice of sizes."""
    axes = [way for way in chosen if not way[0].startswith("ep=")]  # experts borrow their ranks from the strategy
    for sizes in product(SIZES if len(axes) == 1 else SIZES[:1], repeat=len(chosen)):
        words: list[str] = []
        ranks = 1
        for way, size in zip(chosen, sizes, strict=True):
            words += way
            slot = way[0].partition("=")[0]
            if slot == "strategy":
                ranks *= 2 * size if "strategy.replicas=2" in way else size
            else:
                ranks *= size if way in axes else 1
                words += [f"{slot}.size={size}"] if size != SIZES[0] else []
        if ranks <= most_ranks:
            yield Mix(tuple(words), ranks)


def thinned(mixes: Sequence[Mix]) -> list[Mix]:
    """Return what a long run goes through: `mixes` of one and of two concerns, and few of the others.

    Of two concerns with a variant, and of three and more, each word stands in one mix with the same concerns.
    """
    groups: dict[tuple[Any, ...], list[Mix]] = {}
    for mix in mixes:
        slots = tuple(dict.fromkeys(slot_of(word) for word in mix.words))
        groups.setdefault((*slots, _varied(mix)), []).append(mix)
    kept: set[Mix] = set()
    for (*concerns, varied), group in groups.items():
        some = len(concerns) > 2 or (len(concerns) == 2 and varied)
        kept |= set(cover(group, lambda mix: mix.words, lambda mix: mix.ranks, 1) if some else group)
    return [mix for mix in mixes if mix in kept]


def _varied(mix: Mix) -> bool:
    return any("." in word.partition("=")[0] and ".size=" not in word for word in mix.words)


def cover(
    rows: Sequence[Row],
    words: Callable[[Row], Collection[str]],
    ranks: Callable[[Row], int],
    times: int,
    least: int = 0,
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
    chosen: list[Row] = []
    while left and (any(missing.values()) or len(chosen) < least):
        best = max(left, key=lambda row: sum(missing[word] > 0 for word in words(row)) / ranks(row))
        left.remove(best)
        chosen.append(best)
        missing.update({word: missing[word] - 1 for word in words(best) if missing[word]})
    return [row for row in rows if row in chosen]


def slot_of(word: str) -> str:
    """Return the concern that a word belongs to: `+tp=dtensor` and `tp.size=2` are of `tp`."""
    return word.lstrip("+~").partition("=")[0].partition(".")[0]


def pairwise(mixes: Sequence[Mix], seed: int = 0) -> list[Mix]:
    """Return few of `mixes` that together hold every pair of words (and numbers of ranks) that any of them holds."""
    held = {mix: set(combinations(sorted({*mix.words, f"{mix.ranks} ranks"}), 2)) for mix in mixes}
    missing: set[Any] = set().union(*held.values()) if held else set()
    order = list(mixes)
    random.Random(seed).shuffle(order)
    cover: list[Mix] = []
    while missing:
        best = max(order, key=lambda mix: len(held[mix] & missing) / mix.ranks)
        cover.append(best)
        missing -= held[best]
    return cover
