"""A run that goes on within an epoch: what Lightning's own restore leaves out (F24 to F27).

Each run saves every step; another goes on from the middle of its second epoch, under the same or another mix, and has
to end with the weights, momenta, learning rates and logged values of the one that was never stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning
from plans import make_plan, option
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from user_modules import Mlp, gathered, loader, regression

from framework.agreement import gather
from framework.checkpoint_files import folder_of, step_name
from framework.testing import RanksError
from framework.trainer import Trainer

STEPS, STOP = 14, 8
"""Six steps an epoch."""

ONE = (1, None, {})
FSDP = (2, "fsdp", {})
OVERLAP = (2, "ddp", {"reduction": "overlap"})
ONE_UNIT = (2, "fsdp", {"find_unused_parameters": True})


def train(
    run_dir: Path, mix: Any, make: Callable[[], Any], callbacks: Any, start: str | None, interval: Any = None
) -> Any:
    """Called on every rank: weights, momenta, rates by step, metrics."""
    ranks, strategy, settings = mix
    plan = make_plan(
        ranks, strategy=strategy, micro_batch_size=4 // ranks, precision="fp64", run_dir=str(run_dir),
        trainer={"max_steps": STEPS, "max_epochs": 9, **({"val_check_interval": interval} if interval else {})},
        components={
            "checkpoint": option("checkpoint", "dcp", every_n_steps=1, keep=99, monitor="val_loss"),
            **({"strategy": option("strategy", strategy, **settings)} if settings else {}),
        },
    )  # fmt: skip
    rates = Rates()
    trainer, module, size = Trainer(plan, callbacks=[*callbacks(), rates]), make(), plan.batch.local_batch_size
    data, held_out = regression(24, dtype=torch.float64), regression(8, seed=3, dtype=torch.float64)
    trainer.fit(module, loader(data, size), loader(held_out, size), ckpt_path=start)
    weights = gathered(trainer.strategy.named_parameters())
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    momenta = gathered((n, o.state[p]["momentum_buffer"]) for o in trainer.optimizers for n, p in named)
    return weights, momenta, rates.found, {n: float(v) for n, v in trainer.callback_metrics.items()}


class Rates(Callback):
    def __init__(self) -> None:
        self.found: dict[int, list[float]] = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        groups = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.found[trainer.global_step] = groups


def check(
    pool: Any, folder: Path, make: Any, mixes: Any, callbacks: Any = list, stop: int = STOP, interval: Any = None
) -> None:
    """From and to one process and each of `mixes`: equal to one process that was never stopped."""

    def go(name: str, mix: Any, start: Path | None = None) -> Any:
        path = None if start is None else str(start)
        return pool.run(
            train, mix[0], folder / name, mix, make, callbacks, path, interval, process_group=False, timeout=90
        )[0]

    whole = go("whole", ONE)
    saved = {ONE[:2]: folder_of(folder / "whole") / step_name(stop)}
    for number, mix in enumerate(mixes):
        if mix != ONE:
            go(f"from-{number}", mix)
            saved[mix[:2]] = folder_of(folder / f"from-{number}") / step_name(stop)
    pairs = [(start, mix) for start in saved for mix in mixes if start == ONE[:2] or mix == ONE]
    pairs += [(start, ONE) for start in saved if (start, ONE) not in pairs]
    for number, (start, mix) in enumerate(pairs):
        weights, momenta, rates, metrics = go(f"again-{number}", mix, saved[start])
        for want, got in ((whole[0], weights), (whole[1], momenta)):
            assert got.keys() == want.keys()
            for name, tensor in want.items():
                torch.testing.assert_close(got[name], tensor, rtol=1e-12, atol=1e-13, msg=f"{start} to {mix}: {name}")
        assert rates == {step: found for step, found in whole[2].items() if step > stop}
        assert metrics == pytest.approx(whole[3], rel=1e-12)


class Plateau(Mlp):
    """Its learning rate falls with a metric that doesn't improve by half."""

    def __init__(self, **config: Any) -> None:
        super().__init__(lr=0.05)
        self.config = config

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        errors = (self(batch["x"]) - batch["y"]) ** 2
        loss = errors.mean()
        self.log("train_loss", loss)
        self.log("mean", loss, on_step=False, on_epoch=True)
        self.log("most", errors.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("sum", errors.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch["x"]), batch["y"]))

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **self.config}}


@pytest.mark.parametrize(
    ("config", "interval"),
    [
        ({"monitor": "val_loss"}, None),
        ({"monitor": "mean"}, None),
        ({"monitor": "train_loss", "interval": "step"}, None),
        # asked two steps after a validation
        ({"monitor": "val_loss", "interval": "step", "frequency": 2, "strict": False}, 3),
    ],
)
def test_a_schedule_that_watches_a_metric_goes_on(pool: Any, tmp_path: Path, config: Any, interval: Any) -> None:
    check(pool, tmp_path, partial(Plateau, **config), [ONE, FSDP], interval=interval)


class Watching(Callback):
    """The epoch's values, as callbacks find them at its end."""

    def __init__(self) -> None:
        self.found: dict[int, dict[str, float]] = {}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        found = {name: float(trainer.callback_metrics[name]) for name in ("mean", "most", "sum")}
        self.found[trainer.current_epoch] = found


def epochs_of(run_dir: Path, mix: Any, start: str | None) -> Any:
    watching = Watching()
    train(run_dir, mix, partial(Plateau, monitor="val_loss"), lambda: [watching], start)
    return watching.found


@pytest.mark.parametrize("stop", [STOP, STEPS])
def test_an_epochs_values_are_those_of_all_of_it(pool: Any, tmp_path: Path, stop: int) -> None:
    """Saved within the epoch; and when training ended there, which clears Lightning's sums."""
    whole = pool.run(epochs_of, 1, tmp_path / "whole", ONE, None, process_group=False)[0]
    start = folder_of(tmp_path / "whole") / step_name(8)
    for mix in (ONE, FSDP):
        (found, *_) = pool.run(epochs_of, mix[0], tmp_path / "again", mix, str(start), process_group=False)
        assert found.keys() == {1, 2}
        for epoch, values in found.items():
            assert values == pytest.approx(whole[epoch], rel=1e-12)


class Freeze(Callback):
    """The first layer is trained in the first epoch only."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.layers[0].requires_grad_(False)


def with_freeze() -> list[Callback]:
    return [Freeze()]


def test_what_was_frozen_on_the_way_stays_frozen(pool: Any, tmp_path: Path) -> None:
    check(pool, tmp_path, partial(Plateau, monitor="val_loss"), [ONE, ONE_UNIT], with_freeze)


class Half(Plateau):
    """Only what is trained at first is the optimizer's; the rate falls with each step."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"},
        }


class Thaw(BaseFinetuning):
    """As Lightning's `BackboneFinetuning`."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[0], optimizer, lr=0.01)


def with_thaw() -> list[Callback]:
    return [Thaw()]


@pytest.mark.parametrize("stop", [3, STOP])
def test_what_was_thawed_on_the_way_stays_so(pool: Any, tmp_path: Path, stop: int) -> None:
    check(pool, tmp_path, Half, [ONE, OVERLAP, ONE_UNIT], with_thaw, stop=stop)


class Counting(SGD):
    """Keeps two counts that no parameter has, in its state and in what it saves itself; its rate hangs on both."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        held: Any = self.state["steps"]
        held["done"] = held.get("done", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / (self.count + held["done"])
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "count"})


class WithCounting(Plateau):
    def configure_optimizers(self) -> Any:
        return Counting(self.parameters(), lr=0.05, momentum=0.9)


def test_what_an_optimizer_keeps_beside_its_slots_comes_back(pool: Any, tmp_path: Path) -> None:
    check(pool, tmp_path, WithCounting, [ONE, FSDP])


def lines_of(run_dir: Path, start: str | None, lr: float, make: Any = None) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    train(run_dir, ONE, make or partial(Faster, lr), list, start)
    logging.getLogger().removeHandler(handler)
    return lines


class Faster(Plateau):
    """Without a schedule."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=self.lr, momentum=0.9)


def test_another_learning_rate_is_told(pool: Any, tmp_path: Path) -> None:
    pool.run(lines_of, 1, tmp_path / "whole", None, 0.05, process_group=False)
    start = str(folder_of(tmp_path / "whole") / step_name(STOP))
    (same,) = pool.run(lines_of, 1, tmp_path / "same", start, 0.05, process_group=False)
    (other,) = pool.run(lines_of, 1, tmp_path / "other", start, 0.5, process_group=False)
    assert not any("lr of group" in line for line in same)
    assert any("lr of group 0: 0.05 from the checkpoint, this run's settings say 0.5" in line for line in other)


class Longer(Plateau):
    """With a layer that no checkpoint has, which it says."""

    def __init__(self) -> None:
        super().__init__(monitor="val_loss")
        self.strict_loading = False
        self.more = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.more(super().forward(x))


def test_what_strict_loading_lets_pass_is_told(pool: Any, tmp_path: Path) -> None:
    pool.run(lines_of, 1, tmp_path / "whole", None, 0.05, process_group=False)
    start = str(folder_of(tmp_path / "whole") / step_name(STOP))
    (lines,) = pool.run(lines_of, 1, tmp_path / "longer", start, 0.05, Longer, process_group=False)
    assert any("model.more.bias, model.more.weight aren't in the checkpoint" in line for line in lines)


class Shadow(Callback):
    """An average as users write it."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.shadow = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            {"strategy": "fsdp"},
            r"can't hold callbacks\.Shadow\.shadow\.layers\.0\.0\.weight: it is a piece of a sharded",
        ),
        ({"pp": "gpipe"}, r"would lose callbacks\.Shadow\.shadow\.layers\.1\.\d\.\w+ and 1 more of rank 1"),
    ],
)
def test_pieces_in_a_callbacks_state_are_refused(pool: Any, tmp_path: Path, words: Any, told: str) -> None:
    with pytest.raises(RanksError, match=f"{told}.*EMAWeightAveraging"):
        pool.run(save_a_shadow, 2, tmp_path, words, process_group=False)


def save_a_shadow(run_dir: Path, words: Any) -> None:
    checkpoint = option("checkpoint", "dcp", every_n_steps=1)
    chosen = {"checkpoint": checkpoint, **({"pp": option("pp", words["pp"])} if "pp" in words else {})}
    plan = make_plan(2, micro_batch_size=2, run_dir=str(run_dir), trainer={"max_steps": 2}, components=chosen, **words)
    Trainer(plan, callbacks=[Shadow()]).fit(Mlp(), loader(regression(24), plan.batch.local_batch_size))
    gather(None)
