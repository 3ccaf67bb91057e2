"""The one small all-reduce of a training step: what all ranks must know and decide together.

Each `training_step` ends with one all-reduce of a few float64 numbers over the world: how many ranks met a loss that
isn't finite, how many were asked to stop, the weighted loss and its weight, and (at the last micro-step of an
optimizer step) the metrics logged since. From it every rank draws the same conclusion at the same step, so nobody waits
in a collective that others skip (P35, P37, P40), and the gradients are divided by the true number of tokens of the
whole optimizer step (P07, P08).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from framework.metrics import Layout, Totals

HEAD = 6
"""Numbers before the metrics: bad, loss x weight, weight, stop, changed, weighted."""


@dataclass(frozen=True)
class Step:
    """What all ranks agreed on for one micro-step.

    Attributes:
        bad: ranks whose loss isn't finite or is None.
        stop: ranks that were asked to stop.
        loss: sum of loss x weight over all ranks.
        weight: sum of the weights over all ranks.
        weighted: whether the module returned a weight.
    """

    bad: int
    stop: int
    loss: float
    weight: float
    weighted: bool


def agree(
    *,
    loss: Tensor | None,
    weight: Tensor | float,
    weighted: bool,
    contributes: bool,
    stop: bool,
    totals: Totals | None,
    layout: Layout,
    device: torch.device,
) -> tuple[Step, Tensor]:
    """Reduce one micro-step over all ranks.

    Args:
        loss: this rank's mean loss, 0-dim; None if `training_step` returned None.
        weight: samples or tokens that the mean is over.
        weighted: whether the weight was returned by the module.
        contributes: whether this rank's loss and metrics count (last stage, first tensor-parallel rank).
        stop: whether this rank was asked to stop.
        totals: metrics logged since the last optimizer step; None in all but the last micro-step of a window.
        layout: the agreed names.
        device: of the collective.

    Returns:
        The agreement and the reduced payload of metrics (`2 * len(layout.options)` float64).
    """
    counted = totals if contributes and totals is not None else Totals()
    zero = torch.zeros((), dtype=torch.float64, device=device)
    w = torch.as_tensor(weight, dtype=torch.float64, device=device) if contributes else zero
    if loss is None or not contributes:
        bad, weighted_loss = torch.full_like(zero, float(loss is None and contributes)), zero
    else:
        value = loss.detach().to(device=device, dtype=torch.float64)
        bad = (~torch.isfinite(value) & (w > 0)).double()
        weighted_loss = torch.where(w > 0, torch.nan_to_num(value) * w, zero)
    flags = [float(stop), float(layout.misses(counted)), float(weighted and contributes)]
    head = torch.cat([torch.stack([bad, weighted_loss, w]), torch.tensor(flags, dtype=torch.float64, device=device)])
    payload = layout.pack(counted, device) if totals is not None else []
    vector = torch.cat([head, torch.stack(payload)]) if payload else head
    if dist.is_initialized():
        dist.all_reduce(vector)
    numbers = vector[:HEAD].tolist()
    step = Step(bad=int(numbers[0]), stop=int(numbers[3]), loss=numbers[1], weight=numbers[2], weighted=numbers[5] > 0)
    metrics = vector[HEAD:]
    if numbers[4] > 0:  # somebody met a new name: exchange names once
        layout.agree(counted, contributes)
        metrics = torch.stack(layout.pack(counted, device))
        if dist.is_initialized():
            dist.all_reduce(metrics)
    return step, metrics
