"""Complaints about a mix, and the nearest mixes that work."""

from __future__ import annotations

import pytest

from framework import legality
from framework.compose import compose
from framework.errors import PlanError
from framework.plan import Requirements


def need(*needs, gives=(), excludes=(), **why):
    return Requirements(frozenset(needs), frozenset(gives), frozenset(excludes), why)


def test_needs_and_exclusions_are_words_of_anybody():
    mix = {"strategy": "a", "pp": "b", "sampler": "c"}
    wants = {
        "strategy": need("sharding", "pp=b", excludes=("rope", "tp"), sharding="copies would learn the same"),
        "sampler": need(gives=("sharding",)),
        "pp": need("tp=z", excludes=("strategy=a", "nothing")),
    }
    assert [str(problem) for problem in legality.conflicts(mix, wants)] == [
        "pp=b: it needs tp=z, which nothing chosen gives. Type tp=z.",
        "pp=b: it can't be combined with strategy=a.",
    ]
    del wants["sampler"]
    found = str(next(iter(legality.conflicts(mix, wants))))
    assert "needs sharding" in found
    assert "copies would learn the same" in found


OPTIONS = {"strategy": ["a", "b"], "pp": ["x", "y"], "sampler": ["s"], "precision": ["p", "q"]}


def test_as_few_concerns_as_possible_are_changed():
    asked = {"strategy": "a", "pp": "x", "precision": "p"}

    def legal(mix):
        return not (mix.get("strategy") == "a" and mix.get("pp") == "x")

    found = legality.nearest(asked, ["strategy", "pp"], OPTIONS, legal)
    assert found == ["strategy=a pp=y", "strategy=b pp=x", "strategy=a pp=none"]


def test_two_changes_are_tried_when_one_is_not_enough():
    asked = {"strategy": "a", "pp": "x", "precision": "p"}

    def legal(mix):
        return mix.get("strategy") == "b" and mix.get("precision") == "q"

    assert legality.nearest(asked, OPTIONS, OPTIONS, legal)[0] == "strategy=b pp=x precision=q"


def test_nothing_is_suggested_where_nothing_works_and_the_search_ends():
    calls = []

    def never(mix):
        calls.append(mix)
        return False

    many = {f"slot{number}": [str(option) for option in range(9)] for number in range(12)}
    assert legality.nearest(dict.fromkeys(many, "0"), many, many, never) == []
    assert len(calls) == legality.TRIES


def test_a_default_concern_is_not_switched_off_to_make_a_mix_work():
    asked = {"sampler": "s", "strategy": "a"}
    found = legality.nearest(asked, ["sampler"], OPTIONS, lambda mix: "sampler" not in mix)
    assert found == []


def test_ranks_that_read_different_samples_need_a_sampler():
    with pytest.raises(PlanError) as caught:
        compose(["+strategy=ddp", "sampler=none"], model=False)
    text = str(caught.value)
    assert "needs data sharding" in text
    assert "2 data ranks would all train on the same samples. Type sampler=consistent." in text
    assert "strategy=ddp sampler=consistent" in caught.value.nearest
    assert "strategy=none" in caught.value.nearest


def test_what_the_model_cant_do_has_nearest_mixes_too():
    with pytest.raises(PlanError) as caught:
        compose(["+strategy=ddp", "+pp=gpipe", "model.tied=true", "pp.cut=blocks"])
    assert "tied" in str(caught.value)
    assert caught.value.nearest == ("strategy=ddp pp=1f1b", "strategy=ddp pp=none")
    assert "Nearest mixes that work: strategy=ddp pp=1f1b" in str(caught.value)


def test_suggested_mixes_are_legal_themselves():
    """Every suggestion, typed as it is, composes."""
    asked = ["+strategy=ddp", "sampler=none", "+pp=gpipe"]
    with pytest.raises(PlanError) as caught:
        compose(asked, model=False)
    assert caught.value.nearest
    for words in caught.value.nearest:
        changed = {word.partition("=")[0] for word in words.split()}
        kept = [word for word in asked if word.lstrip("+").partition("=")[0] not in changed]
        compose([*kept, *words.split()], model=False)
