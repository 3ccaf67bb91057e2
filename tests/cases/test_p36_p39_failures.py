"""P36, P37, P39 and the crash of P13 with the real Trainer: what is lost when a rank fails or is asked to stop."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from framework import testing
from framework.checkpoint_files import newest_complete
from framework.launch import RunResult, launch, prewarm


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    prewarm()


def run(
    folder: Path, *overrides: str, epochs: int = 1, trouble: dict[str, Any] | None = None, model: str = "Tiny"
) -> RunResult:
    """Train 6 steps an epoch, of 2 samples, on 2 ranks; each epoch shows each of the 12 samples once."""
    folder.mkdir(exist_ok=True)
    plan = testing.plan(
        "+strategy=ddp", "devices=2", "global_batch_size=2", "threads=1", "timeout_s=60", "logger=[]",
        f"trainer.max_epochs={epochs}",
        "trainer.enable_progress_bar=false", "checkpoint.every_n_steps=2", "checkpoint.save_top_k=-1",
        f"model._target_=failing_runs.{model}", f'model.folder="{folder}"',
        "data._target_=failing_runs.NumberedData", f"run_dir={folder}", *overrides,
    )  # fmt: skip
    if trouble is not None:
        callbacks = {"trouble": {"_target_": "failing_runs.Trouble", **trouble}}
        plan = plan.with_(components={**plan.components, "callbacks": callbacks})
    return launch(plan)


def trained(folder: Path) -> list[dict[str, Any]]:
    """Return what the ranks noted about each of their steps."""
    return [json.loads(line) for path in folder.glob("ids_*.jsonl") for line in path.read_text().splitlines()]


def ids(entries: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of all samples in `entries`, sorted."""
    return sorted(number for entry in entries for number in entry["ids"])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["setup", "train", "worker", "teardown"])
def test_p36_the_first_failure_is_the_headline(tmp_path: Path, where: str, rank: int) -> None:
    if where == "worker":
        more = ["data.workers=1", "data.broken=3", f"data.broken_on={rank}"]
        begin, result = time.monotonic(), run(tmp_path, "recovery=none", *more)
    else:
        trouble = {"rank": rank, "where": where, "step": 2}
        begin, result = time.monotonic(), run(tmp_path, "recovery=none", trouble=trouble)
    assert time.monotonic() - begin < 60
    assert result.exit_code == 1
    text = result.describe()
    assert text.startswith(f"Rank {rank} failed: ValueError: ")
    assert "boom7" in text
    assert "boom7" in (tmp_path / "errors" / f"rank_{rank}.json").read_text()


def test_p36_a_passing_error_is_survived(tmp_path: Path) -> None:
    result = run(tmp_path, trouble={"rank": 1, "where": "train", "step": 3})
    assert (result.status, result.restarts) == ("finished", 1)
    assert result.resumed_from == str(tmp_path / "checkpoints" / "step-000002")


@pytest.mark.parametrize(("where", "step"), [("train", 3), ("save", 2), ("validation", 3)])
def test_p37_a_signal_to_one_rank_stops_all_at_one_step(tmp_path: Path, where: str, step: int) -> None:
    trouble = {"rank": 1, "where": where, "step": step, "what": "SIGTERM"}
    result = run(tmp_path, "trainer.val_check_interval=3", trouble=trouble)
    assert (result.status, result.exit_code) == ("preempted", 75), result.describe()
    newest = newest_complete(tmp_path)
    assert newest is not None
    assert str(newest.path) in result.reason
    assert newest.step == {"train": 4, "save": 3, "validation": 3}[where]
    first = trained(tmp_path)
    assert {entry["step"] for entry in first} == set(range(newest.step))

    again = run(tmp_path, "ckpt_path=last")
    assert again.status == "finished"
    assert again.resumed_from == newest.path
    later = trained(tmp_path)
    assert {entry["step"] for entry in later} == set(range(6))
    assert ids(later) == list(range(12)), "each sample once over both runs"


def test_p37_with_manual_optimization(tmp_path: Path) -> None:
    trouble = {"rank": 1, "where": "train", "step": 3, "what": "SIGTERM"}
    result = run(tmp_path, model="ManualTiny", trouble=trouble)
    assert (result.status, result.exit_code) == ("preempted", 75), result.describe()
    assert {entry["step"] for entry in trained(tmp_path)} == {0, 1, 2, 3}
    newest = newest_complete(tmp_path)
    assert newest is not None
    assert newest.step == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_p39_p13_a_killed_rank_loses_nothing(tmp_path: Path, workers: int, caplog: Any) -> None:
    assert run(tmp_path / "other", "trainer.max_steps=2", epochs=2).status == "finished"
    begin = tmp_path / "other" / "checkpoints" / "step-000002"
    folder = tmp_path / "run"
    result = run(
        folder, f"data.workers={workers}", f'ckpt_path="{begin}"', epochs=2,
        trouble={"rank": 1, "where": "train", "step": 7, "what": "SIGKILL"},
    )  # fmt: skip
    assert (result.status, result.restarts) == ("finished", 1)
    assert result.resumed_from == str(folder / "checkpoints" / "step-000006")
    lines = [record.message for record in caplog.records if "Restart 1 begins from" in record.message]
    assert len(lines) == 1
    assert "step-000006 (step 6, tier disk, found in " in lines[0]
    assert "the newest complete checkpoint of this run" in lines[0]
    kept = [entry for entry in trained(folder) if entry["attempt"] == 1 or entry["step"] < 6]
    assert {entry["step"] for entry in kept} == set(range(2, 12))
    before = [entry for entry in trained(tmp_path / "other") if entry["step"] < 2]
    first_epoch = before + [entry for entry in kept if entry["step"] < 6]
    assert ids(first_epoch) == list(range(12))
    assert ids([entry for entry in kept if entry["step"] >= 6]) == list(range(12))
