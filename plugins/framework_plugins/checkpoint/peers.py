"""The tier `peer`: copies of checkpoints in the memory of other hosts, over a socket; they survive a host's death.

After a checkpoint in memory is complete, each rank sends its file to the keeper of another host than its own, and rank
0 the rest to all keepers. A host that finds less in its own memory than belongs to the newest checkpoint fetches what
is missing into it; from then on it is a checkpoint in memory like any other.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from framework import checkpoint_files as files
from framework.agreement import gather, ranks
from framework.versions import Clock
from framework_plugins.checkpoint import memory, wire
from framework_plugins.checkpoint.storage import file_name

log = logging.getLogger(__name__)


class Peers:
    """What a rank knows of the keepers while it trains.

    Args:
        peers: host:port of each keeper.
        run: the run's name in memory.
        folder: of this host's memory file system.
        host: number of this host in the run, from 0.
    """

    def __init__(self, peers: Sequence[str], run: str, folder: str | None, host: int) -> None:
        self._run = run
        own = {memory.sign(one, make=False) for one in (folder, None)} - {""}
        signs = {peer: one["sign"] for peer in peers if (one := _listed(peer, run)) is not None}
        at = next((number for number, peer in enumerate(peers) if signs.get(peer) in own), None)
        begin = ((host if at is None else at) + 1) % len(peers)
        self.others = [peer for peer in (*peers[begin:], *peers[:begin]) if signs.get(peer) not in own]
        """Keepers of other hosts, the one to be asked first in front."""
        self._all = list(peers)

    def send(self, path: Path, group: dist.ProcessGroup | None) -> bool:
        """Copy a complete checkpoint; what fails is told, and training goes on. Collective over all ranks.

        Args:
            path: in this host's memory.
            group: of the calling thread.

        Returns:
            On all ranks whether it is whole with the peers, so that an older one may go.
        """
        mark = gather(self._mark(path) if ranks()[0] == 0 else None, group)[0]
        if mark is None:
            return False
        step = {"run": self._run, "step": path.name, "clock": mark["clock"]}
        sent = gather(self._send_own(path, step), group)
        return bool(gather(self._commit(path, step, sent) if ranks()[0] == 0 else False, group)[0])

    def _mark(self, path: Path) -> dict[str, Any] | None:
        try:
            return files.unsealed(path / files.META)
        except (OSError, ValueError) as error:
            log.warning("%s isn't with a peer: its mark can't be read (%s).", path.name, error)
            return None

    def _commit(self, path: Path, step: Mapping[str, Any], sent: Sequence[str]) -> bool:
        """On rank 0: let all keepers take the checkpoint for complete, and then, if it is, forget older ones."""
        failed = {rank: text for rank, text in enumerate(sent) if text.startswith("!")}
        if failed:
            told = "; ".join(f"rank {rank}: {text[1:]}" for rank, text in failed.items())
            log.warning("%s isn't with a peer: %s.", path.name, told)
            return False
        try:
            texts = {name: (path / name).read_text() for name in (files.INDEX, files.STATE, files.META)}
        except OSError as error:
            log.warning("%s isn't with a peer: %s.", path.name, error)
            return False
        incomplete = f"{path.name} isn't complete with a peer"
        have = {peer for peer in self._all if _asked(peer, incomplete, do="commit", **step, texts=texts) is not None}
        if not have >= {peer for peer in sent if peer}:
            return False
        for peer in have:
            _asked(peer, incomplete, do="settle", **step)
        return True

    def _send_own(self, path: Path, step: Mapping[str, Any]) -> str:
        """Send this rank's file to the first other host's keeper that takes it; return which, or ! and why none did."""
        name = file_name(ranks()[0])
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            return ""  # this rank had nothing to write
        except OSError as error:
            return f"!{error}"
        refusals = []
        for peer in self.others:
            try:
                with wire.connected(peer) as connection:
                    wire.ask(connection, peer, do="put", **step, file=name, size=size)
                    wire.send_file(connection, path / name, size)
                    wire.answer_of(connection, peer)
            except wire.PeerError as error:
                refusals.append(str(error))
            else:
                return peer
        return "!" + ("; ".join(refusals) or "no keeper of another host answers")

    def drop(self) -> None:
        """Let all keepers forget this run."""
        for peer in self._all:
            _asked(peer, "Copies of this run may stay in memory", do="drop", run=self._run)


def _asked(peer: str, otherwise: str, **message: Any) -> dict[str, Any] | None:
    """Return a keeper's answer; None, with a warning that begins with `otherwise`, if there is none or it refuses."""
    try:
        with wire.connected(peer) as connection:
            return wire.ask(connection, peer, **message)
    except wire.PeerError as error:
        log.warning("%s: %s.", otherwise, error)
        return None


def _listed(peer: str, run: str) -> dict[str, Any] | None:
    return _asked(peer, "No copies are looked for there", do="list", run=run)


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole between this host's memory and some keepers.

    Attributes:
        name: of its directory.
        mark: its commit mark.
        at: file -> the keeper that has it; files that this host has itself aren't listed.
    """

    name: str
    mark: Mapping[str, Any]
    at: Mapping[str, str]


def look(peers: Sequence[str], run: str, root: Path) -> list[Found]:
    """Return which checkpoints of a run can be had whole, in no order.

    Args:
        peers: host:port of each keeper.
        run: its name in memory.
        root: its folder in this host's memory.
    """
    from framework_plugins.checkpoint.keeper import listed

    with ThreadPoolExecutor(len(peers)) as pool:  # those that are gone are waited for side by side
        answers = list(pool.map(lambda peer: _listed(peer, run), peers))
    places: list[tuple[str, Mapping[str, Any]]] = [("", listed(root))]
    places += [(peer, answer["found"]) for peer, answer in zip(peers, answers, strict=True) if answer is not None]
    versions: dict[tuple[str, Clock], tuple[Mapping[str, Any], dict[str, str]]] = {}
    for place, found in places:
        for name, one in found.items():
            mark, sizes = one["mark"], one["files"]
            named = all(wire.FILE_NAME.fullmatch(file) for file in mark["files"])
            if not named or not wire.STEP_NAME.fullmatch(name) or mark.get("clock") is None:
                continue
            _, at = versions.setdefault((name, Clock.from_dict(mark["clock"])), (mark, {}))
            for file, size in sizes.items():
                if file not in at and (file == files.META or mark["files"].get(file) == size):
                    at[file] = place
    return [
        Found(name, mark, {file: place for file, place in at.items() if place})
        for (name, _), (mark, at) in versions.items()
        if {*mark["files"], files.META} <= at.keys()
    ]


def fetch(found: Found, run: str, root: Path) -> Path:
    """Make a checkpoint whole in this host's memory; return its path. One process a host does it, others wait.

    Raises:
        CheckpointError: a keeper has gone, or what has come isn't what the mark says.
    """
    memory.make_room(root)
    final = files.folder_of(root) / found.name
    final.parent.mkdir(exist_ok=True)
    with files.alone(root):
        if (final / files.DAMAGE).exists():  # what is here is, so the peer's own is taken
            final = final.with_name(f"{found.name}-fetched")
        if files.is_complete(final):
            return final
        if (final / files.DAMAGE).exists():
            files.read_mark(final)  # raises: the peer's is, too
        coming = final.with_name(f".{found.name}.fetched.tmp")
        if coming.exists():
            shutil.rmtree(coming)
        coming.mkdir(parents=True)
        for file in (*found.mark["files"], files.META):
            if file not in found.at:
                os.link(final.with_name(found.name) / file, coming / file)
        by_peer: dict[str, list[str]] = {}
        for file, peer in found.at.items():
            by_peer.setdefault(peer, []).append(file)
        with ThreadPoolExecutor(len(by_peer) or 1) as pool:
            list(pool.map(lambda peer: _fetch(peer, by_peer[peer], found.name, run, coming), by_peer))
        files.remove(final)
        coming.rename(final)
        files.read_mark(final)
    return final


def _fetch(peer: str, names: Sequence[str], step: str, run: str, into: Path) -> None:
    with wire.connected(peer) as connection:
        for name in names:
            answer = wire.ask(connection, peer, do="get", run=run, step=step, file=name)
            wire.receive_file(connection, into / name, int(answer["size"]))


def check(peers: Sequence[str]) -> tuple[str, str] | None:
    """Return what is wrong with the addresses or the key, and what to type instead; None = nothing."""
    for peer in peers:
        try:
            wire.address(peer)
        except ValueError as error:
            return str(error), "checkpoint.peers=[host:29600]"
    if peers and (wrong := wire.key_problem()) is not None:
        return wrong
    return None
