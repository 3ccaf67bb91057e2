"""Which directories count as checkpoints, and which one a run goes on from (P03, P17)."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest

from framework import checkpoint_files as files
from framework.checkpoint_files import CheckpointError


def save(run_dir: Path, step: int, content: bytes = b"x" * 100) -> Path:
    """Make a small checkpoint the way the store does."""
    final = files.folder_of(run_dir) / files.step_name(step)
    temporary = final.with_name(f".{final.name}.tmp")
    temporary.mkdir(parents=True)
    (temporary / "rank-00000.safetensors").write_bytes(content)
    files.commit(temporary, final, step, world_size=1)
    return final


def cut_in_half(path: Path) -> None:
    shard = path / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


def delete_mark(path: Path) -> None:
    (path / files.META).unlink()


def garble_mark(path: Path) -> None:
    (path / files.META).write_text('{"format": 1, "st')


def delete_shard(path: Path) -> None:
    (path / "rank-00000.safetensors").unlink()


DAMAGE = [cut_in_half, delete_mark, garble_mark, delete_shard]


def test_p03_names_need_no_quotes(tmp_path):
    names = [path.name for path in save(tmp_path, 12).iterdir()] + [files.step_name(0), files.step_name(12_345_678)]
    assert files.step_name(12) == "step-000012"
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in names)


@pytest.mark.parametrize("damage", DAMAGE)
def test_p17_a_damaged_newest_is_skipped_and_named(tmp_path, caplog, damage):
    paths = [save(tmp_path, step) for step in (2, 4, 6)]
    damage(paths[-1])
    with caplog.at_level(logging.WARNING):
        newest = files.newest_complete(tmp_path)
    assert (newest.step, newest.path) == (4, str(paths[1]))
    assert "step-000006" in caplog.text
    assert not files.is_complete(paths[2])
    assert files.is_complete(paths[1])


@pytest.mark.parametrize("damage", DAMAGE)
def test_p17_all_damaged_is_an_error_and_nothing_is_deleted(tmp_path, damage):
    paths = [save(tmp_path, step) for step in (2, 4, 6)]
    for path in paths:
        damage(path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"none is complete.*step-000002.*step-000006"):
        files.newest_complete(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_save_that_never_ended_is_no_checkpoint(tmp_path):
    assert files.newest_complete(tmp_path) is None
    unfinished = files.folder_of(tmp_path) / ".step-000002.tmp"
    unfinished.mkdir(parents=True)
    (unfinished / "rank-00000.safetensors").write_bytes(b"x")
    assert files.newest_complete(tmp_path) is None
    (files.folder_of(tmp_path) / "notes").mkdir()
    assert files.newest_complete(tmp_path) is None


def test_newest_is_the_last_saved_not_the_largest_step(tmp_path):
    """A run that went back to step 4 and saved step 5 goes on from there, not from step 100 of the abandoned branch."""
    save(tmp_path, 4)
    save(tmp_path, 100)
    five = save(tmp_path, 5)
    assert files.newest_complete(tmp_path).path == str(five)


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 4, b"old")
    save(tmp_path, 6)
    path = save(tmp_path, 4, b"new content")
    assert (path / "rank-00000.safetensors").read_bytes() == b"new content"
    assert files.newest_complete(tmp_path).step == 4
    assert sorted(os.listdir(path.parent)) == ["step-000004", "step-000006"]


def test_link_is_replaced_and_never_dangles(tmp_path):
    two, four = save(tmp_path, 2), save(tmp_path, 4)
    files.link_last(two)
    files.link_last(four)
    link = files.folder_of(tmp_path) / "last"
    assert link.resolve() == four
    assert not os.path.isabs(os.readlink(link))  # the run's folder may be moved


def test_a_newer_format_is_refused_in_words(tmp_path):
    path = save(tmp_path, 2)
    mark = files.read_json(path / files.META)
    files.write_json(path / files.META, {**mark, "format": 99})
    with pytest.raises(CheckpointError, match=r"format 99.*newer version"):
        files.read_mark(path)


def test_the_next_save_clears_what_a_crash_left(tmp_path):
    for name in (".step-000002.tmp", ".step-000001.removed", ".other.tmp"):
        (files.folder_of(tmp_path) / name / "inside").mkdir(parents=True)
    save(tmp_path, 4)
    assert sorted(os.listdir(files.folder_of(tmp_path))) == [".other.tmp", "step-000004"]


def test_removal_takes_the_name_away_first(tmp_path, monkeypatch):
    path = save(tmp_path, 2)

    def fail(*_args, **_kwargs):
        raise OSError("busy")

    monkeypatch.setattr(files.shutil, "rmtree", fail)
    with pytest.raises(OSError, match="busy"):
        files.remove(path)
    assert files.newest_complete(tmp_path) is None  # not half a checkpoint
