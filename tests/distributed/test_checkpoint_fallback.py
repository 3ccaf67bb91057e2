"""Rotten storage under a real run: the newest good checkpoint is used instead, never step 0 in silence (P17)."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import kills
import pytest

from framework import checkpoint_files as files
from framework.launch import RunResult, prewarm
from framework.plan import RunPlan

MORE = 10


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps, with the checkpoints of steps 6 and 8."""
    prewarm()
    folder = tmp_path_factory.mktemp("finished")
    result = kills.run(kills.plan_of("ddp 2", folder))
    assert result.status == "finished", result.describe()
    assert {path.name for path in files.folder_of(folder).iterdir()} == {"step-000006", "step-000008", files.LAST}
    return folder


def go_on(finished: Path, folder: Path, start: str, rotten: list[int]) -> tuple[RunResult, RunPlan]:
    """Copy the run, turn a byte of the tensors of some checkpoints, and go on to step ten."""
    shutil.copytree(finished, folder, symlinks=True)
    for step in rotten:
        shard = files.folder_of(folder) / files.step_name(step) / "rank-00000.safetensors"
        content = bytearray(shard.read_bytes())
        content[-9] ^= 4
        shard.write_bytes(content)
    plan = kills.plan_of("ddp 2", folder, (), f"ckpt_path={start}", "recovery.max_restarts=0")
    plan = plan.with_(trainer={**plan.trainer, "max_steps": MORE})
    return kills.run(plan), plan


def test_the_newest_good_one_is_used_instead(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result, _ = go_on(finished, folder, "last", [8])
    assert result.status == "finished", result.describe()
    undisturbed = tmp_path / "whole"
    assert go_on(finished, undisturbed, "last", [])[0].status == "finished"
    newest = [files.folder_of(run) / files.step_name(MORE) for run in (folder, undisturbed)]
    assert kills.difference(*map(kills.weights_of, newest)) == 0.0
    assert files.is_complete(files.folder_of(folder) / files.step_name(8)), "made again"
    facts = json.loads((folder / "worker_summary.json").read_text())
    assert (facts["start_step"], Path(facts["resumed_from"]).name) == (6, "step-000006")
    segments = kills.history.read(folder)
    story, findings = kills.history.history(folder, segments)
    assert [*findings, *kills.history.check(story)] == []
    assert len(story.steps) == MORE


def test_without_a_good_one_the_run_ends_and_nothing_is_deleted(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result, _ = go_on(finished, folder, "last", [6, 8])
    assert result.status == "failed"
    assert re.search(r"none is complete \(.*step-000006 .*step-000008 .*Nothing was deleted", result.reason, re.DOTALL)
    for step in (6, 8):
        path = files.folder_of(folder) / files.step_name(step)
        assert (path / "rank-00000.safetensors").exists()
        why = json.loads((path / files.DAMAGE).read_text())["why"]
        assert "in rank-00000.safetensors aren't those that were written" in why
    assert not (files.folder_of(folder) / files.step_name(2)).exists(), "it didn't begin anew"


def test_the_one_that_was_asked_for_by_name_is_refused(finished: Path, tmp_path: Path) -> None:
    path = files.folder_of(tmp_path / "run") / files.step_name(8)
    result, _ = go_on(finished, tmp_path / "run", str(path), [8])
    assert result.status == "failed"
    assert "step-000008 is damaged: the bytes of " in result.describe()
    assert not (path / files.DAMAGE).exists()
