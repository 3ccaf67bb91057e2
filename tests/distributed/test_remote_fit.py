"""Training with the tier `remote`: what is kept there, and what becomes of what was fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from plans import make_plan, option
from torch import nn
from torch.utils.data import DataLoader

from framework import Trainer
from framework import checkpoint_files as files
from framework_plugins.checkpoint import remote


class Scalar(LightningModule):
    """Logs a distance that is smallest at the third step, while it trains or in the validation after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("distance", float(abs(self.trainer.global_step - 2)))
        return self.w.sum() + 0 * batch.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_distance", float(abs(self.trainer.global_step - 3)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Looks(Callback):
    """Notes after each step how many copies lie in the run's folder."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self.seen: dict[int, int] = {}

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.seen[trainer.global_step] = len(remote.copies(self.run_dir))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen[trainer.global_step] = len(remote.copies(self.run_dir))


def train(
    run_dir: str, url: str, steps: int, every: int, start: str | None = None, monitor: str = "distance"
) -> dict[int, int]:
    checkpoint = option(
        "checkpoint", "dcp", every_n_steps=every, keep=1, save_top_k=1, monitor=monitor, mode="sync", remote=url,
        remote_keep=1,
    )  # fmt: skip
    plan = make_plan(
        1,
        run_dir=run_dir,
        trainer={"max_steps": steps, "max_epochs": -1, "val_check_interval": 1},
        components={"checkpoint": checkpoint},
    )
    looks = Looks(run_dir)
    path = None if start is None else remote.find(start, run_dir).path
    data: Any = DataLoader(torch.ones(64, 1))
    measured = DataLoader(torch.ones(1, 1)) if monitor == "val_distance" else None  # type: ignore[arg-type]
    Trainer(plan, callbacks=[looks]).fit(Scalar(), data, measured, ckpt_path=path)
    return looks.seen


@pytest.mark.parametrize("monitor", ["distance", "val_distance"])
def test_the_same_are_kept_far_away_as_on_disk(pool: Any, tmp_path: Path, monitor: str) -> None:
    """What is measured in training is known when a checkpoint is saved; what validation measures, later."""
    url = f"file://{tmp_path}/storage"
    pool.run(train, 1, str(tmp_path / "run"), url, 6, 1, None, monitor, process_group=False)
    good, damaged = files.marks(files.folder_of(tmp_path / "run"))
    assert ([mark.step for mark in good], damaged) == ([3, 6], []), "the best, and the newest"
    name = remote.name_of(str(tmp_path / "run"))
    assert name is not None
    assert {row["step"]: row["score"] for row in remote.newest(url, name)} == {3: "0.0", 6: "3.0"}


def test_what_was_fetched_goes_when_the_run_has_one_of_its_own(pool: Any, tmp_path: Path) -> None:
    url, start = f"file://{tmp_path}/mine", f"file://{tmp_path}/storage"
    pool.run(train, 1, str(tmp_path / "run"), start, 2, 1, process_group=False)
    (seen,) = pool.run(train, 1, str(tmp_path / "other"), url, 7, 4, start, process_group=False)
    assert seen == {2: 1, 3: 1, 4: 1, 5: 0, 6: 0, 7: 0}, "step 4 is saved after it is looked at"
