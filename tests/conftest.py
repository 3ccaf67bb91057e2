"""For all tests: `tests/` is importable (`import reference`), and one set of processes serves a whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from framework.testing import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Processes with gloo; `pool.run(fn, world_size, *args)` gives the results by rank."""
    with WorkerPool() as workers:
        yield workers
