"""Typing a command without starting a process for it: importing torch takes most of what such a command costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from framework import cli


@dataclass(frozen=True)
class Done:
    """Exit code and what was printed."""

    code: int
    out: str
    err: str


def typing_in(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: Sequence[str],
    **exported: str,
) -> Done:
    """Run `python -m framework WORDS` in this process, with `folder` as the current one and variables exported.

    For commands that start no workers; what a command leaves in this process (imported modules) stays there.
    """
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        for name, value in exported.items():
            patch.setenv(name, value)
        capsys.readouterr()
        code = cli.main(list(words))
    return Done(code, *capsys.readouterr())
