"""A schedule from a file equals one process: the page's 1F1B, an interleaved one with split backwards, with FSDP."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mixes import FSDP, Mix
from parity import outcomes_of, reference_of

from framework.verify.reference import disagreements

PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"
INTERLEAVED = """\
0F0,0F1,2F0,2F1,2B0,0F2,2B1,0F3,0B0,2F2,0B1,2F3,2B2,2B3,0B2,0B3
,1F0,1F1,3F0,3I0,3F1,3B1,3W0,1B0,1F2,1B1,1F3,3F2,3B2,3F3,3B3,1B2,1B3
"""


def of_the_page() -> str:
    """Return the example that docs/pipelines.md shows."""
    (block,) = re.findall(r"```csv\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return block


@pytest.mark.parametrize(("name", "ranks", "words"), [("page", 2, ""), ("interleaved", 2, ""), ("fsdp", 4, FSDP)])
def test_a_schedule_from_a_file_equals_one_process(pool, tmp_path, name, ranks, words):
    path = tmp_path / "schedule.csv"
    path.write_text(of_the_page() if name == "page" else INTERLEAVED)
    mix = Mix(name, ranks, f"pp=csv pp.file={path} {words}".strip())
    want = reference_of(pool, mix)
    for rank, outcome in enumerate(outcomes_of(pool, mix)):
        assert disagreements(outcome.result, want, mix.bounds) == [], f"rank {rank}"
