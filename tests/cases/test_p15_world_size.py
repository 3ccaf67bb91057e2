"""P15: state saved by one number of ranks is continued by another, momentum included."""

from __future__ import annotations

from functools import partial

import pytest
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
