"""For all tests: `tests/` is importable (`import fitting`), skips are listed, one set of processes serves all."""

from __future__ import annotations

import os
import sys
import tempfile
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


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A test that leaves one in pytest's own process would fail an innocent one later."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("a process group is left in pytest's own process: run it in `pool.run(..., process_group=False)`")


@pytest.fixture(scope="session", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is left behind, and nothing depends on the terminal, in processes started here either.

    Whatever asks for a temporary folder gets one that pytest clears away. Its name is short: sockets lie in such
    folders, and their paths may have 107 characters.
    """
    os.environ.pop("COLUMNS", None)  # pytest-xdist sets it: what is printed would be narrower than it is without
    tempfile.tempdir = os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("t", numbered=False))
