"""How a rank and a keeper talk: JSON messages and files over one TCP connection, both sides knowing the same key.

The connection is `multiprocessing.connection`'s, used for bytes alone: its `send` and `recv` would pickle. The key is
proven by its HMAC challenge and never sent; what follows isn't encrypted, so a keeper belongs into a private network.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from framework.checkpoint_files import CheckpointError
from framework.errors import UsageError

KEY = "FRAMEWORK_PEER_KEY"
"""Environment variable with the key, the same for keepers and runs."""
SHORTEST = 16
"""Characters of a key."""
CONNECT_S = 3.0
SILENCE_S = 30.0
"""A partner that neither sends nor takes anything for so long is taken for dead."""
CHUNK = 1 << 24
FILE_NAME = re.compile(r"rank-\d{5}\.safetensors|index\.json|state\.json|meta\.json")
STEP_NAME = re.compile(r"step-\d{6,12}")
RUN = re.compile(r"[0-9a-f]{32}")


class PeerError(CheckpointError):
    """A keeper can't be reached, or refused something; the message names it."""


def key() -> bytes:
    """Return the key; UsageError without one."""
    wrong = key_problem()
    if wrong is not None:
        raise UsageError(f"{wrong[0]}: type {wrong[1]} and give it to every host.")
    return os.environ[KEY].encode()


def key_problem() -> tuple[str, str] | None:
    """Return what is wrong with the key, and what to type; None = nothing."""
    if len(os.environ.get(KEY, "")) >= SHORTEST:
        return None
    reason = f"{KEY} must hold the key that keepers and runs share, at least {SHORTEST} characters"
    return reason, f"`export {KEY}=$(openssl rand -hex 16)`"


def address(text: str) -> tuple[str, int]:
    """Return host and port of `host:port`; ValueError if it is anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise ValueError(f"{text!r} isn't host:port")
    return host, int(port)


def limit_silence(one: socket.socket) -> None:
    """Let reads and writes fail after `SILENCE_S`; a Connection, which works on the descriptor, heeds it as well."""
    one.settimeout(None)
    span = struct.pack("ll", int(SILENCE_S), 0)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@contextmanager
def connected(peer: str) -> Iterator[Connection]:
    """Open a connection to a keeper, both having proven the key.

    Raises:
        PeerError: it can't be reached, falls silent, or has another key; also for what fails inside of the block.
    """
    try:
        one = socket.create_connection(address(peer), CONNECT_S)
        limit_silence(one)
        with Connection(one.detach()) as connection:
            answer_challenge(connection, key())
            deliver_challenge(connection, key())
            yield connection
    except AuthenticationError as error:
        raise PeerError(f"the keeper at {peer} has another {KEY}") from error
    except (OSError, EOFError, ValueError) as error:
        raise PeerError(f"the keeper at {peer} can't be reached ({type(error).__name__}: {error})") from error


def tell(connection: Connection, message: Mapping[str, Any]) -> None:
    """Send a message."""
    connection.send_bytes(json.dumps(message).encode())


def hear(connection: Connection) -> dict[str, Any]:
    """Receive a message; ValueError if it is none."""
    message = json.loads(connection.recv_bytes())
    if not isinstance(message, dict):
        raise ValueError("a message must be a JSON object")
    return message


def ask(connection: Connection, peer: str, **message: Any) -> dict[str, Any]:
    """Send a request and return the answer; PeerError if it is a refusal."""
    tell(connection, message)
    return answer_of(connection, peer)


def answer_of(connection: Connection, peer: str) -> dict[str, Any]:
    """Receive an answer; PeerError if it is a refusal."""
    answer = hear(connection)
    if "refused" in answer:
        raise PeerError(f"the keeper at {peer} refused: {answer['refused']}")
    return answer


def send_file(connection: Connection, path: Path, size: int) -> None:
    """Send `size` bytes of a file; OSError if it has fewer."""
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(CHUNK, size)))
        while size:
            got = file.readinto(buffer[: min(CHUNK, size)])
            if not got:
                raise OSError(f"{path.name} became shorter while it was sent")
            connection.send_bytes(buffer[:got])
            size -= got


def receive_file(connection: Connection, path: Path, size: int) -> None:
    """Receive `size` bytes into a new file; OSError if there is no room, ValueError if too much comes."""
    buffer = bytearray(min(CHUNK, size))
    with path.open("wb", buffering=0) as file:
        while size:
            got = connection.recv_bytes_into(buffer)
            if got > size:
                raise ValueError(f"{path.name} is longer than was said")
            written = 0
            while written < got:
                written += file.write(memoryview(buffer)[written:got])
            size -= got
