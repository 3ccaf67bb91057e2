"""A run in which some ranks save at a chosen moment, some late: for P45."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from user_modules import Mlp, loader, regression

from framework import roll_call
from framework.plan import RunPlan
from framework.state import full_state_dict
from framework.trainer import Trainer


class Saves(Callback):
    """Saves once at a moment, on some ranks; each rank waits before it does.

    Args:
        folder: where to.
        moment: name of the hook.
        ranks: which ranks save.
        late: rank -> seconds.
    """

    what = "save"

    def __init__(self, folder: str, moment: str, ranks: tuple[int, ...], late: dict[int, float] | None = None) -> None:
        self.folder, self.ranks, self.late = Path(folder), ranks, late or {}
        self.saved = False
        setattr(self, moment, self._save)

    def _save(self, trainer: Any, *_: Any) -> None:
        if self.saved or trainer.sanity_checking or (trainer.training and trainer.global_step < 1):
            return
        self.saved = True
        rank = trainer.global_rank
        (self.folder / f"at-{rank}").write_text(str(time.time()))
        time.sleep(self.late.get(rank, 0.0))
        if rank not in self.ranks:
            return
        if self.what == "save":
            trainer.save_checkpoint(self.folder / "saved")
        elif self.what == "full_state_dict":
            torch.save(full_state_dict(trainer.lightning_module), self.folder / f"whole-{rank}")
        else:  # what each rank holds: others aren't asked
            states = trainer.strategy.lightning_module_state_dict(), trainer.lightning_module.state_dict()
            (self.folder / f"held-{rank}").write_text(" ".join(sorted({*states[0], *states[1]})))


def train(plan: RunPlan, rank: int | None = None, manager: Any = None) -> str:
    """An entry: two epochs of three steps, with validation."""
    torch.set_num_threads(1)
    spec = json.loads((Path(plan.run_dir) / "probe.json").read_text())
    saves = Saves(plan.run_dir, spec["moment"], tuple(spec["ranks"]), dict(spec["late"]))
    saves.what = spec.get("what", "save")
    size = plan.batch.local_batch_size
    module = Validated()
    Trainer(plan, callbacks=[saves], manager=manager).fit(
        module, loader(regression(12), size), loader(regression(8, seed=3), size)
    )
    return "done"


class Validated(Mlp):
    """With a validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.nn.functional.mse_loss(self(batch["x"]), batch["y"]))


def gather_and_call(late_s: float) -> None:
    """Called on 3 ranks: gathers a module that rank 1 alone holds, then calls the roll, rank 1 late."""
    world = dist.group.WORLD
    assert world is not None
    call = roll_call.attend([world], 60.0)
    module = Mlp()
    if dist.get_rank() != 1:
        module.to("meta")
    full_state_dict(module)
    if dist.get_rank() == 1:
        time.sleep(late_s)
    call.call("this")
