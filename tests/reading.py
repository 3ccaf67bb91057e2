"""A dataset that gives its own index and a run that notes which rank read what: for the cases about data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from framework.plan import RunPlan
from framework.trainer import Trainer


class Ids(Dataset[dict[str, Tensor]]):
    """Sample i is `{"id": i}`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"id": torch.tensor(index)}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same, without length or access by number."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return ({"id": torch.tensor(index)} for index in range(self.size))


class Halved(Stream):
    """A stream that each rank of the world yields a part of, as some libraries do."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        return ({"id": torch.tensor(index)} for index in range(rank, self.size, ranks))


class Uneven(Ids):
    """A dataset that is larger on rank 1."""

    def __len__(self) -> int:
        return self.size + dist.get_rank()


class Part(Ids):
    """A dataset of which each rank has another part, of the same size."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index * int(os.environ["WORLD_SIZE"]) + int(os.environ["RANK"]))  # in workers too


class Restless(Ids):
    """A dataset that draws from a generator of its own: no sample is twice the same."""

    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "noise": np.random.default_rng().random()}


class Unseeded(Sampler[int]):
    """Another order on each rank."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8) if dist.get_rank() else range(7, -1, -1))


@dataclass
class Rows:
    """A batch without a tensor that containers would show."""

    id: Tensor

    def __getitem__(self, key: str) -> Tensor:
        value: Tensor = getattr(self, key)
        return value


def rows(samples: list[dict[str, Tensor]]) -> Rows:
    """Collate into `Rows`."""
    return Rows(torch.stack([sample["id"] for sample in samples]))


class Reader(LightningModule):
    """The gradient of sample i is i; only sample 0 is "correct"."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return (self.w * batch["id"]).mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("accuracy", (batch["id"] == 0).double().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Planner(Reader):
    """Asks for the number of steps when it makes its optimizer: Lightning then sets up the training data early."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 6
        return super().configure_optimizers()


class Several(Reader):
    """Validates on several loaders."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
        self.log("mean", batch["id"].double().mean())


class SideBySide(Reader):
    """Validates on a batch of each loader at a time."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", batch["b"]["id"].double().mean())


class SplitReader(Reader):
    """One with a layer that tensor parallelism can split."""

    tp_plan: ClassVar[dict[str, str]] = {"first": "colwise", "second": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 4, bias=False), nn.Linear(4, 1, bias=False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return (self.w * self.second(self.first(batch["id"][:, None].float()))[:, 0]).mean()


class Crash(Exception):
    """As if the process had died."""


@dataclass
class Notes:
    """What one rank read, and what came of it.

    Attributes:
        read: ids of each training batch that counts.
        steps: gradient of each optimizer step.
        checked: ids of each validation batch, fillers included.
        done: optimizer steps of the run at its end.
        accuracy: as logged by the last validation.
    """

    read: list[list[int]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    checked: list[list[int]] = field(default_factory=list)
    done: int = 0
    accuracy: float = float("nan")


class Watch(Callback):
    """Keeps the notes; saves and crashes after so many batches of its rank."""

    def __init__(self, save_at: int | None = None, save_to: str = "", crash_after: int | None = None) -> None:
        self.save_at, self.save_to, self.crash_after = save_at, save_to, crash_after
        self.notes = Notes()
        self.batches = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.loaders.real(trainer, batch_idx):
            self.notes.read.append(batch["id"].tolist())

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradient = pl_module.w.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        self.notes.steps.append(whole.item())

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.batches += 1
        if self.batches == self.save_at:
            trainer.save_checkpoint(self.save_to)
        if self.batches == self.crash_after:
            raise Crash

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        self.notes.checked.append(batch["id"].tolist())


def train(
    plan: RunPlan,
    make: Callable[[], DataLoader[Any]],
    *,
    ckpt_path: str | None = None,
    module: type[Reader] = Reader,
    **options: Any,
) -> Notes:
    """Train as one rank of `plan`."""
    watch = Watch(**options)
    trainer = Trainer(plan, callbacks=[watch])
    with suppress(Crash):
        trainer.fit(module(), make(), ckpt_path=ckpt_path)
    watch.notes.done = trainer.global_step
    return watch.notes


def validate(plan: RunPlan, make: Callable[[], DataLoader[Any]]) -> Notes:
    """Validate as one rank of `plan`."""
    watch = Watch()
    trainer = Trainer(plan, callbacks=[watch])
    trainer.validate(Reader(), make(), verbose=False)
    watch.notes.accuracy = trainer.callback_metrics["accuracy"].item()
    return watch.notes


def validate_several(
    plan: RunPlan, make: Callable[[], Any], module: type[Reader], first: Callable[[], Any] | None = None
) -> dict[str, float]:
    """Validate on what `make` returns, after a fit that has validated on `first`; return what was logged."""
    trainer, model = Trainer(plan), module()
    if first is not None:
        trainer.fit(model, first(), first())
    trainer.validate(model, make(), verbose=False)
    return {name: value.item() for name, value in trainer.callback_metrics.items()}
