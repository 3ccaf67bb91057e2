"""torchmetrics' objects that belong to a module: their states count each sample once, under any mix.

An object adds up its states over all ranks when it is computed. So ranks that read the same samples (tp) must be left
out, and what a filler batch adds is taken back.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn
from torchmetrics import Metric

from framework.adapters.torch_private import flattened

if TYPE_CHECKING:
    from framework.mesh import Mesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp")
"""Over these, ranks have different samples, other tokens of them, or (pp) no results at all."""


def objects_of(module: nn.Module) -> list[Metric]:
    """Return the module's metrics."""
    return [one for one in module.modules() if isinstance(one, Metric)]


def count_once(module: nn.Module, mesh: Mesh) -> None:
    """Have the module's metrics leave out ranks that differ on tp only; one that has a group of its own keeps it.

    Collective under tensor parallelism.
    """
    found = [one for one in objects_of(module) if one.process_group is None]
    if mesh.size("tp") == 1 or not found:
        return
    group = flattened(mesh[AXES]).get_group()
    for one in found:
        one.process_group = group


@contextmanager
def untouched(module: nn.Module) -> Generator[None, None, None]:
    """Inside, a filler is run: afterwards the module's metrics are what they were."""
    found = objects_of(module)
    # what it would pickle: all but its wrapped functions; groups can't be copied
    kept = [copy.deepcopy(one.__getstate__(), {id(one.process_group): one.process_group}) for one in found]
    try:
        yield
    finally:
        for one, state in zip(found, kept, strict=True):
            vars(one).update(state)
