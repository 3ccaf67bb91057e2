"""What the table of mixes must hold: all of it, and what the suite runs of it."""

from __future__ import annotations

from collections import Counter

import pytest
from mixes import CONCERNS, IN_SUITE, MIXES, OPTIONS, words

TABLES = pytest.mark.parametrize("table", [MIXES, IN_SUITE], ids=["all", "in the suite"])


@TABLES
def test_there_are_at_least_forty_different_mixes(table):
    assert len({frozenset(mix.settings.items()) | {mix.ranks} for mix in table}) == len(table) >= 40
    assert len({mix.name for mix in table}) == len(table)


@TABLES
def test_every_option_stands_in_two_rows(table):
    counts = Counter(word for mix in table for word in words(mix))
    assert {option: counts[option] for option in OPTIONS if counts[option] < 2} == {}


@TABLES
def test_eight_processes_stand_in_two_rows_and_every_concern_meets_every_other(table):
    assert sum(mix.ranks == 8 for mix in table) >= 2
    met = {(a, b) for mix in table for a in CONCERNS for b in CONCERNS if {a, b} <= set(mix.settings)}
    assert {(a, b) for a in CONCERNS for b in CONCERNS} <= met
