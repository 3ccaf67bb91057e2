"""Every command of README.md is run, shortened: `plan` in the place of a long training, fewer steps in the others."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typing_in import typing_in

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["global_batch_size=8", "trainer.limit_val_batches=1", "threads=1"]
"""Added to every training that is really run."""

MY_PROJECT = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MyModule(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        for layer in self.layers:
            x = layer(x).tanh()
        loss = x.square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MyData(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(64, 4)))
"""


def commands(page: Path) -> list[tuple[str, int]]:
    """Return every command of the page's console blocks with the exit code that stands below it (0 if none does)."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], 0))
            elif line.startswith("? exit code "):
                found[-1] = (found[-1][0], int(line.rpartition(" ")[2]))
    return found


def shortened(command: str) -> list[str]:
    """Return what is run for `command`."""
    words = shlex.split(command)
    if words[0] == "make":
        return [*words, "--dry-run"]
    if words[:2] == ["python", "tools/bench.py"]:
        return [sys.executable, *words[1:], "--help"]
    assert words[:3] == ["python", "-m", "framework"], f"README shows a command that this test doesn't know: {command}"
    rest = words[3:]
    if (rest and rest[0] in ("plan", "plugins", "ledger", "export", "catalogue")) or "--help" in rest:
        return [sys.executable, "-m", "framework", *rest]
    if rest and rest[0] == "verify":
        return [sys.executable, "-m", "framework", *rest, "--steps", "2", "global_batch_size=8"]
    if "-m" in rest or any(word.startswith("run_dir=") for word in rest):
        rest = [re.sub(r"^(trainer\.max_steps=\d+)0$", r"\1", word) for word in rest]
        return [sys.executable, "-m", "framework", *rest, *SMALL]
    return [sys.executable, "-m", "framework", "plan", *rest]


COMMANDS = commands(ROOT / "README.md")
STORY = "runs/mine"
"""Marks the commands of which each goes on where the one before stopped: a test of their own."""
ALONE = [entry for entry in COMMANDS if STORY not in entry[0]]


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the shortened command; in `folder`, unless it belongs to the checkout."""
    at_root = command.startswith(("make", "python tools/"))
    return subprocess.run(
        shortened(command), cwd=ROOT if at_root else folder, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all commands, with a user's project in it."""
    made = tmp_path_factory.mktemp("readme")
    (made / "my_project.py").write_text(MY_PROJECT)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("command", "code"), ALONE, ids=[command for command, _ in ALONE])
def test_command(
    command: str, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shortened(command)
    if words[1:4] == ["-m", "framework", "plan"]:
        planned = typing_in(folder, monkeypatch, capsys, words[3:])
        got, out, err = planned.code, planned.out, planned.err
    else:
        done = run(command, folder)
        got, out, err = done.returncode, done.stdout, done.stderr
    assert got == code, f"{shlex.join(words)}\n{out[-3000:]}\n{err[-3000:]}"
    assert "\x1b" not in out, "there is no terminal: no control characters"


@pytest.mark.slow
def test_a_run_goes_on_under_another_mix(tmp_path: Path) -> None:
    said = ""
    for command in [command for command, _ in COMMANDS if STORY in command]:
        done = run(command, tmp_path)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        said += done.stdout
    summary = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 4)
    assert summary["resumed_from"]
    elsewhere = json.loads((tmp_path / "runs" / "mine-elsewhere" / "summary.json").read_text())
    assert (elsewhere["status"], elsewhere["steps"]) == ("finished", 5)
    assert "remote" in elsewhere["resumed_from"]
    assert "Nothing was trained twice, nothing was left out" in said
    assert list((tmp_path / "runs" / "mine" / "export-safetensors").iterdir())


def test_the_page_shows_every_command_and_flag_that_matters() -> None:
    text = " ".join(command for command, _ in COMMANDS)
    for word in (
        "make train",
        "make test",
        " plan ",
        "plugins",
        "--help",
        " -m ",
        "-cn",
        "ckpt_path=last",
        "_target_=",
    ):
        assert word in text


def test_links_and_pictures_exist() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http:", "https:")):
                assert (page.parent / target).exists(), f"{page.name} points to {target}, which isn't there"
