"""`data=shards`: many files as one row, and a shard that isn't what it was is named."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from framework.errors import UsageError
from framework_plugins.data import shards as module
from framework_plugins.data.shards import ShardData, Shards, find
from framework_plugins.data.text import Text
from framework_plugins.data.windows import Windows

SIZES = [40, 7, 1, 60, 12]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """120 tokens, all different, in five files; their paths' order isn't that of their making."""
    pieces = np.split(np.arange(sum(SIZES), dtype=np.uint16), np.cumsum(SIZES)[:-1])
    place = tmp_path / "shards"
    (place / "b").mkdir(parents=True)
    for name, piece in reversed(list(zip(("a1", "a2", "b/0", "b/1", "c"), pieces, strict=True))):
        np.save(place / f"{name}.npy", piece)
    return place


def data_of(folder: Path, **how: Any) -> ShardData:
    return ShardData(path=str(folder), cache_dir=str(folder.parent / "cache"), **{"context": 5, **how})


def test_windows_go_on_from_shard_to_shard(folder: Path) -> None:
    data = data_of(folder, val_fraction=0.2)
    data.setup("fit")
    row = np.arange(120)
    for part, tokens in ((0, row[:96]), (1, row[96:])):
        ours, wanted = data.windows(part), Windows(tokens, 5, 5)
        assert len(ours) == len(wanted)
        everything = list(range(len(ours)))
        assert ours.__getitems__(everything)["inputs"].tolist() == wanted.__getitems__(everything)["inputs"].tolist()
        assert ours[2]["targets"].tolist() == wanted[2]["targets"].tolist()
    assert data.facts()["train_tokens"] == 96
    assert data.facts()["shards"] == 5


def test_a_slice_is_a_row_of_its_own(folder: Path) -> None:
    row = Shards(folder, find(folder))
    assert row[30:90][10:20][np.arange(10)].tolist() == list(range(40, 50))
    assert len(row[:-10]) == 110
    assert len(row[50:20]) == 0


def test_few_files_are_open_at_once_and_none_travels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPEN", 2)
    row = Shards(folder, find(folder))
    order = np.random.default_rng(0).permutation(120)
    for start in range(0, 120, 6):
        assert row[order[start : start + 6]].tolist() == order[start : start + 6].tolist()
        assert len(row._open) <= 2
    assert all(isinstance(tokens, np.memmap) for tokens in row._open.values())
    copy = pickle.loads(pickle.dumps(row))
    assert not copy._open
    assert copy[order].tolist() == order.tolist()


def test_lengths_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_of(folder).prepare_data()
    opened: list[str] = []
    real = module._map
    monkeypatch.setattr(module, "_map", lambda place, name: opened.append(name) or real(place, name))
    data = data_of(folder)
    data.setup("fit")
    len(data.windows(0))
    assert opened == []
    data.windows(0)[0]
    assert opened == ["a1.npy"]


def rewrite(file: Path, tokens: np.ndarray[Any, Any]) -> None:
    file.unlink()
    np.save(file, tokens)


CHANGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda place: (place / "b/0.npy").unlink(), r"Shard b/0\.npy of data\.path=.* is missing since this run began"),
    (lambda place: np.save(place / "b/2.npy", np.arange(3)), r"Shard b/2\.npy .* is new since"),
    (lambda place: rewrite(place / "c.npy", np.arange(9)), r"Shard c\.npy .* has 9 tokens and had 12"),
    (lambda place: rewrite(place / "c.npy", np.arange(12, dtype=np.uint16)), r"Shard c\.npy .* has other contents"),
    (lambda place: _cut(place / "b/1.npy"), r"Shard b/1\.npy of .* can't be read .*a part of one"),
    (lambda place: (place / "a2.npy").write_bytes(b"no numbers"), r"Shard a2\.npy of .* can't be read"),
    (lambda place: (place / "a2.npy").write_bytes(b""), r"Shard a2\.npy of .* can't be read"),
]


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_run_that_goes_on_names_the_shard_that_changed(folder: Path, change: Any, words: str) -> None:
    data_of(folder).prepare_data()
    data_of(folder).prepare_data()
    change(folder)
    with pytest.raises(UsageError, match=words):
        data_of(folder).prepare_data()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda place: (place / "b/1.npy").unlink(), r"Shard b/1\.npy of data\.path=.* is missing: bring it back"),
        (lambda place: _cut(place / "b/1.npy"), r"Shard b/1\.npy .* can't be read"),
        (lambda place: rewrite(place / "b/1.npy", np.arange(61)), r"Shard b/1\.npy .* has 61 tokens and had 60"),
    ],
)
def test_a_shard_that_changes_during_the_run_is_named_when_it_is_read(folder: Path, change: Any, words: str) -> None:
    data = data_of(folder)
    data.setup("fit")
    change(folder)
    data.windows(0)[0]
    with pytest.raises(UsageError, match=words):
        data.windows(0)[12]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (np.zeros((3, 2), dtype=np.int64), r"holds int64 of shape \(3, 2\)"),
        (np.zeros(3), r"holds float64 of shape \(3,\)"),
        (np.zeros(0, dtype=np.int64), r"bad\.npy"),
    ],
)
def test_what_is_no_row_of_tokens_is_named(folder: Path, tokens: np.ndarray[Any, Any], words: str) -> None:
    np.save(folder / "bad.npy", tokens)
    with pytest.raises(UsageError, match=words):
        data_of(folder).facts()


def test_no_shards_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no \.npy file in data\.path=.*type the path of your shards"):
        data_of(tmp_path / "nowhere").facts()


def test_the_default_text_in_shards_is_that_of_data_text(tmp_path: Path) -> None:
    data, text = ShardData(cache_dir=str(tmp_path)), Text(cache_dir=str(tmp_path))
    before = data.facts()
    data.setup("fit")
    text.setup("fit")
    assert data.facts() == before
    assert len(find(data.folder)) == module.BUNDLED
    places = [0, 1000, len(data.windows(0)) - 1]
    assert data.windows(0).__getitems__(places)["inputs"].equal(text.windows(0).__getitems__(places)["inputs"])
    (data.folder / "00003.npy").unlink()
    with pytest.raises(UsageError, match=r"Shard 00003\.npy .* is missing"):
        ShardData(cache_dir=str(tmp_path)).prepare_data()
