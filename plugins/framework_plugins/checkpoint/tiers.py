"""Where a run goes on from: the newest checkpoint of all tiers; of equal ones that of the fastest tier.

`memory` (this host's, read where it lies), `peer` (other hosts' memory: fetched into this host's), `disk`, `remote`
(fetched into the run's folder).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from framework import checkpoint_files as files
from framework.checkpoint_files import CheckpointError
from framework.plan import Checkpoint
from framework_plugins.checkpoint import memory, peers, remote
from framework_plugins.checkpoint.dcp import DCP

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Offer:
    """A checkpoint that a tier has; `take` brings it where it can be read, and returns its path."""

    life: int
    step: int
    saved: float
    tier: str
    take: Callable[[], str | Path]

    @property
    def age(self) -> tuple[int, int, float]:
        """Newest last: a later life, in a life a later step; hosts' clocks count only where nobody counted lives."""
        return self.life, self.step if self.life else 0, self.saved


def newest(run_dir: str, settings: DCP) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run, ready to be read; None if nothing was ever saved.

    Raises:
        CheckpointError: there are checkpoints, and none is complete; or those in memory are somebody else's.
    """
    began = time.perf_counter()
    offers: list[_Offer] = []
    complaints: list[CheckpointError] = []
    for tier in (_in_memory, _with_peers, _on_disk, _far_away):
        try:
            offers += tier(run_dir, settings)
        except CheckpointError as error:
            complaints.append(error)
            log.warning("%s", error)
    for offer in sorted(offers, key=lambda one: one.age, reverse=True):  # stable: of equal ones the fastest tier's
        try:
            path = str(offer.take())
        except CheckpointError as error:
            complaints.append(error)
            log.warning("The checkpoint of step %d in %s can't be had: %s.", offer.step, offer.tier, error)
        else:
            return Checkpoint(path, offer.step, offer.tier, offer.saved, time.perf_counter() - began, offer.life)
    if complaints:
        raise complaints[-1]
    return None


def _in_memory(run_dir: str, settings: DCP) -> list[_Offer]:
    root = memory.root_of(run_dir, settings.memory_dir)
    if root is None:
        return []
    marks, damaged = files.marks(files.folder_of(root))
    if not settings.peers:  # with peers others may have what is missing here
        for error in damaged:
            log.warning("Checkpoint skipped: %s", error)
    return [_Offer(mark.life, mark.step, mark.saved, "memory", partial(Path, mark.path)) for mark in marks]


def _with_peers(run_dir: str, settings: DCP) -> list[_Offer]:
    run = memory.name_of(run_dir)
    if run is None or not settings.peers:
        return []
    root = memory.root(run, settings.memory_dir)
    return [
        _Offer(
            int(one.mark["clock"]["life"]),
            int(one.mark["step"]),
            float(one.mark["saved"]),
            "peer",
            partial(peers.fetch, one, run, root),
        )
        for one in peers.look(settings.peers, run, root)
    ]


def _on_disk(run_dir: str, settings: DCP) -> list[_Offer]:
    found = files.newest_complete(run_dir)
    return [] if found is None else [_Offer(found.life, found.step, found.saved, "disk", partial(Path, found.path))]


def _far_away(run_dir: str, settings: DCP) -> list[_Offer]:
    name = remote.name_of(run_dir)
    if settings.remote is None or name is None:
        return []
    url = settings.remote
    return [
        _Offer(
            int(row["life"]),
            int(row["step"]),
            float(row["saved"]),
            "remote",
            partial(remote.fetch, url, name, row["name"], run_dir),
        )
        for row in remote.newest(url, name)
    ]
