"""The truth that every mix is measured against: a plain PyTorch loop in one process.

It imports nothing of the framework, so that a fault of ours can't hide on both sides. The caller hands in a module of
the user's own class with its initial weights, the global batches in order, and how one batch gives a mean loss and the
weight (tokens) which that mean is over.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

LossOf = Callable[[nn.Module, Any], tuple[Tensor, float]]


@dataclass
class Result:
    """What a run is judged by; every list has one entry an optimizer step, every mapping one a parameter (by name)."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    first_gradients: dict[str, Tensor] = field(default_factory=dict)
    updates: dict[str, Tensor] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    """Parameters that don't learn, of a reference; their update is zero."""


def train(
    model: nn.Module,
    steps: Iterable[Sequence[Any]],
    loss_of: LossOf,
    *,
    lr: float = 0.1,
    momentum: float = 0.9,
    clip: float | None = None,
    clip_algorithm: str = "norm",
    schedule: Callable[[int], float] | None = None,
    autocast: torch.dtype | None = None,
    delays: Mapping[str, int] | None = None,
    vertical_sync: bool = False,
    drain_after: Collection[int] = (),
) -> Result:
    """Train `model` in place with SGD and momentum.

    Args:
        model: holds the initial weights; its dtype is the dtype of the run.
        steps: for each optimizer step the pieces of its global batch; the loss is sum(loss_i * weight_i) /
            sum(weight_i), so into how many pieces a batch is cut changes only the order of summation.
        loss_of: `(model, piece) -> (mean loss, weight)`.
        lr: initial learning rate.
        momentum: of SGD.
        clip: bound of the gradient; None = no clipping.
        clip_algorithm: `norm`, `inf_norm` or `value`.
        schedule: factor of the learning rate in optimizer step t (from 0); None = constant.
        autocast: compute dtype of a mixed-precision run; None = the model's own dtype.
        delays: how many steps after its batch's own a parameter's gradient is applied, as an asynchronous pipeline does
            (PipeDream: stages - 1 - stage; PipeDream-2BW: 1); None = none. A batch's gradient is that at each
            parameter's newest value.
        vertical_sync: instead, it is that at the values which the slowest parameters have.
        drain_after: numbers of steps after which gradients that wait are applied in steps of their own, at the learning
            rate of the next step; at the end they are in any case.

    Returns:
        The gradient norms (one a step, those of draining too) and the first gradients are those before clipping.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = Result(frozen=frozenset(start) - frozenset(parameters))
    optimizer = _Sgd(parameters, momentum, clip, clip_algorithm, result)
    late = {name: (delays or {}).get(name, 0) for name in parameters}
    depth = max(late.values(), default=0)
    batches = list(steps)
    waiting: list[dict[str, Tensor]] = []  # gradients of the batches since nothing was late
    values: dict[str, list[Tensor]] = {}  # of each parameter since then

    def step(behind: int, rate: float) -> None:
        """Apply what is due when `behind` more batches have come than are waiting."""
        due = {name: len(waiting) - 1 + behind - delay for name, delay in late.items()}
        due = {name: at for name, at in due.items() if 0 <= at < len(waiting) and name in waiting[at]}
        optimizer.step({name: waiting[at][name] for name, at in due.items()}, rate)
        for name in due if vertical_sync else ():
            values[name].append(parameters[name].detach().clone())

    for t, pieces in enumerate(batches):
        if vertical_sync and not waiting:
            values = {name: [p.detach().clone()] for name, p in parameters.items()}
        old = {name: values[name][max(0, len(waiting) - depth)] for name in parameters} if vertical_sync else {}
        with _replaced(parameters, old):
            loss, gradients = _gradients(model, pieces, loss_of, parameters, autocast)
        result.losses.append(loss)
        waiting.append(gradients)
        step(0, lr * (schedule(t) if schedule else 1.0))
        if t + 1 in drain_after or t + 1 == len(batches):
            for behind in range(1, depth + 1):
                step(behind, lr * (schedule(t + 1) if schedule else 1.0))
            waiting.clear()
    result.updates = {name: p.detach() - start[name] for name, p in model.named_parameters()}
    return result


def _gradients(
    model: nn.Module,
    pieces: Sequence[Any],
    loss_of: LossOf,
    parameters: Mapping[str, nn.Parameter],
    autocast: torch.dtype | None,
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss of a global batch and its gradients."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
        parts = [loss_of(model, piece) for piece in pieces]
    total = sum(weight for _, weight in parts)
    terms = [loss.to(torch.promote_types(loss.dtype, torch.float32)) * w for loss, w in parts if w > 0]
    loss = torch.stack(terms).sum() / total
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad.detach().clone() for name, p in parameters.items() if p.grad is not None}
    return float(loss.detach()), gradients


class _Sgd:
    """SGD with momentum and clipping, as torch's; keeps what a run is judged by."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        momentum: float,
        clip: float | None,
        algorithm: str,
        result: Result,
    ) -> None:
        self.parameters, self.momentum, self.result = parameters, momentum, result
        self.clip, self.algorithm = clip, algorithm
        self.velocity: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], rate: float) -> None:
        """Move the parameters that have a gradient."""
        for name, g in gradients.items():
            self.result.first_gradients.setdefault(name, g)
        self.result.grad_norms.append(global_norm(gradients.values(), 2 if self.algorithm != "inf_norm" else torch.inf))
        if self.clip is not None and self.algorithm == "value":
            gradients = {name: g.clamp(-self.clip, self.clip) for name, g in gradients.items()}
        elif self.clip is not None:
            factor = min(1.0, self.clip / (self.result.grad_norms[-1] + 1e-6))
            gradients = {name: g * factor for name, g in gradients.items()}
        for name, g in gradients.items():
            before = self.velocity.get(name)
            self.velocity[name] = g.clone() if before is None else before.mul_(self.momentum).add_(g)
            # one rounding in low precision, as in torch's SGD
            self.parameters[name].add_(self.velocity[name], alpha=-rate)


@contextlib.contextmanager
def _replaced(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Give parameters other values inside."""
    kept = {name: parameters[name].detach().clone() for name in values}
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
    yield
    with torch.no_grad():
        for name, value in kept.items():
            parameters[name].copy_(value)


def global_norm(tensors: Iterable[Tensor], order: float = 2) -> float:
    """Norm of all elements of all `tensors` together, in double precision; `order` 2 or infinity."""
    tensors = [tensor.double() for tensor in tensors]
    if order == torch.inf:
        return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)
    return float(sum(float(tensor.pow(2).sum()) for tensor in tensors) ** 0.5)


@dataclass(frozen=True)
class Bounds:
    """Largest relative distances that still count as equal."""

    loss: float = 1e-9
    gradient: float = 1e-9
    update: float = 1e-9
    floor: float = 1e-3
    """Share of the global norm below which a tensor's own norm isn't the yardstick: a gradient that is zero in exact
    arithmetic (a key bias, say) is noise, and noise differs between two correct summation orders."""
    moves: float = 1e-6
    """Share of the global update that the reference's update of each tensor must reach, or the row proves nothing about
    it; 0 = no such demand (in bf16 a weight near 1 doesn't move by small steps)."""


@dataclass(frozen=True)
class Distance:
    """How far one number or tensor is from the reference's.

    Attributes:
        kind: `loss`, `grad_norm`, `first gradient`, `update`, or what a caller compares besides.
        name: of the parameter, or the optimizer step.
        distance: relative; infinite if it can't be compared.
        ratio: its size over that of the reference.
        why: what can't be compared, empty if it can.
    """

    kind: str
    name: str
    distance: float
    ratio: float
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: " + (
            self.why or f"relative distance {self.distance:.1e}, {self.ratio:.6g} times the wanted"
        )


def distances(got: Result, want: Result, floor: float) -> list[Distance]:
    """Return the distance of everything that a run is judged by; `floor` as in `Bounds`."""
    return [
        *_scalar_distances("loss of step", got.losses, want.losses),
        *_scalar_distances("grad_norm of step", got.grad_norms, want.grad_norms),
        *tensor_distances("first gradient", got.first_gradients, want.first_gradients, floor),
        *tensor_distances("update", got.updates, want.updates, floor),
    ]


def _scalar_distances(kind: str, got: Sequence[float], want: Sequence[float]) -> list[Distance]:
    if len(got) != len(want):
        return [Distance(kind, "all", math.inf, math.nan, f"{len(got)} values, wanted {len(want)}")]
    return [
        Distance(kind, str(t), abs(a - b) / max(abs(b), 1e-300), a / (b or 1e-300))
        for t, (a, b) in enumerate(zip(got, want, strict=True))
    ]


def tensor_distances(kind: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor], floor: float) -> list[Distance]:
    """Return the distance of each tensor: ||a - b|| / max(||b||, floor x the norm of all)."""
    if set(got) != set(want):
        why = f"missing {sorted(set(want) - set(got))}, too many {sorted(set(got) - set(want))}"
        return [Distance(kind, "all", math.inf, math.nan, why)]
    size = global_norm(want.values())
    found = []
    for name, b in want.items():
        a = got[name]
        if a.shape != b.shape:
            why = f"shape {tuple(a.shape)}, wanted {tuple(b.shape)}"
            found.append(Distance(kind, name, math.inf, math.nan, why))
            continue
        distance = global_norm([a.double() - b.double()]) / max(global_norm([b]), floor * size, 1e-300)
        found.append(Distance(kind, name, distance, global_norm([a]) / max(global_norm([b]), 1e-300)))
    return found


def disagreements(got: Result, want: Result, bounds: Bounds) -> list[str]:
    """Return one line for each number of `got` that isn't that of `want`; empty = equal."""
    allowed = {"loss of step": bounds.loss, "update": bounds.update}
    lines = [
        str(one)
        for one in distances(got, want, bounds.floor)
        if not one.distance <= allowed.get(one.kind, bounds.gradient)
    ]
    for name in unmoved(want, bounds):
        size = global_norm([want.updates[name]])
        lines.append(f"update {name}: the reference moved it by {size:.1e} only; proves nothing")
    return lines


def unmoved(want: Result, bounds: Bounds) -> list[str]:
    """Return the parameters that should learn but hardly moved: nothing is proven about them."""
    size = global_norm(want.updates.values())
    moved = {name: global_norm([update]) for name, update in want.updates.items() if name not in want.frozen}
    return [name for name, norm in moved.items() if norm < bounds.moves * size]
