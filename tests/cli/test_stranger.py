"""A stranger's module, kept outside of any package of ours, verified from the command line alone.

A small vision transformer on scikit-learn's digits: a batch is a dictionary, the loss has two parts, three metrics are
logged. Nothing in it knows of the framework.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from framework import cli
from framework.errors import EXIT_OK

MODULE = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Vit(LightningModule):
    def __init__(self, width=16, depth=4, heads=2):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Parameter(torch.randn(16, width) * 0.02)
        self.encoder = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.classes, self.pixels = nn.Linear(width, 10), nn.Linear(width, 4)

    def forward(self, image):
        x = self.norm(self.encoder(self.patches(image).flatten(2).transpose(1, 2) + self.places))
        return self.classes(x.mean(1)), self.pixels(x)

    def training_step(self, batch, batch_idx):
        logits, pixels = self(batch["image"])
        label = F.cross_entropy(logits, batch["label"])
        patches = F.unfold(batch["image"], 2, stride=2).transpose(1, 2)
        rebuilt = F.mse_loss(pixels, patches)
        self.log("label_loss", label)
        self.log("rebuilt_loss", rebuilt)
        self.log("accuracy", (logits.argmax(-1) == batch["label"]).float().mean())
        return label + 0.5 * rebuilt

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Scans(Dataset):
    def __init__(self):
        found = load_digits()
        self.images = torch.tensor(found.images / 16, dtype=torch.float32)[:, None]
        self.labels = torch.tensor(found.target)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": self.labels[index]}


class Digits(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Scans(), batch_size=16)
"""

MIXES = {
    "ddp": ["+strategy=ddp"],
    "fsdp": ["+strategy=fsdp"],
    "tp by patterns": [
        "+tp=dtensor",
        "tp.plan={encoder.*.attention.q: colwise, encoder.*.attention.k: colwise, encoder.*.attention.v: colwise, "
        "encoder.*.attention.out: rowwise, encoder.*.up: colwise, encoder.*.down: rowwise, encoder.*.norm?: norm}",
    ],
    "pp by cost": ["+pp=gpipe", "pp.balance=flops"],
    "pp x fsdp": ["+pp=1f1b", "+strategy=fsdp"],
}


@pytest.mark.parametrize("mix", MIXES)
def test_a_strangers_vision_transformer(mix, capsys, tmp_path: Path, monkeypatch):
    (tmp_path / "strangers_vit.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    mine = ["model._target_=strangers_vit.Vit", "data._target_=strangers_vit.Digits"]
    assert cli.main(["verify", *MIXES[mix], *mine, "--steps", "3"]) == EXIT_OK, capsys.readouterr()
    verdicts = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " ranks " in line]
    assert verdicts == ["equal", "equal"]
