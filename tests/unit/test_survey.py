"""What following a step method without computing finds, and where it then cuts."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from families import FAMILIES, Mlp, ResNet, Trained, samples
from plans import make_plan
from torch import Tensor, nn
from user_modules import loader

from framework.survey import Survey, SurveyError, cuts, dearest, holders, stage_costs, survey, units_of
from framework_plugins.pp.cutting import SURVEY
from framework_plugins.pp.schedules import Schedule


def batch(size: int = 2) -> Any:
    return {
        name: t.float() if t.is_floating_point() else t for name, t in next(iter(loader(samples(size), size))).items()
    }


@pytest.mark.parametrize("by", ["flops", "parameters"])
def test_the_dearest_stage_is_at_most_a_tenth_dearer_than_the_best_of_all_ways(by):
    """Held against every way to cut, one by one."""
    for family in FAMILIES[:-1]:
        found = survey(family.make(), batch())
        costs = found.costs(by)
        for stages in (2, 3):
            places = [at for at, size in enumerate(found.sent) if at and size is not None]
            ways = [max(stage_costs(costs, way)) for way in combinations(places, stages - 1)]
            assert dearest(costs, stages, found.sent) == pytest.approx(min(ways))
            assert max(stage_costs(costs, cuts(costs, stages, found.sent))) <= 1.1 * min(ways) + 1e-9


def test_costs_are_those_of_the_layers():
    found = survey(Mlp(), batch(2))
    sizes = (192, 48, 40, 32, 24, 3)
    pairs = list(pairwise(sizes))
    assert [str(mark) for mark in found.marks] == ["net", *(f"net.{1 + 2 * at}" for at in range(1, 5))]
    assert found.flops == [2 * 2 * a * b for a, b in pairs]
    assert found.parameters == [a * b + b for a, b in pairs]
    assert found.sent[1:] == [2 * 4 * size for size in sizes[1:-1]]


def test_running_statistics_belong_to_the_stage_that_changes_them():
    module = ResNet()
    found = survey(module, batch())
    chosen = [found.starts.index(next(call.start for call in found.calls if call.module == "layer2"))]
    held = holders(found, chosen, dict(module.named_buffers()))
    assert {held[name] for name in held if name.startswith("layer2")} == {(1,)}
    assert {held[name] for name in held if not name.startswith("layer2")} == {(0,)}
    assert "layer2" in units_of(found, chosen)
    assert "layer2.0.bn1" in found.writes or "layer2.0.bn1.running_mean" in found.writes


class Peeks(Trained):
    """Chooses what to do by a value that only computing gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        h = self.first(batch["noise"])
        if h.mean().item() > 0:
            h = -h
        return self.second(h).square().mean()


def test_control_flow_by_values_is_refused_with_its_place():
    with pytest.raises(SurveyError, match=r"training_step needs a value after first: .*item"):
        survey(Peeks(), batch())


class LooksLater(Peeks):
    """Looks at a value behind its last weight."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        h = self.first(batch["noise"])
        out = self.second(h)
        wrong = out[out.argmax(-1) != batch["class"]]
        return out.square().mean() + 0 * float(len(wrong)) + h.mean()


def test_values_behind_the_last_weight_are_free_to_use():
    found = survey(LooksLater(), batch())
    assert found.stopped
    assert [str(mark) for mark in found.marks] == ["first", "second"]


class Noisy(Trained):
    """Adds noise to its input, which the loss needs again behind the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        noise = torch.randn_like(batch["noise"])
        out = self.second(self.first(batch["noise"] + noise))
        return (out - noise).square().mean()


def test_what_is_drawn_is_sent_and_what_only_the_batch_gives_is_not():
    noisy = survey(Noisy(), batch(2)).sent[1]
    assert noisy == 2 * (2 * 6 * 4)  # the activation, and the noise
    assert survey(Mlp(), batch(2)).sent[2] == 2 * 40 * 4  # not the classes


def test_too_few_places_name_what_there_is():
    model = Noisy()
    model.__dict__[SURVEY] = survey(model, batch())
    plan = make_plan(4, pp="gpipe", stages=4, microbatches=4)
    (problem,) = Schedule(size=4).check_model(plan, model)
    assert str(problem) == "pp=gpipe: Noisy can be cut in 1 places (second), too few for 4 stages. Type pp.size=2."


@pytest.mark.parametrize("words", [{"cut": "halves"}, {"balance": "luck"}, {"balance": "flops", "split": [1, 1]}])
def test_settings_that_make_no_sense(words):
    with pytest.raises(ValueError, match=r"pp\.(cut|balance)="):
        Schedule(**words)


def test_nothing_can_be_cut_where_nothing_crosses():
    with pytest.raises(ValueError, match="1 segments for 2 stages"):
        cuts([1.0, 2.0], 2, [None, None])
    assert Survey().costs("flops") == []
