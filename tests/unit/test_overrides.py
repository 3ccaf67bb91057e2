"""The command line token by token: both spellings of a group, and every mistake in one sentence (case P04)."""

from __future__ import annotations

import pytest

from framework.overrides import read

GROUPS = {
    "strategy": ["ddp", "fsdp", "none"],
    "pp": ["1f1b", "gpipe", "none"],
    "model": ["custom", "gpt", "mlp", "none"],
    "logger": ["csv", "tensorboard", "none"],
}


def line(*tokens, multirun=False):
    return read(tokens, GROUPS, ["model"], multirun=multirun)


def complaint(*tokens, multirun=False) -> str:
    problems = line(*tokens, multirun=multirun).problems
    assert len(problems) == 1, problems
    return str(problems[0])


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize(
    ("token", "hydra"),
    [
        ("strategy=fsdp", "+strategy=fsdp"),
        ("pp=1f1b", "+pp=1f1b"),
        ("pp=none", "+pp=none"),
        ("model=mlp", "model=mlp"),
        ("logger=[csv,tensorboard]", "logger=[csv,tensorboard]"),
        ("trainer.max_steps=3", "++trainer.max_steps=3"),
        ("strateg=fsdp", "++strateg=fsdp"),
    ],
)
def test_both_spellings_become_the_one_that_hydra_wants(plus, token, hydra):
    assert line(plus + token).tokens == [hydra]
    assert not line(plus + token).problems


def test_a_sweep_keeps_its_lists():
    swept = line("strategy=ddp,fsdp", "+pp=none,gpipe", "seed=1,2", "hydra/launcher=basic", multirun=True)
    assert swept.tokens == ["+strategy=ddp,fsdp", "+pp=none,gpipe", "++seed=1,2", "hydra/launcher=basic"]
    assert swept.sweeps


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["+pp=gpip"], ["+pp=gpip", "'gpip'", "1f1b, gpipe, none", "Type pp=gpipe."]),
        (["pp=null"], ["Type pp=none."]),
        (["++strategy=fsdp"], ["++ is for single keys", "Type +strategy=fsdp."]),
        (["++model=mlp"], ["Type model=mlp."]),
        (["~strategy"], ["Type strategy=none."]),
        (["strategy=ddp", "strategy=fsdp"], ["strategy=ddp", "strategy=fsdp", "only one can count"]),
        (["strategy=ddp", "+strategy=fsdp"], ["strategy=ddp", "strategy=fsdp", "only one can count"]),
        (["seed=1", "seed=2"], ["seed=1", "seed=2", "only one can count"]),
        (["strategy=ddp,fsdp"], ["jobs of a sweep", "Type -m strategy=ddp,fsdp"]),
        (["logger=csv,tensorboard"], ["'logger=[csv,tensorboard]'"]),
        (["pp/more=gpipe"], ["no sub-folders"]),
        (["strategy"], ["isn't key=value", "--help"]),
        (["ckpt_path=/a b/epoch=1.ckpt"], ["can't be read", "'ckpt_path=\"/a b/epoch=1.ckpt\"'"]),
    ],
)
def test_a_mistake_is_one_sentence_with_what_to_type(tokens, words):
    text = complaint(*tokens)
    for word in words:
        assert word in text
    assert "\n" not in text


def test_a_wrong_option_in_a_sweep_is_found_before_the_first_job():
    assert "'fsdpp'" in complaint("strategy=ddp,fsdpp", multirun=True)


def test_all_mistakes_are_heard_and_the_same_word_twice_is_none():
    found = line("pp=gpip", "strategy=zz", "seed=1=2", "model=gpt", "model=gpt")
    assert len(found.problems) == 3
    assert found.tokens == ["model=gpt"]
    assert {"pp", "strategy"} <= found.spoilt


def test_a_class_of_the_users_own_starts_from_nothing():
    assert line("model._target_=my.Model", "model.width=3").tokens == [
        "model=custom",
        "++model._target_=my.Model",
        "++model.width=3",
    ]
    chosen = line("model=gpt", "model._target_=my.Model").tokens
    assert chosen == ["model=gpt", "++model._target_=my.Model"], "an option that was asked for stays the base"
