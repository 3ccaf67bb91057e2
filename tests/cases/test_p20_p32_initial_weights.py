"""P20: a tied matrix stays one through every phase of a run. P32: initial weights don't depend on the mix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from plans import make_plan, option
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from user_modules import Rows

from framework.plan import RunPlan
from framework.state import full_state_dict
from framework.trainer import Trainer, build_model

SHAPE = {"_target_": "framework_plugins.model.gpt.GPT", "vocab_size": 10, "width": 8, "layers": 4, "heads": 2}


def rows() -> Rows:
    ids = torch.randint(0, 10, (16, 7), generator=torch.Generator().manual_seed(3))
    return Rows(inputs=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous())


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Ties(Callback):
    """Notes, phase by phase, how far embedding and head are apart, and the losses."""

    def __init__(self) -> None:
        self.apart: dict[str, float] = {}
        self.losses: list[float] = []
        self.one: list[bool] = []
        self.trained = 0

    def look(self, phase: str, module: Any) -> None:
        self.apart[phase] = float((whole(module.tokens.weight) - whole(module.output.weight)).abs().max())
        self.one.append(module.tokens.weight is module.output.weight)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.look("start", pl_module)
        held = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
        self.trained = sum(p.numel() for p in held if p.shape == (10, 8))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.look(f"step {trainer.global_step}", pl_module)
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


def run(plan: RunPlan, save_to: str | None = None, ckpt_path: str | None = None) -> dict[str, Any]:
    """Train as one rank of `plan`; return what the callback noted and the exported weights."""
    ties = Ties()
    trainer = Trainer(plan, callbacks=[ties])
    module = build_model(plan)
    assert all(parameter.is_meta for parameter in module.parameters()), "built without memory"
    trainer.fit(module, DataLoader(rows(), batch_size=plan.batch.local_batch_size), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return {
        "apart": ties.apart,
        "losses": ties.losses,
        "one": all(ties.one),
        "trained": ties.trained,
        "export": full_state_dict(module),
    }


def plan(world: int, steps: int, optimizer: str = "sgd", **settings: Any) -> RunPlan:
    components = {
        "model": {**SHAPE, "tied": True},
        "optimizer": option("optimizer", optimizer, lr=0.5 if optimizer == "sgd" else 0.01),
        "checkpoint": option("checkpoint", "dcp"),
    }
    trainer = {"max_steps": steps, "max_epochs": -1}
    return make_plan(world, components=components, trainer=trainer, **settings)


MIXES = {
    "fsdp": {"world": 2, "strategy": "fsdp", "micro_batch_size": 2},
    "ddp": {"world": 2, "strategy": "ddp", "micro_batch_size": 2},
    "fsdp x tp": {"world": 4, "strategy": "fsdp", "tp": 2, "micro_batch_size": 2},
}


@pytest.mark.parametrize("mix", MIXES)
def test_p20_a_tied_matrix_stays_one(pool: Any, tmp_path: Any, mix: str) -> None:
    settings, where = MIXES[mix], str(tmp_path / "saved")
    world = settings["world"]
    alone = pool.run(run, 1, plan(1, 4, micro_batch_size=4), process_group=False)[0]
    before = pool.run(run, world, plan(steps=2, **settings), save_to=where, process_group=False)  # type: ignore[misc]
    after = pool.run(run, world, plan(steps=4, **settings), ckpt_path=where, process_group=False)  # type: ignore[misc]
    for notes in (*before, *after):
        assert set(notes["apart"].values()) == {0.0}
        assert len(notes["apart"]) == 3
        assert notes["one"]
        assert notes["trained"] == 80, "counted once"
    losses = before[0]["losses"] + after[0]["losses"]
    assert losses == pytest.approx(alone["losses"], rel=1e-6)
    export = after[0]["export"]
    assert torch.equal(export["tokens.weight"], export["output.weight"])
    assert torch.allclose(export["tokens.weight"], alone["export"]["tokens.weight"], rtol=1e-4, atol=1e-6)


def initial(plan: RunPlan) -> dict[str, Tensor]:
    """Whole initial weights, as the mix makes them."""
    trainer = Trainer(plan)
    module = build_model(plan)

    class Stop(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.weights = full_state_dict(pl_module)

    stop = Stop()
    trainer.callbacks.append(stop)
    trainer.fit(module, DataLoader(rows(), batch_size=plan.batch.local_batch_size))
    return stop.weights


LAYOUTS = {
    "tp": {"world": 2, "tp": 2, "micro_batch_size": 4},
    "fsdp x tp": {"world": 4, "strategy": "fsdp", "tp": 2, "micro_batch_size": 2},
    "fsdp x gpipe": {"world": 4, "strategy": "fsdp", "pp": "gpipe", "microbatches": 2},
    "zbv": {"world": 2, "pp": "zbv", "microbatches": 4},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_p32_initial_weights_are_those_of_one_process(pool: Any, layout: str) -> None:
    def of(world: int, **settings: Any) -> dict[str, Tensor]:
        made = plan(world, 1, **settings)
        made = made.with_(components={**made.components, "model": {**SHAPE, "tied": False}})
        weights: dict[str, Tensor] = pool.run(initial, world, made, process_group=False)[0]
        return weights

    one, other = of(1, micro_batch_size=4), of(**LAYOUTS[layout])  # type: ignore[arg-type]
    assert set(one) == set(other)
    for name in one:
        assert torch.equal(one[name], other[name]), name
