"""`strategy=fsdp` on modules that use their parameters in unusual places."""

from __future__ import annotations

from typing import Any

import torch
from fitting import fit
from plans import make_plan
from torch import Tensor, nn
from user_modules import Mlp, loader, regression

from framework.verify.reference import Bounds, Result, disagreements, train

DATA = regression(samples=40)


class HeadOutside(Mlp):
    """Its step method uses a layer after it called the module itself."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.head = nn.Linear(4, 4)
        for parameter in self.head.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.head(self(batch["x"])), batch["y"])
        self.log("train_loss", loss)
        return loss


def mean_squared_error(model: HeadOutside, batch: Any) -> tuple[Tensor, int]:
    return nn.functional.mse_loss(model.head(model(batch["x"])), batch["y"]), len(batch["x"])


def test_a_layer_used_after_the_module_was_called_is_whole(pool) -> None:
    plan = make_plan(2, strategy="fsdp", micro_batch_size=4)
    want = train(HeadOutside(), [[batch] for batch in loader(DATA, 8)], mean_squared_error, lr=0.1, momentum=0.9)
    for probe in pool.run(fit, 2, plan, HeadOutside, DATA, process_group=False):
        updates = {name: probe.final[name] - start for name, start in probe.initial.items()}
        got = Result(losses=probe.losses, first_gradients=probe.gradients[0], updates=updates)
        got.grad_norms = want.grad_norms
        assert disagreements(got, want, Bounds(1e-6, 1e-5, 1e-5)) == []
