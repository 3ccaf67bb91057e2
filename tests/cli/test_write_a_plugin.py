"""docs/write_a_plugin.md is followed to the letter: its files in an empty folder, its commands in its order."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from test_readme import ROOT, SMALL, commands

PAGE = ROOT / "docs" / "write_a_plugin.md"


def files(page: Path) -> dict[str, str]:
    """Return the files that a page shows: name -> content."""
    blocks = re.findall(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.M)
    return dict(blocks)


def run(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
def test_from_an_empty_folder_to_a_running_option(tmp_path: Path) -> None:
    project, site = tmp_path / "project", tmp_path / "site"
    for name, content in files(PAGE).items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(content)
    # Installed beside this environment, not into it; what is there already isn't fetched again.
    environment = {**os.environ, "PYTHONPATH": str(site)}
    told = {}
    for command, _ in commands(PAGE):
        words = shlex.split(command)
        if words[:3] == ["python", "-m", "pip"]:
            words += ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(site)]
        elif "run_dir=" in command:
            words = [re.sub(r"max_steps=.*", "max_steps=3", word) for word in words] + SMALL
        told[command] = run(words, project, environment)
    text = "".join(told.values())
    assert "my-strategy 0.1.0" in text
    assert re.search(r"strategy +allreduce", text), "the start screen names the option"
    mine, theirs = (json.loads((project / "runs" / name / "summary.json").read_text()) for name in ("allreduce", "ddp"))
    assert mine["world_size"] == theirs["world_size"] == 2
    assert mine["loss_last"] == pytest.approx(theirs["loss_last"], rel=1e-5)
    assert mine["loss_last"] != mine["loss_first"]
