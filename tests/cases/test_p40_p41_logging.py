"""P40, P41: values are reduced by name; one step axis, whatever the accumulation and the restarts."""

from __future__ import annotations

import csv
from functools import partial

import pytest
from fitting import fit
from lightning.pytorch import Callback
from plans import make_plan, option
from user_modules import Scalar, tokens


class Uneven(Scalar):
    """Rank 0 logs a = 10, rank 1 logs b = 20; both log loss = 1, in different order."""

    def training_step(self, batch, batch_idx):
        first = self.trainer.global_rank == 0
        if not first:
            self.log("loss", 1.0, sync_dist=True)
        self.log("a" if first else "b", 10.0 if first else 20.0, sync_dist=True)
        if first:
            self.log("loss", 1.0, sync_dist=True)
        return super().training_step(batch, batch_idx)


class Metrics(Callback):
    """What callbacks see at the end of each step."""

    def __init__(self) -> None:
        self.seen = []

    def on_train_batch_end(self, trainer, *_):
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit_and_watch(plan, module, data):
    metrics = Metrics()
    fit(plan, module, data, callbacks=[metrics])
    return metrics.seen


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_p40_values_are_reduced_by_name(pool, strategy):
    plan = make_plan(2, strategy=strategy)
    for seen in pool.run(fit_and_watch, 2, plan, Uneven, tokens(*[[1.0]] * 8), process_group=False, timeout=30):
        assert len(seen) == 4
        for step in seen:  # stock: a = b = 15
            assert {name: step[name] for name in ("a", "b", "loss")} == {"a": 10.0, "b": 20.0, "loss": 1.0}


class Sometimes(Scalar):
    """A key that only rank 1 logs, and only in its third step; reductions other than the mean."""

    def training_step(self, batch, batch_idx):
        rank = self.trainer.global_rank
        if rank == 1 and batch_idx == 2:
            self.log("rare", 7.0)
            self.log("peak", 7.0, reduce_fx="max")
        self.log("largest", float(rank), reduce_fx="max")
        self.log("smallest", float(rank) + 1, reduce_fx="min")
        self.log("total", 2.0, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


def test_p40_late_keys_and_other_reductions(pool):
    for seen in pool.run(fit_and_watch, 2, make_plan(2, strategy="ddp"), Sometimes, tokens(*[[1.0]] * 8)):
        assert [step.get("rare") for step in seen] == [None, None, 7.0, 7.0]
        assert [step.get("peak") for step in seen] == [None, None, 7.0, 7.0]
        assert {(step["largest"], step["smallest"], step["total"]) for step in seen} == {(1.0, 1.0, 4.0)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_p41_one_step_axis_over_accumulation_and_resume(pool, tmp_path, ranks):
    def plan(epochs):
        return make_plan(
            ranks,
            strategy="ddp" if ranks == 2 else None,
            accumulation=4,
            run_dir=str(tmp_path),
            trainer={"max_epochs": epochs, "log_every_n_steps": 1},
            components={
                "checkpoint": option("checkpoint", "dcp"),
                "logger": {"csv": {"_target_": "framework_plugins.logger.csv.Csv", "save_dir": str(tmp_path)}},
            },
        )

    data = tokens(*[[1.0]] * 8 * ranks)
    where = str(tmp_path / "after2")
    pool.run(fit, ranks, plan(2), partial(Scalar), data, save_to=where, process_group=False)
    pool.run(fit, ranks, plan(3), partial(Scalar), data, ckpt_path=where, process_group=False)
    rows = [row for row in csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()) if row["train_loss"]]
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [int(row["samples"]) for row in rows] == [4 * ranks * step for step in range(1, 7)]
