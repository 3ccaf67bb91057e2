"""A few samples of a run's data, collated as its training loader does: with them a model is followed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from framework import objects
from framework.adapters import lightning_private
from framework.adapters.torch_private import tree_map
from framework.errors import UsageError
from framework.plan import RunPlan
from framework.window import batch_size

log = logging.getLogger(__name__)


def example_batch(module: LightningModule, plan: RunPlan, device: torch.device) -> Any:
    """Return a micro-batch as the step method gets it; None if there is no Trainer yet, and no data without one.

    In a worker it comes from the Trainer's own data, in the launcher from the plan's; nothing is read twice in training
    but these samples.
    """
    trainer = module.__dict__.get("_trainer")
    if trainer is not None:
        loader: Any = lightning_private.loader_source(trainer)
    elif plan.components.get("data"):
        spec = {key: value for key, value in plan.components["data"].items() if key != "option"}
        try:
            data = objects.build(spec)
            data.prepare_data()
            data.setup("fit")
            loader = data.train_dataloader()
        except (UsageError, AttributeError, RuntimeError) as error:
            log.info("The data can't be read before there is a Trainer (%s): the ranks check the cut.", error)
            return None
    else:
        return None
    batch = _first(loader, plan.batch.micro_batch_size)
    return batch if trainer is None else lightning_private.moved(trainer, module, batch, device)


def _first(loader: Any, count: int) -> Any:
    if isinstance(loader, Mapping):
        return {name: _first(one, count) for name, one in loader.items()}
    if not isinstance(loader, DataLoader):
        return [_first(one, count) for one in loader] if isinstance(loader, Sequence) else next(iter(loader))
    dataset, collate = loader.dataset, loader.collate_fn
    if loader.batch_size is None and loader.batch_sampler is None:  # the data set yields batches
        batch = next(iter(dataset)) if isinstance(dataset, IterableDataset) else dataset[0]
        size = batch_size(batch)
        return tree_map(lambda x: x[:count] if isinstance(x, Tensor) and x.ndim and x.size(0) == size else x, batch)
    if isinstance(dataset, IterableDataset):
        return collate(list(islice(iter(dataset), count)))
    indices = list(range(min(count, len(dataset))))  # type: ignore[arg-type]
    fetch = getattr(dataset, "__getitems__", None)
    return collate(fetch(indices) if fetch is not None else [dataset[index] for index in indices])
