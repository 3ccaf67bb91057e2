"""What `checkpoint=dcp` and a resumed schedule tell the user, without processes (P15)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.optim import lr_scheduler

from framework.plan import RunPlan
from framework.schedule_changes import schedule_changes
from framework_plugins.checkpoint.dcp import DCP
from framework_plugins.checkpoint.pace import Pace
from framework_plugins.checkpoint.store import Took

PLAN = RunPlan(run_id="r", run_dir="unused")


class Factor:
    """A factor as an object: its attributes are part of the scheduler's state."""

    def __init__(self, end: int) -> None:
        self.end = end

    def __call__(self, step: int) -> float:
        return 1.0 - step / self.end


def schedulers(end: int) -> dict[str, lr_scheduler.LRScheduler]:
    def make() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)

    first, second = make(), make()
    parts = [lr_scheduler.ConstantLR(second, total_iters=2), lr_scheduler.CosineAnnealingLR(second, T_max=end)]
    return {
        "T_max": lr_scheduler.CosineAnnealingLR(first, T_max=end),
        "total_steps": lr_scheduler.OneCycleLR(make(), max_lr=0.1, total_steps=end),
        "end": lr_scheduler.LambdaLR(make(), Factor(end)),
        "T_max of a part": lr_scheduler.SequentialLR(second, parts, milestones=[2]),
    }


@pytest.mark.parametrize("key", ["T_max", "total_steps", "end", "T_max of a part"])
def test_p15_a_changed_length_is_found_and_progress_is_none(key):
    saved = schedulers(4)[key]
    saved.optimizer.step()
    saved.step()
    changes = schedule_changes(saved.state_dict(), schedulers(8)[key].state_dict(), "schedule")
    assert [c for c in changes if f".{key.split()[0]}: 4 from the checkpoint, this run's settings say 8" in c]
    assert schedule_changes(saved.state_dict(), schedulers(4)[key].state_dict(), "schedule") == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("every_n_steps", -1, "checkpoint.every_n_steps=100"),
        ("keep", 0, "always kept"),
        ("save_top_k", -2, "-1 for all"),
        ("monitor_mode", "least", "checkpoint.monitor_mode=min"),
        ("mode", "later", "checkpoint.mode=auto"),
        ("mode", "max", "checkpoint.monitor_mode=max"),
        ("on_failure", "retry", "checkpoint.on_failure=end"),
        ("save_last", "copy", "link or none"),
    ],
)
def test_settings_out_of_range_are_refused_in_words(name, value, words):
    assert DCP().check_plan(PLAN) == []
    (problem,) = dataclasses.replace(DCP(), **{name: value}).check_plan(PLAN)
    assert problem.setting == f"checkpoint.{name}={value}"
    assert words in str(problem)


# -- beside the steps, or not --------------------------------------------------------------------------------------


def paced(monkeypatch, alone, beside, waited=0.1, complete=2.0, waiting=1.0):
    """Return whether the third save is in the background: the first is waited for, steps go on beside the second."""
    now = [0.0]
    monkeypatch.setattr("framework_plugins.checkpoint.pace.time", SimpleNamespace(perf_counter=lambda: now[0]))
    pace = Pace()

    def steps(count, seconds, saving):
        for _ in range(count):
            now[0] += seconds
            pace.step(saving)

    steps(11, alone, saving=False)
    pace.begin()
    pace.end(Took(Path("step-1"), waiting, waiting), background=pace.background)
    assert pace.background, "the second is tried beside the steps"
    steps(11, alone, saving=False)
    pace.begin()
    pace.step(saving=True)
    steps(10, beside, saving=True)
    second = Took(Path("step-2"), waited, complete)
    pace.end(second, background=True)
    pace.end(second, background=True)
    return pace.background


def test_saves_go_on_beside_the_steps_where_that_costs_less(monkeypatch):
    assert paced(monkeypatch, alone=0.1, beside=0.12)  # 0.1 + 10 * 0.02 < 1.0
    assert not paced(monkeypatch, alone=0.1, beside=0.2)  # 0.1 + 10 * 0.1 > 1.0
    assert not paced(monkeypatch, alone=0.1, beside=0.1, waited=1.1)


def test_once_waiting_is_cheaper_it_stays_so(monkeypatch):
    pace = Pace()
    pace.end(Took(Path("step-1"), 1.0, 1.0), background=False)
    pace.step(saving=True), pace.step(saving=True)
    pace.end(Took(Path("step-2"), 5.0, 6.0), background=True)
    assert not pace.background
    pace.end(Took(Path("step-3"), 1.0, 1.0), background=False)
    assert not pace.background
