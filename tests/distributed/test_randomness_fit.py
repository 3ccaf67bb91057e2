"""P32 through the Trainer: who draws the same masks, and that a resumed run draws those of the uninterrupted one."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from fitting import fit
from lightning.pytorch import LightningModule
from plans import make_plan, option
from torch import Tensor, nn
from user_modules import regression

from framework.plan import RunPlan


class Dropping(LightningModule):
    """Keeps the masks of dropout on the residual stream (`outside`) and on hidden units (`inside`)."""

    tp_plan: ClassVar = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch["x"]), batch["y"])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


MASKS: dict[str, list[Tensor]] = {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)
        self.inside, self.outside = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inside(self.up(x) + 1.0)
        y = self.outside(self.down(hidden))
        MASKS.setdefault("inside", []).append(hidden.detach() != 0)
        MASKS.setdefault("outside", []).append(y.detach() != 0)
        return x + y


def masks(
    plan: RunPlan, save_to: str | None = None, ckpt_path: str | None = None
) -> tuple[dict[str, Any], list[float]]:
    MASKS.clear()
    seen = fit(plan, Dropping, regression(32), save_to=save_to, ckpt_path=ckpt_path, tensors=False)
    return {name: list(found) for name, found in MASKS.items()}, seen.losses


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_masks_over_tp_and_data_ranks(pool) -> None:
    plan = make_plan(4, strategy="ddp", tp=2, micro_batch_size=4, trainer={"max_steps": 2})
    ranks = [found for found, _ in pool.run(masks, 4, plan, process_group=False)]
    for first in (0, 2):
        assert same(ranks[first]["outside"], ranks[first + 1]["outside"]), "tp neighbours compute the same"
        assert not same(ranks[first]["inside"], ranks[first + 1]["inside"]), "and hold different hidden units"
    assert not same(ranks[0]["outside"], ranks[2]["outside"]), "other samples, other masks"
    assert not torch.equal(ranks[0]["outside"][0], ranks[0]["outside"][2]), "each step has its own"


def test_stages_draw_differently(pool) -> None:
    plan = make_plan(2, pp="gpipe", microbatches=2, micro_batch_size=4, trainer={"max_steps": 2})
    one, other = (found for found, _ in pool.run(masks, 2, plan, process_group=False))
    assert not same(one["outside"][-2:], other["outside"][-2:])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_draws_what_the_uninterrupted_one_would_have(pool, tmp_path, accumulation: int) -> None:
    settings = {"strategy": "ddp", "tp": 2, "micro_batch_size": 2, "accumulation": accumulation}
    settings["components"] = {"checkpoint": option("checkpoint", "dcp")}
    whole = pool.run(
        masks, 4, make_plan(4, **settings, trainer={"max_steps": 4, "max_epochs": -1}), process_group=False
    )
    plan = make_plan(4, **settings, trainer={"max_steps": 2, "max_epochs": -1})
    pool.run(masks, 4, plan, process_group=False, save_to=str(tmp_path / "half"))
    plan = make_plan(4, **settings, trainer={"max_steps": 4, "max_epochs": -1})
    rest = pool.run(masks, 4, plan, process_group=False, ckpt_path=str(tmp_path / "half"))
    for (want, losses), (got, more) in zip(whole, rest, strict=True):
        half = len(want["inside"]) // 2
        for region in ("inside", "outside"):
            assert same(want[region][half:], got[region]), region
        assert more == pytest.approx(losses[2:], rel=1e-6)
