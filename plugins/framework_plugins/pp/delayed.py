"""`DelayedPipeline`: a pipeline that is never empty; each batch's gradient is applied some optimizer steps later.

One Lightning step is one batch. In call t a stage runs, for each micro-batch k of batch t, F(k) and then B(k - lag),
lag = stages - 1 - stage: its gradient left the next stage one micro-batch earlier, so that stages needn't wait for one
another in turn. Then it applies the gradient of batch t - delay:

* PipeDream (Narayanan et al., 2019), one micro-batch a batch: delay = lag. A batch goes through each stage with that
  stage's newest weights and back with the same ones (weight stashing), or through all stages with the newest weights of
  the first (vertical sync).
* PipeDream-2BW (Narayanan et al., 2021): delay = 1 on all stages, so W(t+1) = W(t) - lr * grad f(W(t-1)), and two
  versions are held however deep the pipeline is.

A batch's weights are leaves of their own that share storage with the parameters, swapped in by `functional_call` for
both passes (recomputed activations see them too). Before an optimizer step writes to storage that a batch on its way
still needs, the parameters move to a copy: stage s holds `delay + 1` versions, and copies only what has to be kept.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework import preemption
from framework.adapters import lightning_private, torch_private
from framework.errors import RunFailedError, UsageError
from framework.mesh import Mesh
from framework.metrics import Scalar, add_up, numbers
from framework.parts import ModelPart
from framework.pipeline import Pipeline, shape_key
from framework.plan import RunPlan
from framework.stages import Caller, Stage
from framework.window import read_output

if TYPE_CHECKING:
    from framework.precision import Precision
    from framework.window import Window

TRACE = ("stage", "batch", "micro", "version", "forward", "backward")
"""Columns of a trace: `version` counts the optimizer steps in the weights, the last two are hashes of them."""


NOT_FINITE = "since gradients are delayed, weights may have learned from it already"


@dataclass(eq=False)
class _Batch:
    """A batch on its way: the weights of its passes, and their gradients so far."""

    number: int
    version: int
    weights: dict[str, Tensor]
    share: float = 0.0
    """Sum of its micro-batches' weights, over the weight of a usual one."""


@dataclass(eq=False)
class _Unit:
    """One micro-batch between its forward and its backward."""

    batch: _Batch
    micro: int
    received: Sequence[Tensor]
    outputs: Sequence[Tensor]
    share: Scalar = 1.0
    hash: str = ""


@dataclass
class _Seen:
    """What the last stage found since the ranks agreed last."""

    losses: list[Tensor] = field(default_factory=list)
    weights: list[Scalar] = field(default_factory=list)
    weighted: bool = False


class _Inside(nn.Module):
    """Runs a function; what `functional_call` calls, so that any code sees the swapped weights."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, function: Callable[[], Any]) -> Any:
        """Call it."""
        return function()


class DelayedPipeline(Pipeline):
    """This rank's stage, and the batches that are on their way through it.

    Args:
        parts: this rank's one stage.
        mesh: no axis but `pp` is larger than 1.
        plan: batch arithmetic, and where traces are written.
        device: of this rank.
        delay: calls after its own in which a batch's gradient is applied, the same on all stages; None = stages - 1 -
            stage.
        vertical_sync: all stages use the version that the first one has when a batch enters.
        sync_every: optimizer steps between two agreements of all ranks (metrics, losses that aren't finite, SIGTERM).
        trace: whether each micro-batch's weights are hashed in forward and backward; written when drained.
    """

    delayed = True

    def __init__(
        self,
        parts: Sequence[ModelPart],
        mesh: Mesh,
        plan: RunPlan,
        device: torch.device,
        *,
        delay: int | None = None,
        vertical_sync: bool = False,
        sync_every: int = 1,
        trace: bool = False,
    ) -> None:
        super().__init__(parts, mesh, plan, _no_schedule, device)
        (self.part,) = self.parts
        self.lag = self.part.stages - 1 - self.part.index
        self.delay = self.lag if delay is None else delay
        self.drain_steps = self.part.stages - 1 if delay is None else delay
        """Optimizer steps that draining takes; the same on all ranks, since clipping is collective."""
        self.vertical_sync = vertical_sync
        self.sync_every = sync_every
        self.versions_held = 0
        """The most versions of the weights that were alive at once."""
        self._inside = _Inside(self.part.module)
        self._named = {
            f"stage.{name}": p for name, p in self.part.module.named_parameters() if p not in self.part.foreign
        }
        self._back = dist.new_group()  # gradients: NCCL would let two sends in opposite directions wait for each other
        self._units: deque[_Unit] = deque()
        self._batches: deque[_Batch] = deque()
        self._due: _Batch | None = None
        self._history: dict[int, dict[str, Tensor]] = {}
        self._version = 0
        self._base = 0  # version at which the pipeline was empty last
        self._calls = 0  # since then
        self._sent: list[tuple[Any, Any]] = []
        self._seen = _Seen()
        self._agreed = False
        self._trace = Path(plan.run_dir) / f"versions-stage{self.part.index}.csv" if trace else None
        self._rows: list[tuple[Any, ...]] = []

    # -- a step ----------------------------------------------------------------------------------------------------
    def training_step(self, window: Window, precision: Precision, batch: Any, *rest: Any, **kwargs: Any) -> Any:
        """Run the forwards of a batch and the backwards that are due.

        Returns:
            `{"loss": ...}`: mean loss of the steps up to the last agreement, the same on all ranks.
        """
        micros = self.micro_batches(batch)
        mine = self._enter()
        for index, micro in enumerate(micros):
            self._forward(mine, index, micro, window, rest, kwargs)
            while len(self._units) > self.lag:
                self._backward()
        self._due = self._batches.popleft() if len(self._batches) > self.delay else None
        self._calls += 1
        self._sent = [(work, tensors) for work, tensors in self._sent if not work.is_completed()]
        if self._agrees_now():
            self._agree(window)
        value = math.nan if window.loss is None else window.loss
        return {"loss": torch.tensor(value, device=self.device, dtype=torch.float64, requires_grad=True)}

    def merge_gradients(self) -> None:
        """Hand the optimizer the gradient of the batch that is due, on storage that no batch on its way needs."""
        due, self._due = self._due, None
        if due is None:
            return
        kept = self.vertical_sync and self._oldest(self._calls) <= self._version
        if kept or any(unit.batch.version == self._version for unit in self._units):
            for parameter in self._named.values():
                if parameter.requires_grad:
                    parameter.data = parameter.data.clone()
        for name, parameter in self._named.items():
            gradient = due.weights[name].grad
            if gradient is not None:
                if self.plan.batch.microbatches > 1 and due.share > 0:
                    gradient = gradient / due.share
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._version += 1

    def _oldest(self, call: int) -> int:
        """Return the oldest version that call number `call` since the last drain uses on this stage."""
        delay = self.drain_steps if self.vertical_sync else self.delay
        return self._base + max(0, call - delay)

    def _enter(self) -> _Batch:
        """Choose the weights of the batch that comes."""
        version = self._oldest(self._calls) if self.vertical_sync else self._version
        # `data` and not `detach`, which would share the parameter's count of in-place changes
        self._history[self._version] = {name: parameter.data for name, parameter in self._named.items()}
        self._history = {number: held for number, held in self._history.items() if number >= version}
        weights = {name: tensor.data for name, tensor in self._history[version].items()}
        for name, leaf in weights.items():
            leaf.requires_grad_(self._named[name].requires_grad)
        batch = _Batch(self.root.trainer.global_step, version, weights)
        self._batches.append(batch)
        alive = {*self._history, *(unit.batch.version for unit in self._units)}
        self.versions_held = max(self.versions_held, len(alive))
        return batch

    def _within(self, batch: _Batch, function: Callable[[], Any]) -> Any:
        """Call a function while the stage's modules hold the batch's weights."""
        with self.part.view:
            return torch.func.functional_call(self._inside, batch.weights, (function,), tie_weights=False)

    def _forward(self, batch: _Batch, index: int, micro: Any, window: Window, rest: Any, kwargs: Any) -> None:
        stage = self._stage(self.part)
        key = ("training", shape_key(micro))
        received = () if self.part.index == 0 else self._receive(self.part.index, 0, {}, key)
        for tensor in received:
            tensor.requires_grad_(tensor.is_floating_point())
        unit = _Unit(batch, index, received, ())

        def run(_: int, call: Caller) -> Tensor:
            if self.part.masks is not None:
                self.part.masks.micro_batch(index, self.plan.batch.microbatches)
            with window.recorder.recording() as entries:
                output = call(lambda: self.root.training_step(micro, *rest, **kwargs))
            loss, weight, weighted = read_output(output, micro)
            if loss is None:
                raise UsageError(
                    "training_step returned None, which a pipeline can't skip; return a loss, or type pp=none."
                )
            window.totals.add(entries, weight)
            self._seen.losses.append(loss.detach())
            self._seen.weights.append(weight)
            self._seen.weighted |= weighted
            # only the order of magnitude matters: divided out by the sum of the batch's shares
            unit.share = weight / (first_size(micro) if weighted else float(self.plan.batch.micro_batch_size))
            return loss

        stage.run = run
        try:
            result = self._within(batch, lambda: stage(*received, micro=torch.tensor([index])))
        finally:
            stage.run = Stage._not_running
        unit.outputs = result if isinstance(result, tuple) else (result,)
        if self._trace is not None:
            unit.hash = _hash(batch.weights)
        self._units.append(unit)
        if not self.has_last:
            self._send(self.part.index, 0, tuple(unit.outputs), {}, self._sent, key)

    def _backward(self) -> None:
        unit = self._units.popleft()
        several = self.plan.batch.microbatches > 1
        if self.has_last:
            (loss,) = unit.outputs
            empty = float(unit.share) == 0.0
            outputs: list[Tensor] = [loss * torch.as_tensor(unit.share).to(loss) if several else loss]
            gradients: list[Tensor] | None = None
            guard = torch_private.zero_leaf_gradients(outputs[0]) if empty else nullcontext()
        else:
            outputs = [output for output in unit.outputs if output.requires_grad]
            gradients = [self._receive_back(torch.empty_like(output, requires_grad=False)) for output in outputs]
            guard = nullcontext()
            if several:
                unit.share = self._receive_back(torch.empty(1, dtype=torch.float64, device=self.device))
        with guard:
            self._within(unit.batch, lambda: torch.autograd.backward(outputs, gradients))
        unit.batch.share += float(unit.share)
        if self._trace is not None:
            row = (self.part.index, unit.batch.number, unit.micro, unit.batch.version, unit.hash)
            self._rows.append((*row, _hash(unit.batch.weights)))
        if self.part.index == 0:
            return
        for tensor in unit.received:
            if tensor.requires_grad:
                self._send_back(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous())
        if several:
            self._send_back(torch.as_tensor(unit.share, dtype=torch.float64, device=self.device).reshape(1))

    def _send_back(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        work = dist.isend(tensor, group=self._back, group_dst=self.places()[self.part.index - 1])
        self._sent.append((work, tensor))

    def _receive_back(self, buffer: Tensor) -> Tensor:
        dist.recv(buffer, group=self._back, group_src=self.places()[self.part.index + 1])
        return buffer

    # -- what all ranks know ---------------------------------------------------------------------------------------
    def _agrees_now(self) -> bool:
        """Whether all ranks agree in this step: the first, each `sync_every`th, the last of an epoch and of the run."""
        trainer = self.root.trainer
        step = trainer.global_step + 1
        due = step % self.sync_every == 0 or step == trainer.max_steps or lightning_private.at_last_batch(trainer)
        return due or not self._agreed

    def _agree(self, window: Window) -> None:
        self._agreed = True
        window.after_bad = f"{NOT_FINITE}; go on from a checkpoint."
        window.totals.settle()
        losses, weights = self._read_seen()
        weight = sum(weights)
        loss = sum(one * w for one, w in zip(losses, weights, strict=True) if w > 0) / weight if weight else 0.0
        window.agree(loss, weight, self._seen.weighted, stop=preemption.requested())
        window.account()
        self._seen = _Seen()

    def _read_seen(self) -> tuple[list[float], list[float]]:
        """Return losses and weights since the last agreement as numbers of the host."""
        read = numbers([*self._seen.losses, *self._seen.weights])
        return read[: len(self._seen.losses)], read[len(self._seen.losses) :]

    # -- emptying --------------------------------------------------------------------------------------------------
    @property
    def in_flight(self) -> bool:
        """Whether some rank's parameters lack gradients of batches that were trained; the same on all ranks."""
        return self._calls > 0

    def drain(self, step: Callable[[Callable[[], None]], None]) -> None:
        """Finish all batches on their way, then begin anew with an empty pipeline. Collective.

        Args:
            step: makes one optimizer step with the gradients that the function given to it leaves.

        Raises:
            RunFailedError: a loss since the last agreement isn't finite, so that no checkpoint holds what it did.
        """
        if not self._calls:
            return
        bad = [not math.isfinite(one) for one, w in zip(*self._read_seen(), strict=True) if w > 0]
        if add_up([float(any(bad))], self.device)[0]:
            raise RunFailedError(
                f"The loss isn't finite in one of the last steps; {NOT_FINITE}; go on from a checkpoint."
            )
        for number in range(1, self.drain_steps + 1):
            step(partial(self._finish_next, number))
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        self._history.clear()
        self._calls, self._base = 0, self._version
        self._write_trace()

    def _finish_next(self, number: int) -> None:
        """Do what call `number` from now would do if no batch entered any more."""
        if len(self._batches) > self.delay - number and self._batches:
            batch = self._batches.popleft()
            while self._units and self._units[0].batch is batch:
                self._backward()
            self._due = batch
        self.merge_gradients()

    def _write_trace(self) -> None:
        if self._trace is None:
            return
        new = not self._trace.exists()
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        with self._trace.open("a", newline="") as file:
            csv.writer(file).writerows([*([TRACE] if new else []), *self._rows])
        self._rows.clear()


def first_size(batch: Any) -> float:
    """Return the number of elements of a batch's first tensor."""
    first = next(leaf for leaf in torch_private.tree_leaves(batch) if isinstance(leaf, Tensor))
    return float(first.numel())


def _hash(weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _no_schedule(*_: Any) -> Any:
    raise AssertionError("a delayed pipeline has no schedule of torch's")
