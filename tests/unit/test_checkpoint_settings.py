"""What `checkpoint=dcp` and a resumed schedule tell the user, without processes (P15)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.optim import lr_scheduler

from framework.checkpoint import schedule_changes
from framework.plan import RunPlan
from framework_plugins.checkpoint.dcp import DCP

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
        ("mode", "least", "checkpoint.mode=min"),
        ("save_last", "copy", "link or none"),
    ],
)
def test_settings_out_of_range_are_refused_in_words(name, value, words):
    assert DCP().check_plan(PLAN) == []
    (problem,) = dataclasses.replace(DCP(), **{name: value}).check_plan(PLAN)
    assert problem.setting == f"checkpoint.{name}={value}"
    assert words in str(problem)
