"""`fit`: one run of the framework's Trainer inside a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Dataset
from user_modules import Probe, Seen, loader

from framework.plan import RunPlan
from framework.trainer import Trainer


def fit(
    plan: RunPlan,
    module: Callable[[], Any],
    data: Dataset[Any] | DataLoader[Any],
    *,
    callbacks: Sequence[Callback] = (),
    ckpt_path: str | None = None,
    save_to: str | None = None,
    logger: Any = None,
    loss: str = "train_loss",
    tensors: bool = True,
) -> Seen:
    """Train `module()` on `data`, in order, and return what the probe saw.

    Args:
        plan: of the run; this process is one of its ranks.
        module: makes the LightningModule (`functools.partial(Scalar, w=1.0)`).
        data: its samples are read in order; or a loader of the test's own.
        callbacks: more callbacks.
        ckpt_path: resume from here.
        save_to: write a checkpoint here at the end.
        logger: a Lightning logger.
        loss: name under which the module logs its loss.
        tensors: collect gradients and weights too.
    """
    probe = Probe(loss, tensors)
    torch.manual_seed(plan.seed)
    trainer = Trainer(plan, callbacks=[*callbacks, probe])
    if logger is not None:
        trainer.loggers = [logger]
    batches = data if isinstance(data, DataLoader) else loader(data, plan.batch.local_batch_size)
    trainer.fit(module(), batches, ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    seen, precision = probe.seen, trainer.precision_plugin
    seen.scale = precision.state_dict().get("scale", {}).get("scale")
    seen.skipped = precision.skipped_steps
    seen.grad_norm = None if trainer.strategy.grad_norm is None else float(trainer.strategy.grad_norm)
    return seen
