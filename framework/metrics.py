"""`self.log` by name: values logged in a step become the true global ones before any callback or logger sees them.

Lightning pairs reductions by their order, so two ranks that log different keys get each other's numbers (P40). Here the
values of a whole optimizer step are kept, weighted as the loss is, added up by name over the ranks that hold a loss
(all data ranks; of a pipeline the last stage, of a tensor-parallel group one rank) in the one small all-reduce of
`framework.step_agreement`, and only then handed to Lightning's own `self.log` on every rank.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from framework.errors import UsageError
from framework.metric_objects import count_once

if TYPE_CHECKING:
    from framework.mesh import Mesh

log = logging.getLogger(__name__)

REDUCTIONS = ("mean", "sum", "min", "max")


Scalar = Tensor | float
"""A number of the host, or one that a device may still be computing."""


@dataclass
class Entry:
    """One logged value: a local scalar, how it is reduced, and the arguments of `self.log` to replay."""

    value: Scalar
    reduction: str
    batch_size: float | None
    options: dict[str, Any] = field(default_factory=dict)


def snapshot(value: Scalar) -> Scalar:
    """Return the number as it is now, float64, without waiting for a device that is still computing it.

    A DTensor becomes the whole value, which is collective over its mesh: `item` would give this rank's piece.
    """
    if not isinstance(value, Tensor):
        return float(value)
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if value.is_cpu:
        return float(value.item())
    return value.detach().reshape(()).to(torch.float64, copy=True)


def numbers(values: Sequence[Scalar]) -> list[float]:
    """Return the values on the host; what is on a device comes in one transfer, the one wait for it."""
    found = [snapshot(value) for value in values]
    waiting = [value for value in found if isinstance(value, Tensor)]
    fetched = iter(torch.stack(waiting).tolist() if waiting else ())
    return [next(fetched) if isinstance(value, Tensor) else value for value in found]


def add_up(values: list[float], device: torch.device) -> list[float]:
    """Return the sums over all ranks; collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    vector = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(vector)
    summed: list[float] = vector.tolist()
    return summed


def reduction_name(reduce_fx: Any, name: str) -> str:
    """Return which of `REDUCTIONS` `self.log(..., reduce_fx=...)` asks for."""
    found = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", str(reduce_fx))
    found = {"avg": "mean", "amin": "min", "amax": "max"}.get(found.lower(), found.lower())
    if found not in REDUCTIONS:
        raise UsageError(
            f"self.log({name!r}, reduce_fx={reduce_fx}) can't be reduced over ranks; "
            f"use one of {', '.join(REDUCTIONS)}."
        )
    return found


class Recorder:
    """Catches `self.log` of one LightningModule while a step runs.

    Installed on the instance for the length of a fit or an evaluation; outside `recording` every call goes through to
    Lightning unchanged.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self._original: Callable[..., None] = module.log
        self._entries: dict[str, Entry] | None = None
        self._in_stages = False

    def install(self, mesh: Mesh) -> None:
        """Put the recorder in the way of `module.log`. Collective."""
        self._in_stages = mesh.size("pp") > 1
        count_once(self.module, mesh)
        self.module.log = self._log  # type: ignore[method-assign]

    def remove(self) -> None:
        """Undo `install`."""
        self.module.__dict__.pop("log", None)

    @contextmanager
    def recording(self) -> Generator[dict[str, Entry], None, None]:
        """Collect what the module logs inside; yields name -> entry, filled as the step runs."""
        outer, self._entries = self._entries, {}
        try:
            yield self._entries
        finally:
            self._entries = outer

    def replay(self, name: str, value: float, options: Mapping[str, Any], weight: float) -> None:
        """Call Lightning's own `self.log` with a value that is already global."""
        tensor = torch.tensor(value, dtype=torch.float64)  # a plain number would become float32
        self._original(name, tensor, **options, batch_size=max(1, round(weight)), sync_dist=False)

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if args:  # the positional order of Lightning's signature
            kwargs = dict(zip(("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"), args, strict=False)) | kwargs
        scalar = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        if self._entries is not None and self._in_stages and isinstance(value, Metric):
            raise UsageError(
                f"A step logged {name!r} as a torchmetrics object, which only the last stage of a pipeline has, while "
                f"its value needs all ranks: log the batch's value, self.log({name!r}, metric(prediction, target)), of "
                "which the mean over the epoch's samples is made."
            )
        if self._entries is None or not scalar or kwargs.get("rank_zero_only"):
            self._original(name, value, **kwargs)
            return
        reduction = reduction_name(kwargs.pop("reduce_fx", "mean"), name)
        batch_size = kwargs.pop("batch_size", None)
        for key in ("sync_dist", "sync_dist_group", "enable_graph", "metric_attribute", "rank_zero_only"):
            kwargs.pop(key, None)  # replayed values are global already
        self._entries[name] = Entry(snapshot(value), reduction, batch_size, kwargs | {"reduce_fx": reduction})


class Totals:
    """Weighted sums by name over several steps of one rank."""

    WAITING = 256
    """How many additions may wait for their numbers."""

    def __init__(self) -> None:
        self.entries: dict[str, tuple[float, float, Entry]] = {}
        self._waiting: list[tuple[str, Entry, Scalar]] = []

    def add(self, entries: Mapping[str, Entry], weight: Scalar) -> None:
        """Add one micro-step's entries; `weight` is that of its loss, unless `self.log` was given a batch size."""
        for name, entry in entries.items():
            own = weight if entry.batch_size is None else entry.batch_size
            self._waiting.append((name, entry, snapshot(own)))  # its owner may go on counting in it
        if len(self._waiting) > self.WAITING:
            self.settle()

    def settle(self, *more: Scalar) -> list[float]:
        """Add up what waits, and return `more` as numbers: the one wait for the device that computes all this."""
        found = numbers([*(number for _, entry, w in self._waiting for number in (entry.value, w)), *more])
        found, rest = found[: 2 * len(self._waiting)], found[2 * len(self._waiting) :]
        for (name, entry, _), value, w in zip(self._waiting, found[::2], found[1::2], strict=True):
            # without valid tokens there is no mean, often it is NaN
            new = value if entry.reduction != "mean" else value * w if w > 0 else 0.0
            if name not in self.entries:
                self.entries[name] = (new, w, entry)
                continue
            add = {"min": _least, "max": _most}.get(entry.reduction, operator.add)
            before, before_w, _ = self.entries[name]
            self.entries[name] = (add(before, new), before_w + w, entry)
        self._waiting.clear()
        return rest

    def clear(self) -> None:
        """Start afresh."""
        self.entries.clear()
        self._waiting.clear()


def _least(a: float, b: float) -> float:
    return a if a < b or math.isnan(a) else b


def _most(a: float, b: float) -> float:
    return a if a > b or math.isnan(a) else b


class Layout:
    """The names that all ranks know, in one order: the layout of the payload of the step's all-reduce.

    It only grows: a name that a rank doesn't log in some step has weight 0 there. A rank that meets a new name raises
    the `changed` flag, upon which all ranks exchange their names once.
    """

    def __init__(self) -> None:
        self.options: dict[str, tuple[str, dict[str, Any]]] = {}

    def misses(self, totals: Totals) -> bool:
        """Whether `totals` has a name that isn't agreed on yet."""
        return any(name not in self.options for name in totals.entries)

    def agree(self, totals: Totals, contributes: bool) -> None:
        """Exchange names over all ranks (collective); names that only some contributing ranks have are reported."""
        mine = {name: (entry.reduction, entry.options) for name, (_, _, entry) in totals.entries.items()}
        everyone: list[tuple[bool, dict[str, Any]]] = [(contributes, mine)]
        if dist.is_initialized():
            everyone = [(False, {})] * dist.get_world_size()
            dist.all_gather_object(everyone, (contributes, mine))
        holders = [(rank, names) for rank, (holds, names) in enumerate(everyone) if holds]
        for _, names in holders:
            for name, how in names.items():
                self.options.setdefault(name, how)
        for name in self.options:
            have = [rank for rank, names in holders if name in names]
            if have and len(have) < len(holders) and (not dist.is_initialized() or dist.get_rank() == 0):
                missing = sorted({rank for rank, _ in holders} - set(have))
                log.warning(
                    "self.log(%r) was called on ranks %s but not on %s; it is the mean of the former",
                    name,
                    have,
                    missing,
                )

    def pack(self, totals: Totals) -> list[float]:
        """Return two numbers a name: weighted sum and weight; 0 for a name that this rank didn't log."""
        return [
            number
            for name in self.options
            for number in (totals.entries[name][:2] if name in totals.entries else (0.0, 0.0))
        ]

    def unpack(
        self, payload: Sequence[float], totals: Totals, device: torch.device
    ) -> Generator[tuple[str, float, float, dict[str, Any]], None, None]:
        """Yield name, global value, global weight and options from the reduced payload (`2 * len(options)` numbers).

        A mean of weight 0 is NaN. Extremes take a collective each.
        """
        for index, (name, (reduction, options)) in enumerate(self.options.items()):
            value, weight = payload[2 * index], payload[2 * index + 1]
            if reduction == "mean":
                value = value / weight if weight else math.nan
            elif reduction in ("min", "max"):
                worst = math.inf if reduction == "min" else -math.inf
                value = totals.entries[name][0] if name in totals.entries else worst
                if dist.is_initialized():
                    extreme = torch.tensor(value, dtype=torch.float64, device=device)
                    dist.all_reduce(extreme, dist.ReduceOp.MIN if reduction == "min" else dist.ReduceOp.MAX)
                    value = extreme.item()
            yield name, value, weight, options
