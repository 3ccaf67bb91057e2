"""Modules, data and a probe as a user would write them; only to put pieces together the probe asks the framework."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from framework import agreement
from framework.testing.rank_process import dumps
from framework.verify import pieces


class Scalar(LightningModule):
    """One parameter `w` of shape (1,); the output is w * x, the loss its mean over the valid tokens (P07).

    A batch is `{"x": [samples, tokens], "valid": the same shape of 0 and 1}`.
    """

    def __init__(self, w: float = 0.0, lr: float = 0.1, momentum: float = 0.0, halve: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))
        self.lr, self.momentum, self.halve = lr, momentum, halve

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        valid = batch["valid"]
        loss = (self(batch["x"]) * valid).sum() / valid.sum()
        self.log("train_loss", loss)
        return {"loss": loss, "weight": valid.sum()}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)
        if not self.halve:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Rows(Dataset):
    """Samples given as a mapping of tensors whose first dimension counts samples."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def tokens(*samples: Sequence[float]) -> Rows:
    """Samples of different lengths, padded with values that must not count."""
    width = max(len(sample) for sample in samples)
    x = torch.tensor([[*sample, *[1000.0] * (width - len(sample))] for sample in samples])
    valid = torch.tensor([[1.0] * len(sample) + [0.0] * (width - len(sample)) for sample in samples])
    return Rows(x=x, valid=valid)


def loader(dataset: Dataset, batch_size: int) -> DataLoader:
    """In order."""
    return DataLoader(dataset, batch_size=batch_size, shuffle=False)


class Mlp(LightningModule):
    """Linear 4 to 8, ReLU, Linear 8 to 4 as two blocks; mean squared error; no weight returned: samples count alike."""

    def __init__(self, lr: float = 0.1, momentum: float = 0.9, seed: int = 5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 4), nn.ReLU())]
        )
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
        self.lr, self.momentum = lr, momentum

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch["x"]), batch["y"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


class TwoHeads(Mlp):
    """Head B takes part in the loss on some ranks, or nowhere.

    Args:
        ranks: on which head B is used.
        optimizer: of all parameters.
    """

    def __init__(self, ranks: tuple[int, ...], optimizer: str = "sgd") -> None:
        super().__init__()
        self.ranks, self.optimizer_name = ranks, optimizer
        generator = torch.Generator().manual_seed(5)
        self.head_b = nn.Linear(4, 4)
        for parameter in self.head_b.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = self(batch["x"])
        loss = nn.functional.mse_loss(y, batch["y"])
        if self.global_rank in self.ranks:
            loss = loss + self.head_b(batch["x"]).sum()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)
        return torch.optim.SGD(self.parameters(), lr=0.01)


def regression(samples: int, seed: int = 11, dtype: torch.dtype = torch.float32) -> Rows:
    """Random `x` and `y` of 4 columns."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, samples, 4, generator=generator, dtype=torch.float64).to(dtype)
    return Rows(x=x, y=y)


@dataclass
class Seen:
    """What a run showed on one rank: lists by optimizer step, mappings by parameter name. All tensors are whole."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    initial: dict[str, Tensor] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    global_step: int = 0
    grad_norm: float | None = None
    scale: float | None = None
    skipped: int = 0
    logged: dict[str, float] = field(default_factory=dict)


class Probe(Callback):
    """Collects, on every rank, what the reference is compared with.

    Args:
        loss: name under which the module logs its loss.
        tensors: collect gradients and weights too.
    """

    def __init__(self, loss: str = "train_loss", tensors: bool = True) -> None:
        self.loss = loss
        self.tensors = tensors
        self.seen = Seen()

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.seen.initial = gathered(trainer.strategy.named_parameters())
        self.seen.global_step = trainer.global_step

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        self.seen.rates.append(float(optimizer.param_groups[0]["lr"]))
        if self.tensors:
            self.seen.gradients.append(gathered(trainer.strategy.named_gradients()))

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step > self.seen.global_step:
            self.seen.global_step = trainer.global_step
            self.seen.losses.append(float(trainer.callback_metrics[self.loss]))

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.seen.final = gathered(trainer.strategy.named_parameters())
        self.seen.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}


def gathered(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return whole tensors by name, from whichever ranks have them; raise if two ranks that have one don't agree."""
    everyone = [pickle.loads(theirs) for theirs in agreement.gather(dumps(pieces.of(named)))]
    whole, apart = pieces.whole(everyone)
    for name, distance in apart.items():
        if distance > 1e-6:
            raise AssertionError(f"{name} is {distance:.1e} away from that of the ranks before")
    return whole
