"""An unlisted skip fails the session; a listed one doesn't."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from skip_list import allowed_skips

FILES = ("conftest.py", "skip_list.py")
TESTS = """
import pytest
def test_runs(): pass
@pytest.mark.skip(reason="because")
def test_marked(): pass
def test_called(): pytest.skip("no way")
@pytest.mark.xfail(reason="known")
def test_expected(): assert False
"""
MODULE = "import pytest\npytest.importorskip('no_such_package')\n"


def run(folder: Path, listed: str, *, module: bool = False) -> subprocess.CompletedProcess[str]:
    for file in FILES:
        folder.joinpath(file).write_text((Path(__file__).parents[1] / file).read_text())
    folder.joinpath("skips.toml").write_text(listed)
    folder.joinpath("test_some.py").write_text(TESTS)
    if module:
        folder.joinpath("test_whole.py").write_text(MODULE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def entry(pattern: str) -> str:
    return f'[[skip]]\ntest = "{pattern}"\nreason = "it is so"\n'


def test_unlisted_skips_fail_the_session(tmp_path: Path) -> None:
    done = run(tmp_path, "", module=True)
    assert done.returncode == 1, done.stdout
    for expected in (
        "test_some.py::test_marked: Skipped: because",
        "test_called: Skipped: no way",
        "UNLISTED SKIP test_whole.py",
    ):
        assert expected in done.stdout
    assert "test_expected" not in done.stdout


def test_listed_skips_do_not(tmp_path: Path) -> None:
    done = run(tmp_path, entry("test_some.py::*") + entry("test_whole.py"), module=True)
    assert done.returncode == 0, done.stdout
    assert "UNLISTED" not in done.stdout


def test_one_of_two_is_listed(tmp_path: Path) -> None:
    done = run(tmp_path, entry("test_some.py::test_marked"))
    assert done.returncode == 1
    assert done.stdout.count("UNLISTED SKIP") == 1


def test_an_entry_needs_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "skips.toml"
    path.write_text('[[skip]]\ntest = "x"\n')
    with pytest.raises(pytest.UsageError, match="reason"):
        allowed_skips(path)
