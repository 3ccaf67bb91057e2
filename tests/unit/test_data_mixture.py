"""`data=mixture`: weights hold in every prefix, sources start over in another order, nothing depends on ranks."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from reading import Ids, Stream
from torch.utils.data import DataLoader, default_collate

from framework.counter import derive, permutation
from framework.errors import UsageError
from framework_plugins.data.mixture import Draws, Mix, Mixture, schedule, whole
from framework_plugins.data.text import Text


@pytest.mark.parametrize("seed", range(60))
def test_every_prefix_has_its_share_rounded_up_or_down(seed: int) -> None:
    chance = random.Random(seed)
    shares = [chance.randint(1, chance.choice([3, 20, 200])) for _ in range(chance.randint(1, 7))]
    total, drawn = sum(shares), [0] * len(shares)
    for draw, (source, before) in enumerate(schedule(shares), 1):
        assert before == drawn[source]
        drawn[source] += 1
        for share, count in zip(shares, drawn, strict=True):
            assert abs(count - Fraction(draw * share, total)) < 1, (shares, draw)
    assert drawn == shares


def test_weights_become_the_smallest_whole_numbers() -> None:
    assert whole({"a": 0.75, "b": 0.25}) == {"a": 3, "b": 1}
    assert whole({"a": 0.7, "b": 0.2, "c": 0.1, "d": 0}) == {"a": 7, "b": 2, "c": 1}
    assert whole({"a": 40, "b": 60}) == {"a": 2, "b": 3}
    assert list(whole({"b": 1, "a": 1})) == ["b", "a"]


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": 1 / 3, "b": 0.5}, "hold exactly only every"),
        ({"a": -1, "b": 2}, "must be positive"),
        ({"a": 0, "b": 0}, "must be positive"),
    ],
)
def test_weights_that_cannot_be(weights: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        whole(weights)


def mix(seed: int = 3, samples: int | None = None) -> Mix:
    return Mix({"a": Ids(5), "b": Ids(7)}, {"a": 3, "b": 2}, seed, samples)


def test_a_source_starts_over_in_another_order_by_the_documented_rule() -> None:
    data = mix()
    places = [data.place(draw) for draw in range(120)]
    assert Counter(name for name, _ in places) == {"a": 72, "b": 48}
    for name, size in (("a", 5), ("b", 7)):
        numbers = [sample for source, sample in places if source == name]
        rounds = [numbers[at : at + size] for at in range(0, len(numbers) - size + 1, size)]
        for turn, order in enumerate(rounds):
            assert order == permutation(derive("mixture", 3, name, turn), size).tolist()
        assert len({tuple(order) for order in rounds}) > 4


def test_a_draw_is_the_same_whenever_it_is_asked_for() -> None:
    wanted = [mix().place(draw) for draw in range(300)]
    data, order = mix(), list(range(300))
    random.Random(1).shuffle(order)
    assert all(data.place(draw) == wanted[draw] for draw in order)
    assert [mix(seed=4).place(draw) for draw in range(300)] != wanted
    assert [len(kept) for kept in data._orders] == [2, 2], "not the order of every round is kept"
    assert data[8] == {"id": torch.tensor(wanted[8][1])}


def test_the_next_epoch_draws_on() -> None:
    draws = Draws(12)
    assert (len(draws), list(draws)) == (12, list(range(12)))
    draws.set_epoch(2)
    assert list(draws) == list(range(24, 36))
    assert len(mix()) == 12
    assert len(mix(samples=5)) == 5


class Numbers(LightningDataModule):
    """`size` samples to train on and two to hold out."""

    def __init__(self, size: int, collate: Any = None, stream: bool = False, context: int = 4) -> None:
        super().__init__()
        self.size, self.collate, self.stream, self.context = size, collate, stream, context
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stream(self.size) if self.stream else Ids(self.size), collate_fn=self.collate)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Ids(2), collate_fn=self.collate)


class Pairs(Numbers):
    """Samples with one more entry, which collation would leave out in silence."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([{"id": index, "more": index} for index in range(self.size)])  # type: ignore[arg-type]


def test_the_module_joins_the_sources() -> None:
    data = Mixture(sources={"a": Numbers(5), "b": Numbers(7), "c": Numbers(9)}, weights={"a": 1, "b": 1, "c": 0})
    data.prepare_data()
    data.setup("fit")
    assert [source.calls for source in data.sources.values()] == [["prepare", "fit"]] * 2
    train, held_out = data.train_dataloader(), data.val_dataloader()
    assert len(train.dataset) == 12  # type: ignore[arg-type]
    assert isinstance(train.sampler, Draws)
    assert [row["id"].tolist() for row in held_out] == [[0], [1], [0], [1]]
    assert data.facts()["sources"] == "a 1 of 2 draws; b 1 of 2 draws"


def test_texts_give_the_same_batches_alone_and_in_a_mixture(tmp_path: Path) -> None:
    texts = {name: Text(path=path, context=8, cache_dir=str(tmp_path)) for name, path in
             (("doc", None), ("code", "package:email"))}  # fmt: skip
    data = Mixture(sources=texts, weights={"doc": 3, "code": 1}, context=8)
    facts = data.facts()
    data.setup("fit")
    assert data.facts() == facts
    loader = data.train_dataloader()
    dataset: Any = loader.dataset
    batch = loader.collate_fn([dataset[draw] for draw in range(40, 48)])
    for row, draw in zip(range(8), range(40, 48), strict=True):
        name, sample = dataset.place(draw)
        assert batch["inputs"][row].equal(texts[name].windows(0)[sample]["inputs"])
    assert facts["train_samples"] == len(dataset) == sum(len(text.windows(0)) for text in texts.values())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weights": {"a": 1}}, "b must stand in data.sources and in data.weights"),
        ({"weights": {"a": 1, "b": 1, "c": 1}}, "c must stand in"),
        ({"samples": 0}, "samples=0"),
        ({"context": 5}, r"data\.sources\.a\.context=4 isn't the 5 tokens"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    sources = {"a": Numbers(5), "b": Numbers(7)}
    with pytest.raises(ValueError, match=words):
        Mixture(**{"sources": sources, "weights": {"a": 1, "b": 1}, **settings})


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Pairs(7), r"data\.sources\.b have the entries id, more, and those of data\.sources\.a have id: samples"),
        (Numbers(7, stream=True), r"data\.sources\.b has no DataLoader of a map-style data set"),
        (Numbers(7, collate=list), "several collate_fn"),
        (Numbers(0), r"data\.sources\.b has no sample.*data\.weights\.b=0"),
    ],
)
def test_sources_that_cannot_be_mixed(other: Numbers, words: str) -> None:
    data = Mixture(sources={"a": Numbers(5, collate=default_collate), "b": other}, weights={"a": 1, "b": 1})
    with pytest.raises(UsageError, match=words):
        data.train_dataloader()
