"""What `Report` measures, and what the launcher makes of it, on Lightning's own Trainer in one process."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from plans import make_plan
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, Dataset
from user_modules import Mlp

import framework
from framework.curves import draw_loss, read_table
from framework.plan import BatchSpec, MeshSpec, RunPlan
from framework.progress import Progress
from framework.report import Report
from framework.summary import end_table, finish_summary, read_summary, short, sweep_table, write_summary
from framework_plugins.logger.csv import Csv

PROMISED = {
    "status", "steps", "world_size", "mesh", "loss_first", "loss_last", "val_loss", "tokens_per_second", "step_ms_p50",
    "peak_rss_mb", "params", "params_per_rank", "resumed_from", "restarts",
}  # fmt: skip


class Counting(LightningModule):
    """Loss is the number of training batches seen so far, so that every logged value is known in advance."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.fail_at = fail_at
        self.seen = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.seen += 1
        if self.seen == self.fail_at:
            raise ValueError("boom")
        loss = self.layer(batch.view(-1, 1)).sum() * 0 + self.seen
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", torch.tensor(0.5 + self.seen))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


def fit(
    run_dir: Path, module: Counting, epochs: int, *, ckpt_path: str | None = None, callbacks: Sequence[Callback] = ()
) -> tuple[Trainer, RunPlan]:
    """Train on 8 samples an epoch, batch 1, accumulation 4: 2 optimizer steps an epoch (case P41)."""
    plan = RunPlan(run_id="r", run_dir=str(run_dir), batch=BatchSpec(4, 1, 1, 4))
    trainer = Trainer(
        accelerator="cpu", max_epochs=epochs, accumulate_grad_batches=4, log_every_n_steps=1,
        logger=[Csv(str(run_dir))], callbacks=[*callbacks, Report(plan)], enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0, use_distributed_sampler=False,
        default_root_dir=str(run_dir),
    )  # fmt: skip
    loader: DataLoader[Any] = DataLoader(torch.arange(8.0), batch_size=1)  # type: ignore[arg-type]
    trainer.fit(module, loader, loader, ckpt_path=ckpt_path, weights_only=False)
    return trainer, plan


def test_p41_one_step_axis_over_accumulation_and_resume(tmp_path: Path) -> None:
    trainer, _ = fit(tmp_path, Counting(), 2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    fit(tmp_path, Counting(), 3, ckpt_path=str(tmp_path / "two.ckpt"))
    rows = read_table(tmp_path / "metrics.csv")
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [int(row["samples"]) for row in rows] == [4, 8, 12, 16, 20, 24]
    assert [float(row["train_loss"]) for row in rows] == [4, 8, 12, 16, 20, 24]
    assert [float(row["val_loss"]) for row in rows if "val_loss" in row] == [8.5, 16.5, 24.5]
    summary = read_summary(tmp_path / "worker_summary.json")
    assert summary["resumed_from"].endswith("two.ckpt")
    assert (summary["start_step"], summary["steps"], summary["samples"]) == (4, 6, 24)
    assert (summary["loss_first"], summary["loss_first_step"], summary["loss_last"]) == (4.0, 1, 24.0)


def test_steps_done_again_after_a_crash_replace_their_rows(tmp_path: Path) -> None:
    trainer, _ = fit(tmp_path, Counting(), 1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(ValueError, match="boom"):
        fit(tmp_path, Counting(fail_at=16), 9, ckpt_path=str(tmp_path / "one.ckpt"))
    assert [row["step"] for row in read_table(tmp_path / "metrics.csv")] == ["1", "2", "3"]
    half = (tmp_path / "metrics.csv").read_text() + "4,1"
    (tmp_path / "metrics.csv").write_text(half)
    fit(tmp_path, Counting(), 2, ckpt_path=str(tmp_path / "one.ckpt"))
    assert [float(row["train_loss"]) for row in read_table(tmp_path / "metrics.csv")] == [4, 8, 12, 16]


def test_a_fresh_start_in_an_old_folder_begins_a_new_table(tmp_path: Path) -> None:
    fit(tmp_path, Counting(), 2)
    fit(tmp_path, Counting(), 1)
    assert [row["step"] for row in read_table(tmp_path / "metrics.csv")] == ["1", "2"]
    assert read_summary(tmp_path / "worker_summary.json")["start_step"] == 0


class FakeWindow(Callback):
    """What `framework.window.Window` would know: 28 tokens and loss 3 in each optimizer step of 4 batches."""

    def __init__(self, weighted: bool) -> None:
        self.counted = 0.0
        self.weighted = weighted
        self.loss: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.strategy.window = self  # type: ignore[attr-defined]

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.counted += 28 if self.weighted else 4
        self.loss = 3.0


def test_rates_count_weights_or_samples(tmp_path: Path) -> None:
    fit(tmp_path / "tokens", Counting(), 3, callbacks=[FakeWindow(True)])
    tokens = read_summary(tmp_path / "tokens" / "worker_summary.json")
    # The first step is warm-up: 5 steps of 4 samples and 28 tokens are timed.
    assert tokens["tokens_per_second"] / tokens["samples_per_second"] == pytest.approx(7)
    assert tokens["loss_first"] == tokens["loss_last"] == 3.0
    fit(tmp_path / "samples", Counting(), 3, callbacks=[FakeWindow(False)])
    samples = read_summary(tmp_path / "samples" / "worker_summary.json")
    assert samples["tokens_per_second"] is None
    assert samples["samples_per_second"] > 0


def test_a_failed_run_keeps_its_figures(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="boom"):
        fit(tmp_path, Counting(fail_at=10), 9)
    plan = RunPlan(run_id="r", run_dir=str(tmp_path))
    summary = finish_summary(plan, "failed", restarts=1, error="rank 0: ValueError: boom")
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["finished"], summary["loss_last"]) == ("failed", 2, False, 8.0)
    assert summary["val_loss"] == 8.5


def test_summary_has_the_promised_keys(tmp_path: Path) -> None:
    _, plan = fit(tmp_path, Counting(), 1)
    summary = finish_summary(plan, "finished")
    promised = (
        "status steps world_size mesh loss_first loss_last val_loss tokens_per_second step_ms_p50 peak_rss_mb params"
    )
    assert set((promised + " params_per_rank resumed_from restarts").split()) <= set(summary)
    assert (summary["params"], summary["params_per_rank"], summary["world_size"]) == (2, [2], 1)
    assert 50 < summary["peak_rss_mb"][0] < 10_000
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    nothing = finish_summary(RunPlan(run_id="x", run_dir=str(tmp_path / "none")), "failed", error="no worker started")
    assert set(nothing) >= PROMISED
    assert not (tmp_path / "none" / "loss.png").exists()


def test_numbers_without_a_json_word_are_text(tmp_path: Path) -> None:
    write_summary(tmp_path / "s.json", {"loss": math.nan, "list": [math.inf, 1.0]})
    assert json.loads((tmp_path / "s.json").read_text(), parse_constant=pytest.fail) == {
        "loss": "nan",
        "list": ["inf", 1.0],
    }


def test_no_curve_no_picture(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,samples,lr\n1,4,0.1\n")
    assert not draw_loss(tmp_path / "metrics.csv", tmp_path / "loss.png")
    assert list(tmp_path.iterdir()) == [tmp_path / "metrics.csv"]


def test_end_table(tmp_path: Path) -> None:
    plan = RunPlan(run_id="r", run_dir=str(tmp_path), mesh=MeshSpec(pp=2, dp_shard=2))
    (tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-6.part").mkdir()
    (tmp_path / "checkpoints" / "last").symlink_to("step-4")
    measured = {
        "steps": 1200, "loss_first": 5.5452, "loss_last": 1.75, "val_loss": 1.9, "tokens_per_second": 12345.6,
        "step_ms_p50": 81.3, "peak_rss_mb": [400.0, 401.0, 399.4, 402.0], "resumed_from": "/a/step-2",
    }  # fmt: skip
    write_summary(tmp_path / "worker_summary.json", measured)
    text = plain(end_table(finish_summary(plan, "finished", restarts=2, bigram_entropy=2.3456)))
    for told in (
        "finished after 1,200 steps, 2 restarts, resumed from step-2", "5.5452 first, 1.7500 last",
        "1.9000 (bigram entropy of that text 2.3456)", "12,346 tokens/s, 81.3 ms a step (median)",
        "400 401 399 402 MiB", "1, newest step-4",
    ):  # fmt: skip
        assert told in " ".join(text.split())


def test_a_folder_below_the_working_directory_is_named_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert short(str(tmp_path / "runs" / "a")) == "runs/a"
    assert short("/elsewhere/a") == "/elsewhere/a"


def test_sweep_table_shows_every_job_and_every_error() -> None:
    done = {"status": "finished", "world_size": 2, "loss_last": 2.0, "val_loss": 2.5, "tokens_per_second": 99.0}
    jobs = [
        {"status": "failed", "overrides": ["probe.raise=boomA"], "error": "rank 0: ValueError: boomA\nand more"},
        {**done, "overrides": ["strategy=fsdp", "pp=gpipe"], "peak_rss_mb": [300.2, 310.0]},
        {"status": "failed", "overrides": ["probe.raise=boomC"], "error": "boomC"},
    ]
    text = plain(sweep_table(jobs))
    assert "job 0 failed: rank 0: ValueError: boomA" in text
    assert "job 2 failed: boomC" in text
    row = next(line for line in text.splitlines() if "finished" in line)
    assert row.split() == ["1", "finished", "2", "2.0000", "2.5000", "99", "310", "strategy=fsdp"]
    assert "pp=gpipe" in text
    assert max(map(len, text.splitlines())) <= 80


def plain(renderable: Any) -> str:
    """Render as it is when the output isn't a terminal."""
    out = io.StringIO()
    Console(file=out, width=80).print(renderable)
    assert "\x1b" not in out.getvalue()
    return out.getvalue()


class Slow(Dataset[dict[str, torch.Tensor]]):
    """Takes its time over each sample."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)
        return {"x": torch.ones(4) * index, "y": torch.ones(4)}


class Thinks(Mlp):
    """Takes its time over each batch."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def training_step(self, batch: Any, index: int) -> Any:
        time.sleep(self.seconds)
        return super().training_step(batch, index)


def train_slowly(run_dir: str, reading_s: float, thinking_s: float) -> None:
    plan = make_plan(1, micro_batch_size=4, run_dir=run_dir, trainer={"limit_val_batches": 0})
    framework.Trainer(plan).fit(Thinks(thinking_s), DataLoader(Slow(reading_s)))


@pytest.mark.parametrize(("reading_s", "thinking_s", "least", "most"), [(0.05, 0.0, 0.7, 1.0), (0.0, 0.2, 0.0, 0.3)])
def test_waiting_for_data_is_measured(
    pool: Any, tmp_path: Path, reading_s: float, thinking_s: float, least: float, most: float
) -> None:
    pool.run(train_slowly, 1, str(tmp_path), reading_s, thinking_s, process_group=False)
    assert least <= read_summary(tmp_path / "worker_summary.json")["data_wait"] <= most


@pytest.mark.parametrize(("wait", "shown"), [(0.123, ["data wait 12%"]), (0.01, []), (None, [])])
def test_waiting_for_data_is_shown_where_it_matters(tmp_path: Path, wait: float | None, shown: list[str]) -> None:
    report = Report(RunPlan(run_id="r", run_dir=str(tmp_path)))
    report.data_wait = lambda: wait  # type: ignore[method-assign]
    assert Progress(report)._figures() == shown
