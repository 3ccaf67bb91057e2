"""A parameter that is frozen when a run begins and trained later, as Lightning's `BackboneFinetuning` does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fitting import fit
from lightning.pytorch import Callback
from plans import make_plan, option
from user_modules import Mlp, regression

from framework.testing import RanksError

DATA = regression(16, dtype=torch.float64)


class Thaw(Callback):
    """The first layer is trained in the second epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.layers[0].requires_grad_(True)


class Frozen(Mlp):
    """Its first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)


def run(pool: Any, ranks: int, strategy: str | None = None, accumulation: int = 1, **settings: Any) -> Any:
    chosen = {"strategy": option("strategy", strategy, **settings)} if strategy else {}
    plan = make_plan(
        ranks, strategy=strategy, micro_batch_size=4 // ranks // accumulation, accumulation=accumulation,
        precision="fp64", trainer={"max_epochs": 2}, components=chosen,
    )  # fmt: skip
    return pool.run(fit, ranks, plan, Frozen, DATA, callbacks=[Thaw()], process_group=False)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("strategy", "settings"),
    [("ddp", {"reduction": "overlap"}), ("fsdp", {"find_unused_parameters": True})],
)
def test_it_is_trained_as_in_one_process(pool: Any, strategy: str, settings: Any, accumulation: int) -> None:
    (want,) = run(pool, 1)
    assert (want.final["layers.0.0.weight"] - want.initial["layers.0.0.weight"]).norm() > 0.1
    for seen in run(pool, 2, strategy, accumulation, **settings):
        assert seen.losses == pytest.approx(want.losses, rel=1e-12)
        for name, tensor in want.final.items():
            torch.testing.assert_close(seen.final[name], tensor, rtol=1e-12, atol=1e-14)


def test_torchs_wrapper_would_leave_it_to_each_rank(pool: Any) -> None:
    with pytest.raises(RanksError, match=r"layers\.0\.0\.\w+ was frozen .*type strategy\.reduction=overlap\."):
        run(pool, 2, "ddp")
