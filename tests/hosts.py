"""Hosts on one machine: each a network namespace with processes and a memory file system of its own.

Ending a host ends all its processes at once, and what lay in its memory is gone. They share the disk, as hosts of a
cluster do. Needs the right to make namespaces (root).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

LINK = "link0"
ROOT = Path(__file__).resolve().parent.parent


def why_not() -> str | None:
    """Return why hosts can't be made here, None if they can."""
    try:
        words = ["unshare", "-n", "-m", "-p", "-f", "ip", "link", "set", "lo", "up"]
        tried = subprocess.run(words, check=False, capture_output=True, timeout=20)
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    return None if tried.returncode == 0 else tried.stderr.decode().strip()


class Host:
    """One host; a context manager.

    Args:
        number: from 1; its address is 10.77.0.<number>.
        folder: for the output of its processes.
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.address = f"10.77.0.{number}"
        self._folder = folder
        self._runs: list[subprocess.Popen[bytes]] = []
        inside = "mount -t tmpfs -o size=1g tmpfs /dev/shm && echo up && exec sleep infinity"
        with (folder / f"host-{number}").open("ab") as complaints:
            self._first = subprocess.Popen(
                ["unshare", "-n", "-m", "-p", "-f", "--mount-proc", "--kill-child", "sh", "-c", inside],
                stdout=subprocess.PIPE, stderr=complaints,
            )  # fmt: skip
        assert self._first.stdout is not None
        assert self._first.stdout.readline() == b"up\n"
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()
        self.pid = int(children[0])

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def start(self, name: str, words: Sequence[str], **env: str) -> subprocess.Popen[bytes]:
        """Start a process on this host; what it prints goes to a file of that name."""
        with (self._folder / name).open("ab") as output:
            process = subprocess.Popen(
                ["nsenter", "-t", str(self.pid), "-n", "-m", "-p", *words],
                stdout=output, stderr=subprocess.STDOUT, cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LINK, **env},
            )  # fmt: skip
        self._runs.append(process)
        return process

    def python(self, name: str, *words: str, **env: str) -> subprocess.Popen[bytes]:
        """Start Python on this host."""
        return self.start(name, [sys.executable, *words], **env)

    def said(self, name: str) -> str:
        """Return what the process of that name has printed so far."""
        return (self._folder / name).read_text(errors="replace")

    def shell(self, command: str) -> str:
        """Run a command on this host and return what it prints."""
        words = ["nsenter", "-t", str(self.pid), "-n", "-m", "-p", "sh", "-c", command]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout

    def destroy(self) -> None:
        """End it whole: every process, the network, and what was in its memory."""
        if self._first.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        for process in (self._first, *self._runs):
            process.wait(30)
        assert self._first.stdout is not None
        self._first.stdout.close()


def connect(one: Host, other: Host) -> None:
    """Lay a cable between two hosts; it is gone with either."""
    for host in (one, other):  # the end of a cable to a host that died may still hang there for a moment
        host.shell(f"ip link del {LINK} 2>/dev/null || true")
    subprocess.run(
        ["ip", "link", "add", "name", LINK, "netns", str(one.pid), "type", "veth", "peer", "name", LINK, "netns",
         str(other.pid)],
        check=True, timeout=30,
    )  # fmt: skip
    for host in (one, other):
        host.shell(f"ip link set lo up; ip addr replace {host.address}/24 dev {LINK}; ip link set {LINK} up")


def wait_for(condition: object, limit_s: float, what: str) -> None:
    """Wait until `condition()` is true; AssertionError with `what` after the limit."""
    assert callable(condition)
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)
