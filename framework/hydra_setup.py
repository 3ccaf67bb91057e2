"""What Hydra must know before it reads a command line: our schema, `none` for every concern, third parties' folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from framework import paths
from framework.catalog import CUSTOM, NONE, catalog
from framework.schema import RunConfig

VERSION_BASE = "1.3"
JOB_NAME = "framework"

_extra_roots: list[str] = []
"""Folders of the user's own (`--config-dir`), for compositions that don't go through `hydra.main`."""


class FrameworkSearchPath(SearchPathPlugin):
    """Appends recipes, the user's and third parties' folders after ours: who is first wins, so nobody shadows us."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra for every composition."""
        search_path.append("framework-recipes", f"file://{paths.recipes_dir()}")
        for root in _extra_roots:
            search_path.append("command-line", f"file://{root}")
        for provider, root in catalog().roots:
            search_path.append(provider, root)


def prepare(config_dirs: Sequence[str] = ()) -> None:
    """Register with Hydra; may be called again.

    Args:
        config_dirs: the user's own folders of configs.
    """
    _extra_roots[:] = [str(Path(folder).resolve()) for folder in config_dirs]
    Plugins.instance().register(FrameworkSearchPath)
    store = ConfigStore.instance()
    # Plain values, not the dataclass: types are checked by `guard.py`, which collects all complaints.
    schema = asdict(RunConfig()) | dict.fromkeys(catalog().slots)
    store.store(name="run_schema", node=schema, provider="framework")
    for slot in catalog().slots:
        store.store(group=slot, name=NONE, node={}, package="_global_", provider="framework")
        if slot in ("model", "data"):
            store.store(group=slot, name=CUSTOM, node={"_target_": "???"}, provider="framework")


@contextmanager
def hydra_ready() -> Iterator[None]:
    """Within it, `hydra.compose` works on our folders."""
    with initialize_config_dir(str(paths.conf_dir()), version_base=VERSION_BASE, job_name=JOB_NAME):
        yield
