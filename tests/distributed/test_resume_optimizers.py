"""Two optimizers with manual optimization and a schedule each, in the pairs of `test_resume_matrix.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from mixes import OVERLAP, Mix
from resuming import Matrix
from torch import Tensor
from torch.nn import functional
from user_modules import Rows

MIXES = {
    mix.name: mix
    for mix in (
        Mix("one process", 1),
        Mix("ddp 2", 2, "strategy=ddp"),
        Mix("ddp 4, overlapped", 4, f"strategy=ddp {OVERLAP}"),
        Mix("ddp 4", 4, "strategy=ddp"),
        Mix("ddp 2, one bucket a parameter", 2, "strategy=ddp strategy.bucket_cap_mb=0.001"),
    )
}


class Gan(families.Gan):
    """Momentum for the generator, Adam for the critic; both learning rates fall, each in its own way."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        for schedule in self.lr_schedulers():
            schedule.step()
        with torch.no_grad():
            self.log("train_loss", functional.softplus(self.critic(batch["image"].flatten(1))).mean())

    def configure_optimizers(self) -> Any:
        generator = torch.optim.SGD(self.generator.parameters(), lr=0.05, momentum=0.9)
        critic = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        rate = torch.optim.lr_scheduler.LambdaLR
        return [generator, critic], [
            rate(generator, lambda step: 0.8**step),
            torch.optim.lr_scheduler.CosineAnnealingLR(critic, T_max=10),
        ]


def samples() -> Rows:
    """Six global batches."""
    return families.samples(96)


MATRIX = Matrix("gan", MIXES, Gan, samples)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume-optimizers")


@pytest.mark.parametrize(("before", "after"), MATRIX.pairs())
def test_two_optimizers_go_on_under_any_other_mix(pool: Any, folder: Path, before: str, after: str) -> None:
    MATRIX.check(pool, folder, before, after)
