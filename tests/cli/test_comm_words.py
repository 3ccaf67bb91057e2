"""P42 and P43 as typed: bad values end the command at once, with variable, value and what this host has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typing_in import Done, typing_in

Typed = Callable[..., Done]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    def run(*words: str, **exported: str) -> Done:
        command = ["plan", "model=mlp", "data=digits", *words, f"run_dir={tmp_path / 'run'}"]
        return typing_in(tmp_path, monkeypatch, capsys, command, **exported)

    return run


@pytest.mark.parametrize("value", ["nosuch0", "^lo", "127.0.0.1", "lo,nosuch0"])
def test_p42_a_bad_interface_in_the_shell(typed: Typed, tmp_path: Path, value: str) -> None:
    done = typed(GLOO_SOCKET_IFNAME=value)
    assert done.code == 2
    assert f"GLOO_SOCKET_IFNAME={value} (exported in your shell)" in done.err
    assert "this host has lo (127.0.0.1)" in done.err
    assert not (tmp_path / "run").exists()


def test_all_that_is_wrong_at_once(typed: Typed) -> None:
    words = ("comm=ring", "comm.interface=nosuch0", "comm.env.NCCL_NTHREADS=100", "+comm.env.NCCL_ALGOS=Ring")
    done = typed(*words, NCCL_TIMEOUT="15")
    assert done.code == 2
    for expected in (
        "comm.interface=nosuch0", "comm.env.NCCL_NTHREADS=100", "Type comm.env.NCCL_ALGO.",
        "Type `unset NCCL_TIMEOUT` and timeout_s=15.",
    ):  # fmt: skip
        assert expected in done.err


@pytest.mark.parametrize("word", ["timeout_s=-1", "timeout_s=abc", "comm.timeout_s=0"])
def test_p43_bad_time_limits(typed: Typed, word: str) -> None:
    done = typed(word)
    assert done.code == 2
    assert "timeout_s" in done.err


def test_what_is_in_effect_is_shown(typed: Typed) -> None:
    done = typed("comm=ring", NCCL_ALGO="Tree", NCCL_DEBUG="WARN")
    assert done.code == 0, done.err
    for expected in ("NCCL_ALGO=Tree (exported, instead of Ring)", "NCCL_DEBUG=WARN (exported)", "NCCL_NTHREADS=256"):
        assert expected in done.out


def test_debug_has_a_longer_time_limit_unless_one_is_typed() -> None:
    from framework.compose import compose

    words = ["model=mlp", "data=digits", "trainer.max_steps=1", "comm=debug"]
    assert compose(words, model=False).timeout_s == 7200.0
    assert compose([*words, "timeout_s=15"], model=False).timeout_s == 15.0
    assert compose([*words[:-1], "comm=none"], model=False).timeout_s == 1800.0
