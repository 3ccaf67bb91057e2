"""Big files go past the page cache where the file system can, and hold the same bytes where it can't."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from framework_plugins.checkpoint import uncached
from framework_plugins.checkpoint.uncached import BUFFER, DIRECT, UncachedFile

SIZES = [0, 1, BUFFER - 1, BUFFER, BUFFER + 4097, 3 * BUFFER]


def is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & DIRECT)


def content(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + bytes(range(size % 251))


def write(path: Path, size: int) -> None:
    left = memoryview(content(size))
    with UncachedFile(path) as file:
        for step in (1, 4095, 1 << 20):
            file.write(left[:step])
            left = left[step:]
        file.write(left)


def refused(kind: int) -> OSError:
    return OSError(kind, os.strerror(kind))


@pytest.fixture
def direct(tmp_path: Path) -> bool:
    """Whether this file system can."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("size", SIZES)
def test_whole_buffers_go_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, direct: bool
) -> None:
    written: list[tuple[bool, int]] = []
    real = os.write

    def noted(file: int, part: Any) -> int:
        written.append((is_direct(file), len(part)))
        return real(file, part)

    monkeypatch.setattr(uncached.os, "write", noted)
    write(tmp_path / "x", size)
    assert (tmp_path / "x").read_bytes() == content(size)
    rest = [(False, size % BUFFER)] if size % BUFFER else []
    assert written == [(direct, BUFFER)] * (size // BUFFER) + rest


@pytest.mark.parametrize("size", SIZES)
def test_a_file_system_that_opens_no_such_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    real = os.open

    def opened(path: Any, flags: int, *mode: int) -> int:
        if flags & DIRECT:
            raise refused(errno.EINVAL)
        return real(path, flags, *mode)

    monkeypatch.setattr(uncached.os, "open", opened)
    write(tmp_path / "x", size)
    assert (tmp_path / "x").read_bytes() == content(size)


def test_a_file_system_that_writes_part_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.write, [0]

    def some(file: int, part: Any) -> int:
        if is_direct(file):
            calls[0] += 1
            if len(part) % 4096:
                raise refused(errno.EINVAL)
            direct = fcntl.fcntl(file, fcntl.F_GETFL)
            fcntl.fcntl(file, fcntl.F_SETFL, direct & ~DIRECT)  # else this one refuses what it is asked to write
            done = real(file, part[:1000])
            fcntl.fcntl(file, fcntl.F_SETFL, direct)
            return done
        return real(file, part)

    monkeypatch.setattr(uncached.os, "write", some)
    write(tmp_path / "x", 2 * BUFFER + 5)
    assert (tmp_path / "x").read_bytes() == content(2 * BUFFER + 5)


@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EINVAL])
def test_what_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    before = set(os.listdir("/proc/self/fd"))

    def no(file: int, part: Any) -> int:
        raise refused(kind)

    monkeypatch.setattr(uncached.os, "write", no)
    with pytest.raises(OSError, match=os.strerror(kind)):
        write(tmp_path / "x", BUFFER + 1)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        UncachedFile(tmp_path / "no" / "x")


def test_an_error_inside_is_told_and_nothing_more_is_written(tmp_path: Path) -> None:
    def fail() -> None:
        with UncachedFile(tmp_path / "x") as file:
            file.write(memoryview(b"abc"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (tmp_path / "x").read_bytes() == b""
