"""Random mixes equal the reference in fp64: a seeded sample in the suite, many more in the campaign."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest
from random_mixes import draw, measure

SEED = 7
SAMPLE = 8
CAMPAIGN = Path(__file__).parents[1] / "campaign" / "parity.json"


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
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    figures = {
        "commit": commit,
        "seed": SEED,
        "bound": 1e-9,
        "mixes": len(rows),
        "different_mixes": len({row.mix.words for row in rows}),
        "equal": len(rows) - len(wrong),
        "wrong": wrong,
    }
    CAMPAIGN.parent.mkdir(exist_ok=True)
    CAMPAIGN.write_text(json.dumps(figures, indent=1) + "\n")
    assert not wrong
