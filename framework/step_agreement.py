"""The one small all-reduce of a training step: what all ranks must know and decide together.

Each `training_step` ends with one all-reduce of a few float64 numbers over the world: how many ranks met a loss that
isn't finite, how many were asked to stop, the weighted loss and its weight, and (at the last micro-step of an
optimizer step) the metrics logged since. From it every rank draws the same conclusion at the same step, so nobody waits
in a collective that others skip (P35, P37, P40), and the gradients are divided by the true number of tokens of the
whole optimizer step (P07, P08).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from framework.metrics import Layout, Totals, add_up

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
    loss: float | None,
    weight: float,
    weighted: bool,
    contributes: bool,
    stop: bool,
    totals: Totals | None,
    layout: Layout,
    device: torch.device,
) -> tuple[Step, list[float]]:
    """Reduce one micro-step over all ranks.

    Args:
        loss: this rank's mean loss; None if `training_step` returned None.
        weight: samples or tokens that the mean is over.
        weighted: whether the weight was returned by the module.
        contributes: whether this rank's loss and metrics count (last stage, first tensor-parallel rank).
        stop: whether this rank was asked to stop.
        totals: metrics logged since the last optimizer step; None in all but the last micro-step of a window.
        layout: the agreed names.
        device: of the collective.

    Returns:
        The agreement and the reduced payload of metrics (`2 * len(layout.options)` numbers).
    """
    counted = totals if contributes and totals is not None else Totals()
    w = weight if contributes else 0.0
    bad, weighted_loss = False, 0.0
    if contributes and loss is None:
        bad = True
    elif loss is not None and w > 0:
        bad = not math.isfinite(loss)
        weighted_loss = 0.0 if bad else loss * w
    mine = [bad, weighted_loss, w, stop, layout.misses(counted), weighted and contributes]
    payload = layout.pack(counted) if totals is not None else []
    reduced = add_up([*map(float, mine), *payload], device)
    head, metrics = reduced[:HEAD], reduced[HEAD:]
    step = Step(bad=int(head[0]), stop=int(head[3]), loss=head[1], weight=head[2], weighted=head[5] > 0)
    if head[4] > 0:  # somebody met a new name: exchange names once
        layout.agree(counted, contributes)
        metrics = add_up(layout.pack(counted), device)
    return step, metrics
