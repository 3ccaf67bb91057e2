"""`optimizer=auto|adamw|sgd`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from plans import make_plan
from torch import nn

from framework_plugins.model.gpt import GPT
from framework_plugins.optimizer.adamw import AdamW
from framework_plugins.optimizer.adamw8bit import AdamW8bit
from framework_plugins.optimizer.adamw_bf16 import AdamWBf16
from framework_plugins.optimizer.auto import Auto
from framework_plugins.optimizer.schedule import Factor
from framework_plugins.optimizer.sgd import SGD


class Own(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def small() -> GPT:
    return GPT(vocab_size=5, width=8, layers=2, heads=2)


def plan(**trainer: Any) -> Any:
    return make_plan(1, trainer=trainer)


def test_auto_leaves_the_modules_own_alone() -> None:
    assert Auto().make_optimizer(Own(), plan()) is None
    made = Auto(lr=0.25).make_optimizer(small(), plan())
    assert made is not None
    assert type(made["optimizer"]) is torch.optim.AdamW
    assert {group["lr"] for group in made["optimizer"].param_groups} == {0.25}


def test_auto_sees_the_class_not_what_the_framework_put_on_the_instance() -> None:
    module = small()
    module.configure_optimizers = lambda: None  # type: ignore[method-assign]
    assert Auto().make_optimizer(module, plan()) is not None
    assert not AdamW().check_model(plan(), module)


@pytest.mark.parametrize("option", [AdamW(), SGD(), AdamW8bit(), AdamWBf16()])
def test_both_at_once_is_an_error(option: Any) -> None:
    (problem,) = option.check_model(plan(), Own())
    assert "Own has an optimizer of its own" in problem.reason
    assert problem.fix == "optimizer=auto"
    assert not option.check_model(plan(), small())


def test_a_setting_that_would_do_nothing_is_an_error() -> None:
    (problem,) = Auto(lr=0.25).check_model(plan(), Own())
    assert problem.setting == "optimizer.lr=0.25"
    assert not Auto().check_model(plan(), Own())
    assert not Auto(lr=0.25).check_model(plan(), small())


@pytest.mark.parametrize(
    "option", [AdamW(weight_decay=0.3), SGD(weight_decay=0.3), AdamW8bit(weight_decay=0.3), AdamWBf16(weight_decay=0.3)]
)
def test_only_matrices_decay_and_groups_follow_the_names(option: Any) -> None:
    module = small()
    names = {parameter: name for name, parameter in module.named_parameters()}
    module.norm.weight.requires_grad = False
    matrices, vectors = option.make_optimizer(module, plan())["optimizer"].param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert all(parameter.ndim == 2 for parameter in matrices["params"])
    assert all(parameter.ndim == 1 for parameter in vectors["params"])
    for group in (matrices, vectors):
        held = [names[parameter] for parameter in group["params"]]
        assert held == sorted(held)
    assert len(matrices["params"]) + len(vectors["params"]) == len(names) - 1


@pytest.mark.parametrize(
    "option",
    [AdamW(schedule="cosine"), SGD(schedule="linear"), AdamW8bit(schedule="linear"), AdamWBf16(schedule="linear")],
)
def test_a_stage_without_parameters_has_the_same_groups(option: Any) -> None:
    class Empty(LightningModule):
        pass

    made = option.make_optimizer(Empty(), plan(max_steps=10))
    assert [group["params"] for group in made["optimizer"].param_groups] == [[], []]
    made["optimizer"].step()
    made["lr_scheduler"]["scheduler"].step()


def test_factors() -> None:
    cosine = Factor("cosine", warmup=4, end=14, floor=0.1)
    assert [cosine(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert cosine(4) == 1.0
    assert cosine(9) == pytest.approx(0.55)
    assert cosine(6) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.2)))
    assert cosine(14) == cosine(99) == pytest.approx(0.1)
    linear = Factor("linear", warmup=0, end=10, floor=0.0)
    assert [linear(step) for step in (0, 5, 10, 11)] == [1.0, 0.5, 0.0, 0.0]
    assert Factor("constant", 2, -1, 0.1)(500) == 1.0


def test_the_schedule_runs_by_step_to_max_steps_and_its_state_is_plain() -> None:
    made = AdamW(schedule="linear", min_lr_ratio=0.0, lr=1.0).make_optimizer(small(), plan(max_steps=4))
    assert made is not None
    assert made["lr_scheduler"]["interval"] == "step"
    scheduler, rates = made["lr_scheduler"]["scheduler"], []
    for _ in range(4):
        rates.append(made["optimizer"].param_groups[0]["lr"])
        made["optimizer"].step()
        scheduler.step()
    assert rates == [1.0, 0.75, 0.5, 0.25]
    assert scheduler.state_dict()["lr_lambdas"][0] == {"schedule": "linear", "warmup": 0, "end": 4, "floor": 0.0}


def test_a_constant_rate_needs_no_scheduler() -> None:
    assert set(SGD().make_optimizer(small(), plan()) or {}) == {"optimizer"}
    assert set(SGD(warmup_steps=2).make_optimizer(small(), plan()) or {}) == {"optimizer", "lr_scheduler"}


@pytest.mark.parametrize(
    ("option", "max_steps", "setting"),
    [
        (AdamW(schedule="cosine"), -1, "optimizer.schedule=cosine"),
        (SGD(schedule="linear", warmup_steps=10), 10, "optimizer.warmup_steps=10"),
        (Auto(schedule="cosine", decay_steps=5, warmup_steps=5), -1, "optimizer.warmup_steps=5"),
    ],
)
def test_a_schedule_without_an_end_is_refused(option: Any, max_steps: int, setting: str) -> None:
    (problem,) = option.check_plan(plan(max_steps=max_steps))
    assert problem.setting == setting
    assert not AdamW(schedule="cosine", decay_steps=5).check_plan(plan())


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"schedule": "cosin"}, "choose one of constant"), ({"lr": -1.0}, "negative"), ({"betas": [0.9]}, "two numbers")],
)
def test_fields_are_checked(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AdamW(**fields)


def test_adamw_is_torchs() -> None:
    torch.manual_seed(0)
    ours, theirs = small().double(), small().double()  # in fp32 Adam makes much of the rounding of a small gradient
    theirs.load_state_dict(ours.state_dict())
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.0)
    made = AdamW(lr=0.01, betas=[0.8, 0.9], weight_decay=0.0).make_optimizer(ours, plan())
    assert made is not None
    for _ in range(3):
        for model, optimizer in ((ours, made["optimizer"]), (theirs, reference)):
            optimizer.zero_grad()
            ids = torch.arange(4)[None]
            model.loss({"inputs": ids, "targets": ids})["loss"].backward()
            optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
