"""Every byte of a checkpoint that isn't as it was written is found, and its file named, before it is trained on."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from framework import checkpoint_files as files
from framework.checkpoint_files import CheckpointError, DamagedError
from framework_plugins.checkpoint.storage import file_name
from framework_plugins.checkpoint.store import ShardedStore

TENSORS = {
    "model.a": torch.arange(24, dtype=torch.float64).reshape(4, 6),
    "model.b": torch.ones(5, dtype=torch.bfloat16),
    "model.empty": torch.empty(0, 3),
    "optimizer.0.a.step:int": torch.tensor(3),
}
META = {"step": 4, "lightning": {"loops": {"epoch": 1}, "lr": 0.125}}
FLIPS = 500


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / files.FOLDER / files.step_name(4)
    ShardedStore().save(str(path), TENSORS, META)
    files.write_score(path, "loss", "min", 0.5)
    return path


def load(path: Path) -> dict[str, torch.Tensor]:
    """Read it as a run does: the launcher looks at the mark, the ranks at the rest."""
    files.read_mark(path)
    wanted = {name: torch.full_like(tensor, 7) for name, tensor in TENSORS.items()}
    assert ShardedStore().load(str(path), wanted, ("model.",)) == META
    return wanted


def damaged(whole: Path, folder: Path, name: str, damage: Callable[[bytes], bytes]) -> Path:
    """Return a copy of which one file was changed."""
    copy = folder / whole.name
    if copy.exists():
        shutil.rmtree(copy)
    shutil.copytree(whole, copy)
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(damage(content))
    return copy


def test_what_is_not_damaged_is_what_was_saved(whole: Path) -> None:
    for name, tensor in load(whole).items():
        assert torch.equal(tensor, TENSORS[name]), name


def test_every_flipped_bit_is_found_and_its_file_named(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {file.name: file.stat().st_size for file in whole.iterdir()}
    assert set(sizes) == {files.META, files.INDEX, files.STATE, files.SCORE, file_name(0)}
    chance = random.Random(0)
    for number in range(FLIPS):
        name = chance.choice(sorted(sizes))
        at, bit = chance.randrange(sizes[name]), 1 << chance.randrange(8)

        def flip(content: bytes, at: int = at, bit: int = bit) -> bytes:
            return content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]

        copy = damaged(whole, tmp_path, name, flip)
        if name == files.SCORE:  # no state: the checkpoint counts as not scored, with a warning
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                assert files.read_mark(copy).score is None, (number, at, bit)
            assert files.SCORE in caplog.text
            continue
        with pytest.raises(CheckpointError) as told:
            load(copy)
        assert name in str(told.value) or "newer version" in str(told.value), (name, at, str(told.value))


@pytest.mark.parametrize("name", [files.META, files.INDEX, files.STATE, file_name(0)])
def test_every_truncation_and_missing_file_is_found(whole: Path, tmp_path: Path, name: str) -> None:
    size = (whole / name).stat().st_size
    for length in {0, 1, 8, size // 2, size - 1, *random.Random(name).sample(range(size), 20)}:
        copy = damaged(whole, tmp_path, name, lambda content, length=length: content[:length])  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            load(copy)
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(copy)


def test_the_tensor_is_named_and_nothing_of_it_is_taken(whole: Path, tmp_path: Path) -> None:
    copy = damaged(whole, tmp_path, file_name(0), lambda content: content.replace(b"\x80?" * 5, b"\x80?" * 4 + b"\0?"))
    wanted = {name: torch.full_like(tensor, 7) for name, tensor in TENSORS.items()}
    with pytest.raises(DamagedError, match=r"step-000004 is damaged: the bytes of model\.b in rank-00000\.safetensors"):
        ShardedStore().load(str(copy), wanted)
    assert torch.equal(wanted["model.b"], torch.full((5,), 7.0, dtype=torch.bfloat16))


def test_what_was_found_once_is_not_tried_again(whole: Path, tmp_path: Path) -> None:
    copy = damaged(whole, tmp_path, file_name(0), bytes)
    assert files.is_complete(copy)
    files.mark_damaged(copy, "the bytes of model.b are wrong")
    with pytest.raises(DamagedError, match=r"found damaged before: the bytes of model\.b are wrong \(delete damaged"):
        files.read_mark(copy)
    (copy / files.DAMAGE).write_text("{")
    with pytest.raises(DamagedError, match="can't be read"):
        files.read_mark(copy)
    (copy / files.DAMAGE).unlink()
    assert files.is_complete(copy)


def test_a_checkpoint_of_format_1_has_no_hashes_and_is_read(whole: Path, tmp_path: Path) -> None:
    copy = damaged(whole, tmp_path, files.META, bytes)

    def rewrite(name: str, change: Callable[[dict[str, Any]], None]) -> None:
        content = json.loads((copy / name).read_bytes())
        change(content)
        (copy / name).write_text(json.dumps(content))

    def old_index(content: dict[str, Any]) -> None:
        del content["headers"]
        for entry in content["tensors"].values():
            entry["pieces"] = [piece[:4] for piece in entry["pieces"]]

    rewrite(files.INDEX, old_index)

    def old_mark(content: dict[str, Any]) -> None:
        del content["sha256"], content["hashes"]
        content["format"] = 1
        content["files"] = {name: (copy / name).stat().st_size for name in content["files"]}

    rewrite(files.META, old_mark)
    assert torch.equal(load(copy)["model.a"], TENSORS["model.a"])


def test_a_score_of_format_1_counts(whole: Path, tmp_path: Path) -> None:
    copy = damaged(whole, tmp_path, files.META, bytes)
    (copy / files.SCORE).write_text(json.dumps({"monitor": "loss", "value": "0.25"}))
    assert files.read_mark(copy).score == 0.25
