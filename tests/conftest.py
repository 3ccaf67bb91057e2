"""For all tests: `tests/` is importable (`import fitting`), skips are listed, one set of processes serves all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from skip_list import SkipList, allowed_skips

from framework.testing import WorkerPool


def pytest_configure(config: pytest.Config) -> None:
    """Fail a session in which a test skips that isn't in `skips.toml`."""
    config.pluginmanager.register(SkipList(allowed_skips()), "skip-list")


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Processes with gloo; `pool.run(fn, world_size, *args)` gives the results by rank."""
    with WorkerPool() as workers:
        yield workers
