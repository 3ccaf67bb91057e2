"""`framework.Trainer` before it runs anything; runs of it are in tests/distributed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from plans import make_plan

from framework import Trainer, hookimpl, trainer
from framework.adapters import lightning_private
from framework.plan import RunPlan
from framework.plugin_manager import manager_for


class Remembers:
    """A component that finds in a later hook what it kept in an earlier one."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.seen: list[Any] = []

    @hookimpl
    def on_worker_start(self, rank: int) -> None:
        self.rank = rank

    @hookimpl
    def make_callbacks(self) -> list[Callback]:
        self.seen.append(("make_callbacks", self.rank))
        return []

    @hookimpl
    def check_model(self, model: LightningModule) -> list[Any]:
        self.seen.append(("check_model", self.rank))
        return []


def test_a_component_is_one_object_in_all_hooks_of_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    plan = make_plan(1, run_dir=str(tmp_path))
    manager, component = manager_for(plan), Remembers()
    manager.register(component)
    manager.hook.on_worker_start(plan=plan, rank=3)

    def stop(built: Trainer, *args: Any, **kwargs: Any) -> None:
        built.strategy.manager.hook.check_model(plan=plan, model=LightningModule())  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "fit", stop)
    monkeypatch.setattr(trainer, "build_model", lambda plan: LightningModule())
    monkeypatch.setattr(trainer.objects, "build", lambda spec: None)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(with_data(plan), manager)
    assert component.seen == [("make_callbacks", 3), ("check_model", 3)]


def test_a_step_may_change_its_batch_and_not_what_the_loader_keeps(tmp_path: Any) -> None:
    strategy: Any = Trainer(make_plan(1, run_dir=str(tmp_path))).strategy
    strategy._nothing_to_move = True
    kept = {"x": torch.ones(2), "more": [1]}
    given = strategy.batch_to_device(kept)
    assert given.pop("x") is kept["x"]
    given["more"].append(2)
    assert kept["more"] == [1]


def with_data(plan: RunPlan) -> RunPlan:
    return plan.with_(components={**plan.components, "data": {}})


class Ended(torch.optim.SGD):
    """Notes its end, as an optimizer does that keeps memory outside of Python."""

    ends: list[int] = []  # noqa: RUF012 - one list for every object

    def __del__(self) -> None:
        self.ends.append(self.steps)

    steps = 0

    def step(self, closure: Any = None) -> Any:
        assert self.ends == [], "it has come to its end before this step"
        type(self).steps += 1
        return super().step(closure)


class Collecting(LightningModule):
    """Its steps let go of whatever nobody holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        gc.collect()
        return self.linear(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Ended(self.parameters(), lr=0.1)


def steps_of_ended(run_dir: str) -> int:
    trained = Trainer(make_plan(1, run_dir=run_dir, trainer={"max_steps": 2}))
    trained.fit(Collecting(), torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=1))
    return Ended.steps


def test_an_optimizer_lives_as_long_as_the_run(pool: Any, tmp_path: Any) -> None:
    """Lightning's wrapper is of a class derived from the optimizer's: thrown away, it would end the optimizer."""
    assert pool.run(steps_of_ended, 1, str(tmp_path), process_group=False) == [2]


def test_a_copy_of_the_strategy_wraps_its_optimizers_anew(tmp_path: Any) -> None:
    """Lightning leaves the wrappers out of the state, and sets the same optimizers again."""
    strategy: Any = Trainer(make_plan(1, run_dir=str(tmp_path))).strategy
    optimizers = [torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)]
    strategy.optimizers = optimizers
    assert lightning_private.has_wrapped(strategy, optimizers)
    strategy.__setstate__(strategy.__getstate__())
    assert lightning_private.has_wrapped(strategy, optimizers)
