"""`python -m framework keep`: hold copies of other hosts' checkpoints in this host's memory (the tier `peer`).

One runs on each host, beside the training or not, and outlives it. Its folder is the one in which the tier `memory` of
the same host lies, and has the same form: a copy is taken from it like any other checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import socket
import threading
from collections.abc import Sequence
from multiprocessing import ProcessError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from framework import checkpoint_files as files
from framework.checkpoint_files import CheckpointError
from framework.errors import EXIT_OK, UsageError
from framework.guide import PROGRAM
from framework.hookspecs import takes_words
from framework.versions import Clock
from framework_plugins.checkpoint import memory, wire

log = logging.getLogger(__name__)


class Keeper:
    """Serves one folder; a thread a connection.

    Args:
        folder: of a memory file system.
        free_bytes: what is left free of it, whoever fills it.
    """

    def __init__(self, folder: Path, free_bytes: int = 0) -> None:
        self.folder = folder
        self.free_bytes = free_bytes
        self._lock = threading.Lock()
        self.sign = memory.sign(folder)
        """Random name of this keeper; a run that finds the file of that name in its own memory is on this host."""

    def serve(self, listening: socket.socket) -> None:
        """Take connections until the socket is closed."""
        while True:
            try:
                one, who = listening.accept()
            except OSError:  # closed: the end
                return
            threading.Thread(target=self._talk, args=(one, who), daemon=True).start()

    def _talk(self, one: socket.socket, who: Any) -> None:
        try:
            wire.limit_silence(one)
            with Connection(one.detach()) as connection:
                deliver_challenge(connection, wire.key())
                answer_challenge(connection, wire.key())
                while True:
                    self._answer(connection, wire.hear(connection))
        except EOFError:
            log.debug("%s has hung up.", who)
        except (ProcessError, OSError, ValueError) as error:
            log.warning("Connection of %s ended: %s: %s", who, type(error).__name__, error)

    def _answer(self, connection: Connection, asked: dict[str, Any]) -> None:
        try:
            answer = self._do(connection, asked)
        except (CheckpointError, KeyError, TypeError) as error:
            answer = {"refused": str(error) or type(error).__name__}
        if answer is not None:
            wire.tell(connection, answer)

    def _do(self, connection: Connection, asked: dict[str, Any]) -> dict[str, Any] | None:
        what, run = str(asked["do"]), str(asked["run"])
        if not wire.RUN.fullmatch(run):
            raise CheckpointError("that is no name of a run")
        root = memory.root(run, self.folder)
        if what == "list":
            return {"sign": self.sign, "found": listed(root)}
        if what == "drop":
            shutil.rmtree(root, ignore_errors=True)
            return {}
        step = str(asked["step"])
        if not wire.STEP_NAME.fullmatch(step):
            raise CheckpointError(f"{step} is no name of a checkpoint")
        at = files.folder_of(root) / step
        if what == "get":
            path = at / _checked(asked["file"])
            size = path.stat().st_size if path.is_file() else None
            if size is None:
                raise CheckpointError(f"{step}/{path.name} isn't here")
            wire.tell(connection, {"size": size})
            wire.send_file(connection, path, size)
            return None
        clock = Clock.from_dict(asked["clock"])
        coming = at.with_name(f".{step}.{clock.life}.tmp")
        if what == "settle":
            return self._settle(at, clock)
        if what == "put":
            return self._take(connection, coming, clock, _checked(asked["file"]), int(asked["size"]))
        if what == "commit":
            return self._commit(at, coming, clock, {_checked(name): text for name, text in asked["texts"].items()})
        raise CheckpointError(f"a keeper can't {what}")

    def _take(self, connection: Connection, coming: Path, clock: Clock, name: str, size: int) -> dict[str, Any]:
        """Receive one rank's file of a checkpoint that isn't complete yet."""
        newer = [other for other in clocks(coming.parent).values() if clock.before(other)]
        if newer:
            raise CheckpointError(
                f"{name} of {clock} comes too late: the state of {max(newer, key=lambda one: (one.life, one.steps))} is"
                " complete here, and states of different versions aren't mixed"
            )
        for left in coming.parent.glob(".step-*.tmp"):  # of a save that was given up: one is in flight at a time
            life = left.name.split(".")[2]
            if left != coming and life.isdecimal() and int(life) <= clock.life:
                shutil.rmtree(left, ignore_errors=True)
        coming.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if size > free - self.free_bytes:
            kept = f", of which --free keeps {self.free_bytes:,}" if self.free_bytes else ""
            raise CheckpointError(f"there is no room for {name} of {size:,} bytes: {free:,} are free in memory{kept}")
        wire.tell(connection, {})
        try:
            wire.receive_file(connection, coming / f".{name}", size)
        except BaseException:
            (coming / f".{name}").unlink(missing_ok=True)
            raise
        (coming / f".{name}").rename(coming / name)
        return {}

    def _commit(self, at: Path, coming: Path, clock: Clock, texts: dict[str, str]) -> dict[str, Any]:
        """All ranks' files are with some keeper: make those that are here part of a checkpoint."""
        with self._lock:
            if clocks(at.parent).get(at.name) == clock:  # this host's own ranks have saved it, too
                if coming.is_dir():
                    for file in coming.iterdir():
                        file.rename(at / file.name)
                    coming.rmdir()
            else:
                coming.mkdir(mode=0o700, parents=True, exist_ok=True)
                for name, text in sorted(texts.items(), key=lambda pair: pair[0] == files.META):  # the mark last
                    (coming / name).write_text(text)
                files.remove(at)
                coming.rename(at)
        return {}

    def _settle(self, at: Path, clock: Clock) -> dict[str, Any]:
        """The checkpoint is complete with every keeper: forget what is older."""
        with self._lock:
            for name, other in clocks(at.parent).items():
                if other.before(clock):
                    files.remove(at.with_name(name))
        return {}


def _checked(name: Any) -> str:
    if not wire.FILE_NAME.fullmatch(str(name)):
        raise CheckpointError(f"{name} is no name of a file of a checkpoint")
    return str(name)


def clocks(folder: Path) -> dict[str, Clock]:
    """Return the clocks of the checkpoints in a folder that have a mark, whether all their files are here or not."""
    found = {}
    for mark in folder.glob(f"step-*/{files.META}"):
        try:
            found[mark.parent.name] = Clock.from_dict(files.unsealed(mark)["clock"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s can't be read: %s", mark, error)
    return found


def listed(root: Path) -> dict[str, Any]:
    """Return what a folder in memory has of a run: checkpoint -> `mark`, and `files`: name -> bytes."""
    found: dict[str, Any] = {}
    for path in sorted(files.folder_of(root).glob("step-*")):
        try:
            mark = files.unsealed(path / files.META)
        except (OSError, ValueError) as error:
            log.warning("%s can't be read: %s", path, error)
            continue
        if (path / files.DAMAGE).exists():
            continue
        sizes = {file.name: file.stat().st_size for file in path.iterdir() if wire.FILE_NAME.fullmatch(file.name)}
        found[path.name] = {"mark": mark, "files": sizes}
    return found


@takes_words
def main(words: Sequence[str]) -> int:
    """Run a keeper until it is ended.

    Args:
        words: after the command's name.
    """
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} keep", description=__doc__)
    parser.add_argument("listen", metavar="HOST:PORT", help="where to listen; port 0 = any free one")
    parser.add_argument("--folder", type=Path, default=memory.SYSTEM, help="of a memory file system (%(default)s)")
    parser.add_argument("--free", type=float, default=1.0, metavar="GIB", help="memory left free of it (%(default)s)")
    flags = parser.parse_args(list(words))
    wire.key()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        host, port = wire.address(flags.listen)
        listening = socket.create_server((host, port))
    except (ValueError, OSError) as error:
        raise UsageError(f"{flags.listen}: nothing can listen there ({error}); type host:port.") from error
    if not flags.folder.is_dir():
        raise UsageError(f"--folder {flags.folder}: there is no such folder.")
    with listening:
        keeper = Keeper(flags.folder, int(flags.free * 2**30))
        at = listening.getsockname()
        print(
            f"Keeping checkpoints in {flags.folder}; type checkpoint.peers=[{at[0]}:{at[1]}, ...] in runs.", flush=True
        )
        keeper.serve(listening)
    return EXIT_OK
