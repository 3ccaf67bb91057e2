"""P42 and P43 as typed: bad values end the command at once, with variable, value and what this host has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def typed(folder: Path, *words: str, **exported: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "framework",
        "plan",
        "model=mlp",
        "data=digits",
        *words,
        f"run_dir={folder / 'run'}",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **exported}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=folder, env=env)


@pytest.mark.parametrize("value", ["nosuch0", "^lo", "127.0.0.1", "lo,nosuch0"])
def test_p42_a_bad_interface_in_the_shell(tmp_path: Path, value: str) -> None:
    done = typed(tmp_path, GLOO_SOCKET_IFNAME=value)
    assert done.returncode == 2
    assert f"GLOO_SOCKET_IFNAME={value} (exported in your shell)" in done.stderr
    assert "this host has lo (127.0.0.1)" in done.stderr
    assert not (tmp_path / "run").exists()


def test_all_that_is_wrong_at_once(tmp_path: Path) -> None:
    words = ("comm=ring", "comm.interface=nosuch0", "comm.env.NCCL_NTHREADS=100", "+comm.env.NCCL_ALGOS=Ring")
    done = typed(tmp_path, *words, NCCL_TIMEOUT="15")
    assert done.returncode == 2
    for expected in (
        "comm.interface=nosuch0", "comm.env.NCCL_NTHREADS=100", "Type comm.env.NCCL_ALGO.",
        "Type `unset NCCL_TIMEOUT` and timeout_s=15.",
    ):  # fmt: skip
        assert expected in done.stderr


@pytest.mark.parametrize("word", ["timeout_s=-1", "timeout_s=abc", "comm.timeout_s=0"])
def test_p43_bad_time_limits(tmp_path: Path, word: str) -> None:
    done = typed(tmp_path, word)
    assert done.returncode == 2
    assert "timeout_s" in done.stderr


def test_what_is_in_effect_is_shown(tmp_path: Path) -> None:
    done = typed(tmp_path, "comm=ring", NCCL_ALGO="Tree", NCCL_DEBUG="WARN")
    assert done.returncode == 0, done.stderr
    for expected in ("NCCL_ALGO=Tree (exported, instead of Ring)", "NCCL_DEBUG=WARN (exported)", "NCCL_NTHREADS=256"):
        assert expected in done.stdout


def test_debug_has_a_longer_time_limit_unless_one_is_typed() -> None:
    from framework.compose import compose

    words = ["model=mlp", "data=digits", "trainer.max_steps=1", "comm=debug"]
    assert compose(words, model=False).timeout_s == 7200.0
    assert compose([*words, "timeout_s=15"], model=False).timeout_s == 15.0
    assert compose([*words[:-1], "comm=none"], model=False).timeout_s == 1800.0
