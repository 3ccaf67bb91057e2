"""The progress display, on a terminal and without one."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from framework import progress
from framework.plan import BatchSpec, RunPlan
from framework.progress import Progress, total_steps
from framework.report import Report


class Half(LightningModule):
    """Loss 0.5 everywhere."""

    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.fail = fail

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if self.fail and batch_idx == 5:
            raise ValueError("boom")
        loss = self.layer(batch.view(-1, 1)).sum() * 0 + 0.5
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", torch.tensor(0.25))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(run_dir: Path, console: Console, *, fail: bool = False, **settings: Any) -> Trainer:
    """Train one epoch of 12 samples in 6 optimizer steps of 2 batches."""
    report = Report(RunPlan(run_id="r", run_dir=str(run_dir), batch=BatchSpec(2, 1, 1, 2)))
    trainer = Trainer(
        accelerator="cpu", accumulate_grad_batches=2, log_every_n_steps=1, logger=False,
        callbacks=[report, Progress(report, console)], enable_model_summary=False, enable_checkpointing=False,
        num_sanity_val_steps=1, **{"max_epochs": 1, **settings},
    )  # fmt: skip
    loader: DataLoader[Any] = DataLoader(torch.arange(12.0), batch_size=1)  # type: ignore[arg-type]
    trainer.fit(Half(fail), loader, loader)
    return trainer


def test_without_a_terminal_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    out = io.StringIO()
    fit(tmp_path, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 1/6  loss 0.5000"
    assert re.fullmatch(r"step 3/6  loss 0\.5000  [\d,]+ samples/s  0:00 left", lines[2])
    assert [int(line.split("/")[0][5:]) for line in lines] == [1, 2, 3, 4, 5, 6, 6]
    assert re.fullmatch(r"step 6/6  loss 0\.5000  val 0\.2500  [\d,]+ samples/s  0:00 left", lines[-1])
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out.getvalue())


def test_without_a_terminal_a_line_only_every_few_seconds(tmp_path: Path) -> None:
    out = io.StringIO()
    fit(tmp_path, Console(file=out, width=80))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/6", "6/6"]


def test_on_a_terminal_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW_EVERY_S", 0.0)
    out = io.StringIO()
    fit(tmp_path, Console(file=out, width=100, force_terminal=True, color_system=None))
    frames = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "0/6" in frames
    assert re.search(r"train ━+ 6/6 loss 0\.5000  val 0\.2500  [\d,]+ samples/s", frames)
    assert out.getvalue().rstrip().endswith("\x1b[?25h"), "the cursor must be shown again"


def test_a_failure_gives_the_terminal_back(tmp_path: Path) -> None:
    out = io.StringIO()
    with pytest.raises(ValueError, match="boom"):
        fit(tmp_path, Console(file=out, width=100, force_terminal=True), fail=True)
    assert out.getvalue().rstrip().endswith("\x1b[?25h")


def test_disabled_shows_nothing(tmp_path: Path) -> None:
    out = io.StringIO()
    report = Report(RunPlan(run_id="r", run_dir=str(tmp_path)))
    bar = Progress(report, Console(file=out))
    bar.disable()
    trainer = Trainer(max_epochs=1, logger=False, callbacks=[report, bar], enable_model_summary=False,
                      enable_checkpointing=False, accelerator="cpu")  # fmt: skip
    trainer.fit(Half(), DataLoader(torch.arange(12.0), batch_size=1))  # type: ignore[arg-type]
    assert not out.getvalue()


@pytest.mark.parametrize(
    ("settings", "expected"), [({"max_epochs": 2}, 12), ({"max_epochs": -1, "max_steps": 3}, 3), ({"max_steps": 7}, 6)]
)
def test_total_steps(tmp_path: Path, settings: dict[str, int], expected: int) -> None:
    assert total_steps(fit(tmp_path, Console(file=io.StringIO()), **settings)) == expected
