"""Modules that make their optimizer steps themselves: gradients and logged values are those of all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from fitting import fit
from plans import make_plan, option
from torch import Tensor, nn
from user_modules import Mlp, regression

from framework.testing import RanksError
from framework_plugins.strategy.ddp import DDP
from framework_plugins.strategy.fsdp import FSDP

SAMPLES = 24


class Manual(Mlp):
    """One optimizer; each batch in two pieces, whose gradients add up."""

    def __init__(self, way: str = "manual_backward") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.way = way

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in zip(batch["x"].chunk(2), batch["y"].chunk(2), strict=True):
            loss = nn.functional.mse_loss(self(x), y) / 2
            if self.way == "manual_backward":
                self.manual_backward(loss)
            else:
                loss.backward()
            total = total + loss.detach()
        optimizer.step()
        self.log("train_loss", total)
        self.log("largest", total, reduce_fx="max")


def plan_for(ranks: int, **more: Any) -> Any:
    return make_plan(ranks, micro_batch_size=12 // ranks, precision="fp64", trainer={"max_steps": 2}, **more)


def run(pool: Any, ranks: int, way: str = "manual_backward", tensors: bool = True, **more: Any) -> Any:
    data, plan = regression(SAMPLES, dtype=torch.float64), plan_for(ranks, **more)
    return pool.run(fit, ranks, plan, partial(Manual, way), data, tensors=tensors, process_group=False)


@pytest.mark.parametrize("reduction", ["bucketed", "overlap"])
def test_copies_train_as_one_process_and_log_the_same(pool: Any, reduction: str) -> None:
    """Pieces of a batch added up before a step, and values that only one rank has computed, too."""
    (want,) = run(pool, 1)
    strategy = {"strategy": option("strategy", "ddp", reduction=reduction)}
    found = run(pool, 2, strategy="ddp", components=strategy)
    for seen in found:
        assert seen.losses == pytest.approx(want.losses, rel=1e-12)
        assert seen.logged == found[0].logged
        assert seen.logged["largest"] > want.logged["largest"]
        for name, tensor in want.final.items():
            torch.testing.assert_close(seen.final[name], tensor, rtol=1e-12, atol=1e-14)
    assert all((want.final[name] - start).norm() > 1e-3 for name, start in want.initial.items())


def test_a_backward_past_the_framework_is_named(pool: Any) -> None:
    """Its gradients would be those of one rank, and the copies part in silence."""
    with pytest.raises(RanksError, match=r"training_step called loss\.backward\(\).*self\.manual_backward\(loss\)"):
        run(pool, 2, way="backward", tensors=False, strategy="ddp")


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        (FSDP(), "FSDP reduces gradients after it. Type strategy=ddp."),
        (
            DDP(static_graph=True),
            "strategy.static_graph=true: only torch's DDP wrapper has it, and that reduces nothing",
        ),
        (DDP(hook="powersgd"), "Type strategy.hook=none."),
    ],
)
def test_what_would_reduce_nothing_is_refused(chosen: Any, told: str) -> None:
    (problem,) = chosen.check_model(plan_for(2, strategy="ddp"), Manual())
    assert told in str(problem)
    assert chosen.check_model(plan_for(2, strategy="ddp"), Mlp()) == []
