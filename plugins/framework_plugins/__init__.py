"""The bundled options: one folder a concern, one file an option. Reaches the core only through hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from framework.hookspecs import hookimpl
from framework.paths import conf_dir


@hookimpl
def config_roots() -> Sequence[str]:
    """The catalogue in `conf/`; an option is a YAML file there and a class here, and needs no other entry.

    A path and not `pkg://`, because `conf/` has no `__init__.py`: in a checkout it isn't a package.
    """
    return [f"file://{conf_dir()}"]


@hookimpl
def commands() -> Mapping[str, str]:
    """Commands that belong to an option."""
    return {
        "deepspeed_config": "framework_plugins.strategy.deepspeed_config:show",
        "keep": "framework_plugins.checkpoint.keeper:main",
        "catalogue": "framework_plugins.checkpoint.catalogue:main",
    }
