"""torchmetrics' objects count each sample once, whatever the mix (P40's kind)."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import pytest
from plans import make_plan
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric
from user_modules import Mlp, regression

from framework.testing import RanksError
from framework.trainer import Trainer

SAMPLES = 7
"""No number of ranks here divides it: some rank has a filler, in training and in evaluation."""


class Counting(Mlp):
    """Counts samples and their mean target in objects of torchmetrics.

    Args:
        logs: what: the `objects` in the steps, their `values` when an epoch ends, or those of `batches`.
    """

    tp_plan: ClassVar = {"layers.0.0": "colwise", "layers.1.0": "rowwise"}

    def __init__(self, logs: str) -> None:
        super().__init__()
        self.logs = logs
        for stage in ("train", "val"):
            setattr(self, f"{stage}_count", SumMetric())
            setattr(self, f"{stage}_mean", MeanMetric())

    def _metrics(self, stage: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (f"{stage}_count", f"{stage}_mean")}

    def _update(self, stage: str, batch: dict[str, Tensor]) -> None:
        count, mean = self._metrics(stage).values()
        if self.logs == "batches":
            self.log(f"{stage}_mean", mean(batch["y"].mean(1)), on_step=False, on_epoch=True)
            return
        count.update(float(len(batch["x"])))
        mean.update(batch["y"].mean(1))
        if self.logs == "objects":
            self.log_dict(self._metrics(stage), on_step=False, on_epoch=True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self._update("train", batch)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self(batch["x"])
        self._update("val", batch)

    def _log_values(self, stage: str) -> None:
        if self.logs == "values":
            for name, metric in self._metrics(stage).items():
                self.log(name, metric.compute())
                metric.reset()

    def on_train_epoch_end(self) -> None:
        self._log_values("train")

    def on_validation_epoch_end(self) -> None:
        self._log_values("val")


def fit(world: int, logs: str, **mix: Any) -> dict[str, float]:
    """Train for two epochs; return the metrics of the second."""
    trainer, data = Trainer(make_plan(world, trainer={"max_epochs": 2}, **mix)), regression(SAMPLES)
    trainer.fit(Counting(logs), DataLoader(data), DataLoader(data))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("logs", ["objects", "values"])
@pytest.mark.parametrize(
    ("world", "mix"),
    [(1, {}), (2, {"strategy": "ddp"}), (2, {"strategy": "fsdp"}), (2, {"tp": 2}), (4, {"strategy": "ddp", "tp": 2})],
    ids=["one", "ddp", "fsdp", "tp", "ddp-tp"],
)
def test_each_sample_counts_once(pool: Any, world: int, mix: dict[str, Any], logs: str) -> None:
    mean = float(regression(SAMPLES).columns["y"].double().mean())
    for seen in pool.run(partial(fit, **mix), world, world, logs, process_group=False, timeout=100.0):
        assert seen["train_count"] == seen["val_count"] == SAMPLES
        assert seen["train_mean"] == pytest.approx(mean, abs=1e-6)
        assert seen["val_mean"] == pytest.approx(mean, abs=1e-6)


def test_a_pipeline_refuses_objects_and_takes_values_of_batches(pool: Any) -> None:
    """Only its last stage has them: at the epoch's end it would wait for stages that have nothing to compute."""
    staged = partial(fit, pp="gpipe", stages=2)
    with pytest.raises(RanksError, match=r"logged 'train_count' as a torchmetrics object, which only the last stage"):
        pool.run(staged, 2, 2, "objects", process_group=False, timeout=100.0)
    mean = float(regression(SAMPLES).columns["y"].double().mean())
    for seen in pool.run(staged, 2, 2, "batches", process_group=False, timeout=100.0):
        assert seen["train_mean"] == pytest.approx(mean, abs=1e-6)
        assert seen["val_mean"] == pytest.approx(mean, abs=1e-6)
