"""`framework.Trainer(plan, spawn=True)`: ranks started by Lightning's own launcher, as a user's pytest does it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plans import make_plan
from torch import nn
from user_modules import Mlp, loader, regression

from framework.trainer import Trainer
from framework.verify.reference import Bounds, Result, disagreements, train

DOCS = Path(__file__).parents[2] / "docs" / "testing.md"
DATA = regression(samples=40)
MIXES = {
    "ddp": {"strategy": "ddp", "micro_batch_size": 4},
    "fsdp": {"strategy": "fsdp", "micro_batch_size": 4},
    "pp": {"pp": "gpipe", "microbatches": 2, "micro_batch_size": 4},
}


@pytest.mark.timeout(280)
@pytest.mark.parametrize("mix", list(MIXES))
def test_spawned_ranks_train_as_the_reference_does(mix):
    plan = make_plan(2, **MIXES[mix])
    module = Mlp()
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = Trainer(plan, spawn=True)
    trainer.fit(module, loader(DATA, plan.batch.local_batch_size))
    assert "MASTER_PORT" not in os.environ, "it would be stale for whatever runs next in this process"
    want = train(Mlp(), [[batch] for batch in loader(DATA, 8)], mean_squared_error, lr=0.1, momentum=0.9)
    updates = {name: p.detach() - start[name] for name, p in module.named_parameters()}
    assert disagreements(Result(updates=updates), Result(updates=want.updates), Bounds(1e-6, 1e-5, 1e-5)) == []
    assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(want.losses[-1], rel=1e-6)


def mean_squared_error(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"]), len(batch["x"])


def examples() -> dict[str, str]:
    """The tests printed in docs/testing.md, by file name."""
    return dict(re.findall(r"<!-- example: (\S+) -->\n```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL))


MY_PROJECT = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MyModule(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def training_step(self, batch, batch_idx):
        (x,) = batch
        for layer in self.layers:
            x = layer(x).tanh()
        loss = x.square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MyData(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(320, 4)), batch_size=16)
"""


@pytest.mark.timeout(280)
@pytest.mark.parametrize("name", sorted(examples()))
def test_examples_of_the_documentation_pass_as_printed(name, tmp_path):
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    (tmp_path / name).write_text(examples()[name])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


def test_the_documented_example_has_five_lines_of_its_own():
    body = examples()["test_my_module.py"].split("def test_my_module_under_fsdp():\n")[1]
    assert len([line for line in body.splitlines() if line.strip()]) <= 5
