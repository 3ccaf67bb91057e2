"""The mixes that `verify` goes through: every legal product of what the options of the mesh's concerns say they can."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

MESH_SLOTS = ("strategy", "tp", "pp", "cp", "ep")
"""Concerns that have an axis of the mesh."""

VARIANTS: Mapping[str, tuple[str, ...]] = {
    "strategy=fsdp": ("", "strategy.sharding=shard_grad_op", "strategy.replicas=2"),
    "tp=dtensor": (
        "",
        "tp.sequence_parallel=true",
        "tp.loss_parallel=true",
        "tp.sequence_parallel=true tp.loss_parallel=true",
    ),
}
"""Settings of an option that make it another mix; an option that isn't here has one."""

BORROWED = {"ep": "strategy=fsdp"}
"""Axis whose ranks are some of those of an option, without which it can't be on."""

SIZES = (2, 4)


@dataclass(frozen=True)
class Mix:
    """One mix.

    Attributes:
        words: as typed, `devices` not among them.
        ranks: processes.
    """

    words: tuple[str, ...]
    ranks: int

    def __str__(self) -> str:
        return " ".join(self.words) or "one process"


def factors(options: Mapping[str, Sequence[str]]) -> dict[str, list[tuple[str, ...]]]:
    """Return slot -> every way to choose it, as words; the empty way leaves it off.

    Args:
        options: slot -> names of its options.
    """
    found: dict[str, list[tuple[str, ...]]] = {}
    for slot in MESH_SLOTS:
        ways: list[tuple[str, ...]] = [()]
        for option in options.get(slot, ()):
            word = f"{slot}={option}"
            ways += [(word, *variant.split()) for variant in VARIANTS.get(word, ("",))]
        found[slot] = ways
    return found


def every(options: Mapping[str, Sequence[str]], most_ranks: int) -> Iterator[Mix]:
    """Yield every product of ways and sizes that fits into `most_ranks`, small worlds first; not all are legal."""
    found: dict[tuple[str, ...], Mix] = {}
    for ways in product(*factors(options).values()):
        for mix in _sized(ways, most_ranks):
            found.setdefault((*mix.words, str(mix.ranks)), mix)
    yield from sorted(found.values(), key=lambda mix: (mix.ranks, mix.words))


def _sized(ways: Sequence[tuple[str, ...]], most_ranks: int) -> Iterator[Mix]:
    """Yield one choice of options with each choice of sizes."""
    chosen = [way for way in ways if way]
    on = {way[0]: number for number, way in enumerate(chosen)}
    borrowed = {
        number: on.get(BORROWED[slot]) for word, number in on.items() if (slot := word.split("=")[0]) in BORROWED
    }
    for sizes in product(SIZES, repeat=len(chosen)):
        if any(lender is None or sizes[lender] % sizes[number] for number, lender in borrowed.items()):
            continue
        words: list[str] = []
        ranks = 1
        for way, size in zip(chosen, sizes, strict=True):
            words += way
            slot = way[0].partition("=")[0]
            if slot == "strategy":
                ranks *= 2 * size if "strategy.replicas=2" in way else size
            else:
                ranks *= 1 if slot in BORROWED else size
                words += [f"{slot}.size={size}"] if size != SIZES[0] else []
        if ranks <= most_ranks:
            yield Mix(tuple(words), ranks)


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
