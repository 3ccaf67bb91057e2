"""Checkpoints in this host's memory: newer than those on disk, and what a restart begins from."""

from __future__ import annotations

import shutil
from pathlib import Path

import kills
import pytest

from framework import checkpoint_files as files
from framework.checkpoint_files import CheckpointError
from framework.launch import prewarm
from framework.plan import Checkpoint, RunPlan
from framework_plugins.checkpoint import memory, tiers
from framework_plugins.checkpoint.dcp import DCP


def save(root: Path, step: int) -> Path:
    """Make a small checkpoint."""
    final = files.folder_of(root) / files.step_name(step)
    temporary = final.with_name(f".{final.name}.tmp")
    temporary.mkdir(parents=True)
    (temporary / "rank-00000.safetensors").write_bytes(b"x")
    files.commit(temporary, final, step, world_size=1)
    return final


def newest(run: Path, shm: str) -> Checkpoint | None:
    return tiers.newest(str(run), DCP(memory_dir=shm))


def test_the_newest_of_both_tiers_counts(tmp_path: Path) -> None:
    run, shm = tmp_path / "run", str(tmp_path / "shm")
    assert newest(run, shm) is None
    save(run, 4)
    assert newest(run, shm).tier == "disk"  # type: ignore[union-attr]
    in_memory = save(memory.make(str(run), shm), 6)
    found = newest(run, shm)
    assert found is not None
    assert (found.step, found.tier, found.path) == (6, "memory", str(in_memory))
    save(run, 2)  # the run was gone back to an older one: what is saved last counts, whatever its step
    assert newest(run, shm).step == 2  # type: ignore[union-attr]


def test_a_damaged_one_in_memory_leaves_the_disk_and_the_other_way_round(tmp_path: Path) -> None:
    run, shm = tmp_path / "run", str(tmp_path / "shm")
    on_disk = save(run, 4)
    in_memory = save(memory.make(str(run), shm), 6)
    (in_memory / files.META).unlink()
    assert newest(run, shm).step == 4  # type: ignore[union-attr]
    (on_disk / files.META).unlink()
    with pytest.raises(CheckpointError, match="none is complete"):
        newest(run, shm)


def test_a_run_finds_its_own_and_no_other(tmp_path: Path) -> None:
    run, shm = tmp_path / "run", str(tmp_path / "shm")
    run.mkdir()
    save(memory.make(str(run), shm), 6)
    assert memory.make(str(run), shm).stat().st_mode & 0o077 == 0, "nobody else's business"
    assert newest(run, shm).step == 6  # type: ignore[union-attr]
    shutil.rmtree(run)
    run.mkdir()
    assert newest(run, shm) is None, "another run that is called the same"
    (run / memory.NOTE).write_text("../../etc")
    assert memory.root_of(str(run), shm) is None
    assert DCP().newest_complete(RunPlan(run_id="r", run_dir=str(run))) is None


def test_a_killed_run_goes_on_from_memory(tmp_path: Path) -> None:
    prewarm()
    run, shm = tmp_path / "run", tmp_path / "shm"
    words = ("checkpoint.memory_every_n_steps=1", f"checkpoint.memory_dir={shm}")
    kill = {"attempt": 0, "rank": 1, "moment": "step", "step": 5, "delay_s": 0.0}
    result = kills.run(kills.plan_of("fsdp 2", run, [kill], *words, "checkpoint.mode=sync"))
    assert (result.status, result.restarts) == ("finished", 1), result.describe()
    assert result.resumed_from is not None
    assert Path(result.resumed_from).is_relative_to(shm)
    assert Path(result.resumed_from).name == files.step_name(5)
    undisturbed = tmp_path / "undisturbed"
    assert kills.run(kills.plan_of("fsdp 2", undisturbed)).status == "finished"
    assert kills.difference(kills.final_weights(run), kills.final_weights(undisturbed)) == 0.0
    assert kills.ledger(run) == ([], kills.ledger(undisturbed)[1])
    assert not list(shm.iterdir()), "the run is done: the memory is given back"
