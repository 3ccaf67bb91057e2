"""`data=text` and `data=digits`."""

from __future__ import annotations

import builtins
import hashlib
import math
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from framework.errors import UsageError
from framework_plugins.data.digits import Digits
from framework_plugins.data.text import Text
from framework_plugins.data.windows import Windows


@pytest.fixture
def book(tmp_path: Path) -> Path:
    file = tmp_path / "book.txt"
    file.write_text("abcdefghij" * 30)
    return file


def test_the_default_text_is_pythons_own_documentation() -> None:
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    facts = Text().facts()
    assert facts["corpus"] == "pydoc_data.topics"
    assert facts["corpus_sha256"] == hashlib.sha256(text).hexdigest()
    assert facts["corpus_bytes"] == len(text) > 400_000
    assert facts["train_tokens"] + facts["val_tokens"] == len(text)
    assert facts["vocabulary"] == 256


def test_windows_are_shifted_by_one_token() -> None:
    windows = Windows(np.arange(30, dtype=np.uint8), context=4, stride=3)
    assert len(windows) == 9
    last = windows[8]
    assert last["inputs"].tolist() == [24, 25, 26, 27]
    assert last["targets"].tolist() == [25, 26, 27, 28]
    rows = windows.__getitems__([0, 8])
    assert rows["inputs"].shape == (2, 4)
    assert rows["inputs"].dtype == torch.int64
    assert torch.equal(rows["targets"][1], last["targets"])
    for size in range(1, 12):  # the last window just fits
        one = Windows(np.arange(size, dtype=np.uint8), context=4, stride=2)
        starts = [start for start in range(0, size, 2) if start + 5 <= size]
        assert len(one) == len(starts)
        assert all(one[index]["targets"][-1] == start + 4 for index, start in enumerate(starts))


def test_training_and_held_out_text_do_not_overlap(book: Path, tmp_path: Path) -> None:
    data = Text(path=str(book), context=10, val_fraction=0.2, cache_dir=str(tmp_path / "cache"))
    data.setup("fit")
    train, val = data.train_dataloader().dataset, data.val_dataloader().dataset
    assert isinstance(train, Windows)
    assert isinstance(val, Windows)
    assert bytes(train.tokens) + bytes(val.tokens) == book.read_bytes()
    assert len(val.tokens) == 60
    assert isinstance(train.tokens.base, np.memmap), "not read into memory"


def test_ranks_that_prepare_at_once_leave_one_whole_file(book: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    parts = [Text(path=str(book), context=10, cache_dir=str(cache)) for _ in range(8)]
    threads = [threading.Thread(target=part.prepare_data) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [file.suffix for file in cache.iterdir()] == [".npy"]
    assert np.load(next(cache.iterdir())).tobytes() == book.read_bytes()


def test_a_changed_text_is_not_read_from_the_cache(book: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    Text(path=str(book), context=10, cache_dir=cache).setup("fit")
    book.write_text("z" * 300)
    data = Text(path=str(book), context=10, cache_dir=cache)
    data.setup("fit")
    assert set(data._part(0).tolist()) == {ord("z")}


def test_a_folder_is_joined_in_the_order_of_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / ".hidden").write_text("no")
    data = Text(path=str(tmp_path), context=1, val_fraction=0.2)
    assert data._corpus[1] == b"first\n\nsecond"


@pytest.mark.parametrize("path", ["nowhere", ""])
def test_no_text_there(tmp_path: Path, path: str) -> None:
    with pytest.raises(UsageError, match=r"neither a file nor a folder"):
        Text(path=str(tmp_path / path)).facts()


def test_a_text_shorter_than_a_window(book: Path) -> None:
    with pytest.raises(UsageError, match=r"300 tokens, cut into 270 and 30.*data.context=64"):
        Text(path=str(book), context=64).facts()


def test_bigram_entropy_against_its_definition(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"x" * 50 + b"aabacabaacbacbbcacabab" * 5)
    data = Text(path=str(text), context=4, val_fraction=0.6)
    held_out = bytes(data._part(1))
    pairs, before = Counter(pairwise(held_out)), Counter(held_out[:-1])
    by_hand = -sum(n * math.log(n / before[a]) for (a, _), n in pairs.items()) / (len(held_out) - 1)
    assert data.bigram_entropy == pytest.approx(by_hand, abs=1e-12)


def test_a_tokenizer_file(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2, "sat": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    file, text = tmp_path / "tokenizer.json", tmp_path / "text"
    words.save(str(file))
    text.write_text("the cat sat dog " * 20)
    data = Text(path=str(text), context=3, tokenizer=str(file), val_fraction=0.2, cache_dir=str(tmp_path / "cache"))
    data.setup("fit")
    assert data.vocab_size == 4
    assert data.facts()["train_tokens"] == 64
    assert data._part(0)[:5].tolist() == [1, 2, 3, 0, 1]
    assert data.sha256 != Text(path=str(text)).sha256
    with pytest.raises(UsageError, match=r"no-such\.json is no file"):
        Text(path=str(text), tokenizer="no-such.json").facts()


def test_digits() -> None:
    data = Digits()
    facts = data.facts()
    assert (facts["train_samples"], facts["val_samples"], facts["classes"]) == (1438, 359, 10)
    train, val = data.train_dataloader().dataset, data.val_dataloader().dataset
    one = train[0]
    assert one["inputs"].shape == (64,)
    assert 0 <= float(one["inputs"].min()) < float(one["inputs"].max()) <= 1
    rows = {train[index]["inputs"].numpy().tobytes() for index in range(1438)}
    assert sum(val[index]["inputs"].numpy().tobytes() in rows for index in range(359)) == 0
    assert torch.equal(Digits().train_dataloader().dataset[5]["inputs"], train[5]["inputs"]), "the same split each time"


@pytest.mark.parametrize(
    ("package", "call", "extra"),
    [
        ("sklearn", lambda: Digits().facts(), "digits"),
        ("tokenizers", lambda: Text(tokenizer="x").facts(), "tokenizers"),
    ],
)
def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch, package: str, call: Any, extra: str) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=rf"pip install 'lightning-framework\[{extra}\]'"):
        call()


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0])
def test_fractions_that_leave_nothing(value: float) -> None:
    for data in (Text, Digits):
        with pytest.raises(ValueError, match="val_fraction"):
            data(val_fraction=value)
