"""`Window`: one optimizer step, from its first micro-step to its division by the true number of tokens.

With w_i the weight (valid tokens, or samples) and l_i the mean loss of micro-batch i, an optimizer step's gradient is

    grad(sum_i w_i l_i) / sum_i w_i        over all data ranks, accumulation steps and micro-batches of the step.

Its denominator is known only at the end. So each micro-batch is weighed against a fixed reference weight, gradients
are averaged as if all weights were equal to it, and one factor at the end corrects the difference; for equal weights
and full windows the factor is exactly 1 and nothing is multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from framework import preemption
from framework.adapters import torch_private
from framework.adapters.torch_private import foreach_mul_, tree_leaves
from framework.errors import RunFailedError, UsageError
from framework.metrics import Entry, Layout, Recorder, Scalar, Totals
from framework.plan import RunPlan
from framework.precision import local
from framework.step_agreement import Step, agree


def batch_size(batch: Any, otherwise: int = 1) -> int:
    """Return dim 0 of the first tensor of a batch, `otherwise` if there is none (text, a class of the user's own)."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.size(0)
    return otherwise


def micro_slices(size: int, pieces: int) -> list[slice]:
    """Return which of the `size` samples of a batch each of `pieces` micro-batches has."""
    bounds = [round(index * size / pieces) for index in range(pieces + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def read_output(output: Any, batch: Any, samples: int = 1) -> tuple[Tensor | None, Scalar, bool]:
    """Return loss, weight and whether the module gave the weight, from what `training_step` returned.

    Where neither module nor tensors of the batch say it, the weight is the number of `samples` that the loader read.
    """
    if isinstance(output, Mapping):
        loss, weight = output.get("loss"), output.get("weight")
    else:
        loss, weight = output, None
    if loss is not None and not isinstance(loss, Tensor):
        raise UsageError(
            f"training_step returned {type(loss).__name__} as its loss; return a 0-dim tensor, "
            'or {"loss": mean, "weight": tokens}.'
        )
    if isinstance(loss, DTensor):
        raise UsageError(
            f"training_step returned a loss over sharded parameters (a DTensor, {loss.placements}), of which each rank "
            "has a piece; leave that term to the optimizer (weight_decay), or type strategy=ddp."
        )
    if weight is None:
        return loss, float(batch_size(batch, samples)), False
    # float64: an integer count divided by a float would be float32, and weigh gradients of an fp64 run by 1e-8 too much
    return loss, weight.detach().double() if isinstance(weight, Tensor) else float(weight), True


class Window:
    """State of the current optimizer step on this rank; one object for the whole run.

    Args:
        module: whose `self.log` is recorded.
        plan: batch arithmetic and the policy for losses that aren't finite.
        contributes: whether this rank's losses and metrics count.
        device: of the agreement.
    """

    def __init__(self, module: LightningModule, plan: RunPlan, contributes: bool, device: torch.device) -> None:
        self.module = module
        self.plan = plan
        self.contributes = contributes
        self.device = device
        self.recorder = Recorder(module)
        self.layout = Layout()
        self.totals = Totals()
        self.last = True
        """Whether the current micro-step ends its window."""
        self.reference: float | None = None
        """Weight of one micro-batch that counts as 1; agreed at the first micro-step of the run."""
        self.token_reference: float | None = None
        """The reference weight that a pipeline uses before it knows whether the module returns weights."""
        self.samples: float = 0.0
        """Global weight of the current window so far."""
        self.counted: float = 0.0
        """Weight of all optimizer steps that this process finished, over all ranks."""
        self.weighted = False
        """Whether the module returns weights (tokens); else weights are samples."""
        self.loss: float | None = None
        """Mean loss of the last finished optimizer step over all ranks; None before the first."""
        self.after_bad = "the weights are those before this step. Type on_nonfinite=skip to leave such steps out."
        """What is left, and what to do, when a loss wasn't finite; a delayed pipeline has something else to say."""
        self._loss_sum = 0.0
        self._weight = 1.0
        self._drop = False

    # -- one micro-step --------------------------------------------------------------------------------------------
    @contextmanager
    def accumulating(self) -> Generator[None, None, None]:
        """Micro-steps inside don't end the window."""
        self.last = False
        try:
            yield
        finally:
            self.last = True

    def close_micro_step(self, output: Any, entries: Mapping[str, Entry], batch: Any, real: int, stop: bool) -> Any:
        """Agree with all ranks on one micro-step; return what Lightning shall see as the output of `training_step`.

        Args:
            output: of the module's `training_step`.
            entries: what it logged.
            batch: what it got.
            real: samples of it that count. 0 = a filler: this rank has none left but has to take part in collectives.
            stop: whether this rank wants to stop.
        """
        loss, weight, weighted = read_output(output, batch, real)
        self.totals.add(entries if real else {}, weight)
        self._weight, value = self.totals.settle(weight if real else 0.0, math.nan if loss is None else loss)
        step = self.agree(None if loss is None else value, self._weight, weighted, stop)
        if self.reference is None:
            self.reference = step.weight / (self.plan.mesh.data_ranks * self.plan.mesh.cp) or None
        if self._drop:
            return {"loss": torch.zeros((), device=self.device, requires_grad=True)}
        return output

    def close_manual_step(self, output: Any, entries: Mapping[str, Entry], batch: Any, real: int, stop: bool) -> Any:
        """As `close_micro_step` where the module has made its optimizer steps itself: what it logged becomes global."""
        weight = float(batch_size(batch, real))
        self.totals.add(entries if real else {}, weight)
        self.totals.settle()
        self.agree(0.0, 0.0, False, stop)
        return output

    def agree(self, loss: float | None, weight: float, weighted: bool, stop: bool) -> Step:
        """One all-reduce over the world; applies what it says about stopping and about bad losses, replays metrics.

        `totals` must be settled.

        Raises:
            UsageError: no weight came with the loss of a piece of each sequence.
        """
        if self.plan.mesh.cp > 1 and self.contributes and loss is not None and not weighted:
            raise UsageError(
                "training_step returned a loss without its weight, and ranks of cp have different numbers of tokens "
                'that count: return {"loss": mean, "weight": tokens}, or type cp=none.'
            )
        step, metrics = agree(
            loss=loss,
            weight=weight,
            weighted=weighted,
            contributes=self.contributes,
            stop=stop,
            totals=self.totals if self.last else None,
            layout=self.layout,
            device=self.device,
        )
        preemption.agree(step.stop > 0)
        self.samples += step.weight
        self._loss_sum += step.loss
        self.weighted = step.weighted
        if step.bad:
            self._on_bad_loss(loss)
        if self.last:
            for name, value, w, options in self.layout.unpack(metrics, self.totals, self.device):
                # an extreme that no rank logged in this step is infinite
                if w > 0 or (options["reduce_fx"] in ("min", "max") and math.isfinite(value)):
                    self.recorder.replay(name, value, options, w)
            self.totals.clear()
        return step

    def _on_bad_loss(self, loss: float | None) -> None:
        step = self.module.trainer.global_step
        if self.plan.on_nonfinite == "skip":
            self._drop = True
            return
        mine = None if not self.contributes else "None" if loss is None else str(loss)
        values: list[str | None] = [mine]
        if dist.is_initialized():
            values = [None] * dist.get_world_size()
            dist.all_gather_object(values, mine)
        bad = [
            f"rank {rank} ({value})"
            for rank, value in enumerate(values)
            if value is not None and (value == "None" or not math.isfinite(float(value)))
        ]
        raise RunFailedError(
            f"The loss isn't finite on {', '.join(bad)} at step {step}; all ranks stopped together, {self.after_bad}"
        )

    # -- its backward ----------------------------------------------------------------------------------------------
    def weigh(self, loss: Tensor) -> Tensor:
        """Return the loss times this micro-batch's weight over the reference weight."""
        if self._drop or self.reference is None:
            return loss
        ratio = self._weight / self.reference
        return loss if ratio == 1.0 else loss * ratio

    def guarded(self, loss: Tensor) -> AbstractContextManager[None]:
        """Backward inside leaves zero gradients, not NaN, if the micro-batch had no valid token (0 / 0)."""
        return torch_private.zero_leaf_gradients(loss) if self._weight == 0.0 and not self._drop else nullcontext()

    # -- its end ---------------------------------------------------------------------------------------------------
    def normalise(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide by the true weight of the window; call once, after the last backward, before clipping."""
        factor = self.close()
        if factor != 1.0:
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for parameter in parameters:
                if parameter.grad is not None:
                    by_dtype.setdefault(parameter.grad.dtype, []).append(local(parameter.grad))
            for gradients in by_dtype.values():
                foreach_mul_(gradients, factor)

    def close(self) -> float:
        """End the window; return what its gradients have to be multiplied by, 1 if the step will be dropped."""
        batch, mesh = self.plan.batch, self.plan.mesh
        pieces = mesh.data_ranks * mesh.cp * batch.accumulation * batch.microbatches
        total = self.account()
        if total == 0.0:
            self._drop = True
        if self._drop or self.reference is None:
            return 1.0
        return pieces * self.reference / total

    @property
    def dropping(self) -> bool:
        """Whether all ranks agreed to leave this optimizer step out."""
        return self._drop

    def account(self) -> float:
        """Close the books: set `loss` to the mean over what was agreed on since; return the weight of it."""
        total, self.samples = self.samples, 0.0
        loss_sum, self._loss_sum = self._loss_sum, 0.0
        self.counted += total
        self.loss = loss_sum / total if total else None
        return total

    def take_drop(self) -> bool:
        """Whether this optimizer step must be dropped; forgets it."""
        drop, self._drop = self._drop, False
        return drop
