"""Random mixes equal the reference in fp64: a seeded sample in the suite, many more in the campaign."""

from __future__ import annotations

import random

import pytest
from figures import keep
from random_mixes import draw, measure

SEED = 7
SAMPLE = 2


@pytest.mark.parametrize("number", range(SAMPLE))
def test_sample_of_random_mixes(pool, number):
    row = draw(random.Random(f"{SEED} {number}"))
    assert measure(pool, row) == [], str(row)


@pytest.mark.campaign
def test_campaign_of_random_mixes(pool):
    """100 mixes; figures with commit and seed go to `tests/campaign/parity.json`."""
    wrong = {}
    rows = [draw(random.Random(f"{SEED} {number}")) for number in range(100)]
    for number, row in enumerate(rows):
        if lines := measure(pool, row):
            wrong[f"{number}: {row}"] = lines
    figures = {
        "seed": SEED,
        "bound": 1e-9,
        "mixes": len(rows),
        "different_mixes": len({row.mix.words for row in rows}),
        "equal": len(rows) - len(wrong),
        "wrong": wrong,
    }
    keep("parity", figures)
    assert not wrong
