"""`data=packed`: which tokens and targets a window has, and that nothing crosses the border of two documents."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from framework.errors import UsageError
from framework_plugins.data.packed import IGNORED, Packed, Packs
from framework_plugins.model.gpt import GPT
from framework_plugins.model.moe import MoE

LENGTHS = [3, 1, 9, 2, 2, 5, 1, 1, 7]


def packs(context: int = 4, confined: bool = True, lengths: list[int] = LENGTHS) -> Packs:
    """Documents whose tokens are all different."""
    ends = np.cumsum(lengths)
    return Packs(np.arange(ends[-1], dtype=np.uint16), context, ends, confined)


@pytest.mark.parametrize("context", range(1, 12))
def test_each_token_is_there_once_and_each_target_is_the_next_token_of_the_document(context: int) -> None:
    data = packs(context)
    pairs = [(row["inputs"].tolist(), row["targets"].tolist()) for row in (data[index] for index in range(len(data)))]
    tokens = [token for inputs, _ in pairs for token in inputs]
    assert tokens == list(range(len(tokens)))
    assert sum(LENGTHS) - len(tokens) <= context, "only what comes after the last whole window"
    last = {int(end) - 1 for end in data.ends}
    wanted = [IGNORED if token in last else token + 1 for token in tokens]
    assert [target for _, targets in pairs for target in targets] == wanted
    assert IGNORED in wanted


@pytest.mark.parametrize("context", [1, 4, 7, 30])
def test_documents_and_positions_are_those_of_the_window(context: int) -> None:
    data = packs(context, lengths=[*LENGTHS, 40])
    of_token = np.repeat(np.arange(len(data.ends)), np.diff(data.ends, prepend=0))
    for index in range(len(data)):
        row = data[index]
        document = of_token[row["inputs"].numpy()]
        assert row["documents"].tolist() == (document - document[0]).tolist()
        seen: dict[int, int] = {}
        wanted = []
        for number in document.tolist():
            wanted.append(seen.get(number, 0))
            seen[number] = wanted[-1] + 1
        assert row["positions"].tolist() == wanted


def test_a_batch_is_its_samples_stacked() -> None:
    data = packs(5)
    batch = data.__getitems__([3, 0, 4])
    for name, column in batch.items():
        assert torch.equal(column, torch.stack([data[index][name] for index in (3, 0, 4)])), name
    assert set(packs(confined=False)[0]) == {"inputs", "targets"}


@pytest.mark.parametrize("make", [GPT, MoE])
def test_a_token_sees_its_own_document_alone(make: Any) -> None:
    """What a document gives in a window gives the logits that it gives alone; not so under the window's attention."""
    torch.manual_seed(0)
    model = make(vocab_size=64, width=16, layers=2, heads=2, context=16).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 64, (2, 12))
    documents = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 2 + [1] * 9 + [2]])
    positions = torch.tensor([[*range(5), *range(4), *range(3)], [*range(2), *range(9), 0]])

    def logits(*batch: torch.Tensor) -> torch.Tensor:
        out = model(*batch)
        return out[0] if isinstance(out, tuple) else out

    together, open_to_all = logits(ids, positions, documents), logits(ids, positions)
    for row in range(2):
        for number in range(3):
            here = documents[row] == number
            alone = logits(ids[row : row + 1, here])
            torch.testing.assert_close(together[row : row + 1, here], alone, rtol=1e-12, atol=1e-12)
            if number:
                assert not torch.allclose(open_to_all[row : row + 1, here], alone, rtol=1e-3)


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """Three files of five paragraphs each."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("\n\n".join(name * size for size in (3, 11, 2, 30, 5)))
    return tmp_path


def test_documents_are_paragraphs_or_files_and_make_the_whole_text(letters: Path) -> None:
    paragraphs = Packed(path=str(letters), context=4)
    assert paragraphs.documents()[:2] == [b"aaa\n\n", b"a" * 11 + b"\n\n"]
    assert len(paragraphs.documents()) == 15
    files = Packed(path=str(letters), context=4, separator=None)
    assert [document[:1] for document in files.documents()] == [b"a", b"b", b"c"]
    for data in (paragraphs, files):
        assert b"".join(data.documents()) == data._corpus[1]
        assert data.facts()["documents"] == len(data.documents())
    assert Packed(path=str(letters), separator="zz", context=4).documents() == [paragraphs._corpus[1]]


def test_the_held_out_part_begins_with_a_document(letters: Path, tmp_path: Path) -> None:
    data = Packed(path=str(letters), context=4, val_fraction=0.3, cache_dir=str(tmp_path / "cache"))
    before = {name: data.facts()[name] for name in ("train_tokens", "val_tokens", "documents")}
    data.setup("fit")
    assert {name: data.facts()[name] for name in before} == before, "from disk as from memory"
    train, held_out = data.windows(0), data.windows(1)
    starts = np.cumsum([len(document) for document in data.documents()])
    assert len(train.tokens) in starts
    assert train.ends[-1] == len(train.tokens)
    assert held_out.ends[-1] == len(held_out.tokens)
    assert len(train.ends) + len(held_out.ends) == 15
    assert abs(len(held_out.tokens) - 0.3 * starts[-1]) <= 16


def test_pairs_over_a_border_are_not_in_the_entropy(letters: Path) -> None:
    data = Packed(path=str(letters), context=4, val_fraction=0.3)
    before, after = data._pairs()
    documents = data.documents()[-len(data.windows(1).ends) :]
    wanted = [pair for document in documents for pair in pairwise(document)]
    assert list(zip(before.tolist(), after.tolist(), strict=True)) == wanted
    assert data.bigram_entropy > 0


def test_a_tokenizer_never_joins_two_documents(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    (tmp_path / "text").write_text("ab|ba|ab|ba|" * 8)
    words = Tokenizer(models.BPE({"a": 0, "b": 1, "|": 2, "|b": 3, "|a": 4}, [("|", "b"), ("|", "a")]))
    words.save(str(tmp_path / "tokenizer.json"))
    how = {"path": str(tmp_path / "text"), "context": 2, "tokenizer": str(tmp_path / "tokenizer.json")}
    assert set(Packed(separator="|", **how)._encoded[0].tolist()) == {0, 1, 2}
    assert 3 in Packed(separator=None, **how)._encoded[0].tolist()


def test_a_model_that_does_not_read_documents_is_refused(letters: Path, tmp_path: Path) -> None:
    def trainer(module: Any) -> Any:
        return SimpleNamespace(lightning_module=module, default_root_dir=str(tmp_path))

    data = Packed(path=str(letters), context=4)
    data.trainer = trainer(torch.nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"Linear has no class attribute reads_documents.*type data.attention=window"):
        data.setup("fit")
    for attention, module in (("window", torch.nn.Linear(1, 1)), ("document", GPT(width=8, heads=2, layers=1))):
        data = Packed(path=str(letters), context=4, attention=attention)
        data.trainer = trainer(module)
        data.setup("fit")
        assert ("documents" in data.windows(0)[0]) == (attention == "document")


@pytest.mark.parametrize(("setting", "words"), [({"separator": ""}, "separator"), ({"attention": "all"}, "window")])
def test_settings_that_mean_nothing(setting: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Packed(**setting)  # type: ignore[arg-type]
