"""A checkpoint of any layout is read under any other, bit for bit, optimizers included (P15, P16, P20, P21)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpoint_layouts import LAYOUTS, load_all, save_all

from framework.testing import WorkerPool

RANKS = 4


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each layout, and one of a single process (`one`)."""
    folder = tmp_path_factory.mktemp("layouts")
    pool.run(save_all, RANKS, str(folder), LAYOUTS, timeout=120)
    pool.run(save_all, 1, str(folder / "one"), ("replica",), process_group=False)
    return folder


@pytest.mark.campaign
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_what_every_layout_wrote(pool: WorkerPool, saved: Path, layout: str) -> None:
    check(pool, saved, layout, LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_reads_what_some_wrote(pool: WorkerPool, saved: Path, layout: str) -> None:
    """Each is read by three others: the two behind it in the list, and one half of the list away."""
    at = LAYOUTS.index(layout)
    check(pool, saved, layout, [LAYOUTS[(at + shift) % len(LAYOUTS)] for shift in (1, 2, len(LAYOUTS) // 2 + 1)])


def check(pool: WorkerPool, saved: Path, layout: str, writers: Sequence[str]) -> None:
    for report in pool.run(load_all, RANKS, str(saved), (*writers, "one/replica"), (layout,), timeout=120):
        assert {pair: problems for pair, problems in report.items() if problems} == {}
        assert len(report) == len(writers) + 2


def test_one_process_reads_what_every_layout_wrote(pool: WorkerPool, saved: Path) -> None:
    (report,) = pool.run(load_all, 1, str(saved), LAYOUTS, ("replica",), process_group=False)
    assert {pair: problems for pair, problems in report.items() if problems} == {}
