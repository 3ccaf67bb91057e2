"""P15: state saved by one number of ranks is continued by another, momentum included."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from fitting import fit
from plans import make_plan, option
from user_modules import Scalar, tokens

DATA = tokens(*[[1.0]] * 8)
MODULE = partial(Scalar, w=0.0, lr=0.1, momentum=0.9)
RUNS = {"fsdp2": ("fsdp", 2), "ddp2": ("ddp", 2), "one": (None, 1), "fsdp4": ("fsdp", 4)}


def fit_keeping_momentum(plan, **options):
    from lightning.pytorch import Callback

    class Momentum(Callback):
        def on_train_end(self, trainer, pl_module):
            optimizer = trainer.optimizers[0]
            state = optimizer.state[pl_module.w]["momentum_buffer"]
            self.value = (state.full_tensor() if hasattr(state, "full_tensor") else state).item()
            self.lr = optimizer.param_groups[0]["lr"]

    momentum = Momentum()
    probe = fit(plan, MODULE, DATA, callbacks=[momentum], **options)
    return probe.initial["w"].item(), probe.final["w"].item(), momentum.value, momentum.lr, probe.global_step


@pytest.mark.parametrize(
    ("before", "after"),
    [("fsdp2", "one"), ("one", "fsdp2"), ("fsdp2", "ddp2"), ("ddp2", "fsdp2"), ("fsdp2", "fsdp4")],
)
def test_p15_momentum_survives_a_change_of_world(pool, tmp_path, before, after):
    where = str(tmp_path / "step3")

    def run(name, steps, **options):
        strategy, ranks = RUNS[name]
        plan = make_plan(
            ranks,
            strategy=strategy,
            micro_batch_size=4 // ranks,
            run_dir=str(tmp_path),
            trainer={"max_steps": steps, "max_epochs": -1},
            components={"checkpoint": option("checkpoint", "dcp")},
        )
        return pool.run(fit_keeping_momentum, ranks, plan, process_group=False, **options)

    run(before, 3, save_to=where)
    for start, w, momentum, lr, step in run(after, 4, ckpt_path=where):
        assert start == pytest.approx(-0.561)
        assert w == pytest.approx(-0.9049, abs=1e-5)  # moments lost: -0.661
        assert momentum == pytest.approx(3.439)
        assert (lr, step) == (0.1, 4)


class OneCycle(Scalar):
    """A schedule whose length is stored in its state."""

    def __init__(self, total: int) -> None:
        super().__init__(lr=0.1, momentum=0.9)
        self.total = total

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit_and_listen(plan, total, **options):
    lines = []

    class Listener(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger("framework_plugins").addHandler(listener)
    try:
        fit(plan, partial(OneCycle, total), DATA, **options)
    finally:
        logging.getLogger("framework_plugins").removeHandler(listener)
    return lines


def test_p15_a_changed_length_of_the_schedule_is_told(pool, tmp_path):
    where = str(tmp_path / "step3")

    def run(steps, total, **options):
        plan = make_plan(
            1,
            micro_batch_size=4,
            run_dir=str(tmp_path),
            trainer={"max_steps": steps, "max_epochs": -1},
            components={"checkpoint": option("checkpoint", "dcp")},
        )
        return pool.run(fit_and_listen, 1, plan, total, process_group=False, **options)[0]

    assert not [line for line in run(3, 4, save_to=where) if "total_steps" in line]
    assert not [line for line in run(4, 4, ckpt_path=where) if "total_steps" in line]
    told = [line for line in run(4, 8, ckpt_path=where) if "total_steps" in line]
    assert told
    assert all("4" in line and "8" in line for line in told)
