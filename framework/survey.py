"""What a step method does with its module, found out without computing: in which order weights are used, at what cost.

The method of a copy on the meta device is followed once with a few samples (`framework.following`). The places where a
pipeline may be cut are those where a weight is used for the first time; between two of them lies a *segment*, with its
cost. `cuts` shares the segments out: the dearest stage as cheap as can be, then as little as possible to send.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from framework.adapters.torch_private import tree_map
from framework.errors import FrameworkError
from framework.following import Mark, Record, watch_calls

SLACK = 1.1
"""How much dearer than need be the dearest stage may be where that leaves less to send."""
_STATISTICS = (F.batch_norm, F.instance_norm)
"""Functions that change their buffers in place without saying so."""


class SurveyError(FrameworkError):
    """The step method can't be followed without values."""


@dataclass(frozen=True)
class Call:
    """One call of a module: events from `start` up to `stop`."""

    module: str
    start: int
    stop: int


@dataclass
class Survey:
    """What was found; names and numbers only.

    Attributes:
        marks: places where a weight is used first, in order; a segment begins at each.
        starts: number of the first event of each segment.
        flops: floating-point operations of each segment's forward.
        parameters: elements of the weights first used in each segment.
        sent: bytes that would cross a cut at each mark; None where no cut can be.
        changed: for each mark, whether a value that crosses is changed in place later.
        uses: parameter or buffer -> events that use it. A name is the first of a tied parameter.
        writes: buffer -> events that change it.
        calls: of all modules.
        stopped: what stopped the method after the last mark, in words; empty if nothing did.
    """

    marks: list[Mark] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    flops: list[int] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    sent: list[int | None] = field(default_factory=list)
    changed: list[bool] = field(default_factory=list)
    uses: dict[str, list[int]] = field(default_factory=dict)
    writes: dict[str, list[int]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    stopped: str = ""

    def costs(self, by: str) -> list[float]:
        """Return the cost of each segment: `flops` (between equals, the size of the weights) or `parameters`."""
        if by == "parameters":
            return [float(count) for count in self.parameters]
        return [float(count) + 1e-3 * more for count, more in zip(self.flops, self.parameters, strict=True)]

    def stage_of(self, cuts: Sequence[int], event: int) -> int:
        """Return the stage that runs an event; `cuts` are the segments that the second and later stages begin with."""
        return sum(event >= self.starts[segment] for segment in cuts)


def twin_of(module: LightningModule) -> LightningModule:
    """Return a copy with all tensors on the meta device; nothing large is copied on the way.

    Raises:
        SurveyError: something that the module keeps can't be copied.
    """
    images: dict[int, Any] = {}
    trainer = module.__dict__.get("_trainer")
    if trainer is not None:
        images[id(trainer)] = trainer
    for parameter in module.parameters():
        images[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in module.buffers():
        images[id(buffer)] = buffer.detach().to("meta")
    try:
        twin = copy.deepcopy(module, images)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise SurveyError(f"it can't be copied to the meta device ({error})") from error
    twin.__dict__["_trainer"] = trainer
    return twin


class _Surveyor(Record):
    """Follows every operation and notes what a cut depends on."""

    def __init__(self, twin: nn.Module, flops: Callable[[], int]) -> None:
        super().__init__(torch.device("cpu"), lambda module, args, kwargs: module(*args, **kwargs), {})
        self.found = Survey()
        self.flops = flops
        self.spent: list[int] = []
        self.weights = {id(p): (name, p) for name, p in reversed(list(twin.named_parameters()))}
        self.slots = {
            id(p): Mark(prefix, key)
            for prefix, module in reversed(list(twin.named_modules()))
            for key, p in module._parameters.items()
        }
        self.buffers = {id(b): name for name, b in twin.named_buffers()}
        self.modules = {module: name for name, module in twin.named_modules()}
        self.stack: list[list[Any]] = []  # [name, first event, flops then, whether a weight was used]
        self.begun: set[str] = set()
        self.last_first = -1  # event that used a weight for the first time
        self.writers: dict[int, int] = {}  # id of a tensor -> last event that changes it

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Note the call."""
        name = self.modules.get(module, "")
        first = bool(name) and name not in self.begun
        frame = [name, self.count, self.flops(), not first]
        self.begun.add(name)
        self.stack.append(frame)
        try:
            yield
        finally:
            self.stack.pop()
            self.found.calls.append(Call(name, frame[1], self.count))

    def saw(self, event: int, func: Any, leaves: Sequence[Any], target: Any) -> None:
        """Note weights and buffers."""
        super().saw(event, func, leaves, target)
        for leaf in leaves:
            if id(leaf) in self.weights:
                name, weight = self.weights[id(leaf)]
                if name not in self.found.uses:
                    self._first_use(event, name, weight)
                self.found.uses.setdefault(name, []).append(event)
                for frame in self.stack:
                    frame[3] = True
            elif id(leaf) in self.buffers:
                self.found.uses.setdefault(self.buffers[id(leaf)], []).append(event)
                if leaf is target or func in _STATISTICS:
                    self.found.writes.setdefault(self.buffers[id(leaf)], []).append(event)
        if target is not None and id(target) in self.names:
            self.writers[id(target)] = event

    def _first_use(self, event: int, name: str, weight: Tensor) -> None:
        if event == self.last_first:  # one operation with several weights
            self.found.parameters[-1] += weight.numel()
            return
        self.last_first = event
        frame = next((frame for frame in self.stack if not frame[3]), None)
        mark, start, spent = self.slots[id(weight)], event, self.flops()
        if frame is not None:
            mark, start, spent = Mark(frame[0]), frame[1], frame[2]
        if not self.found.starts or start > self.found.starts[-1]:
            self.found.marks.append(mark)
            self.found.starts.append(start)
            self.found.parameters.append(0)
            self.spent.append(spent)
        self.found.parameters[-1] += weight.numel()

    def close(self, stopped: Exception | None) -> Survey:
        found = self.found
        if stopped is not None:
            found.stopped = str(stopped).splitlines()[0] if str(stopped) else type(stopped).__name__
        ends = [*self.spent[1:], self.flops()]
        found.flops = [end - start for start, end in zip(self.spent, ends, strict=True)]
        for start in found.starts:
            crossing = self.alive(start)
            tensors = [self.born[name] for name in crossing]
            floats = any(tensor.is_floating_point() for tensor in tensors)
            found.sent.append(sum(t.numel() * t.element_size() for t in tensors) if floats else None)
            found.changed.append(any(self.writers.get(id(tensor), -1) >= start for tensor in tensors))
        return found


def survey(module: LightningModule, batch: Any, convert: Callable[[Any], Any] | None = None) -> Survey:
    """Follow `module.training_step(batch)` without computing.

    Args:
        module: isn't changed.
        batch: a few samples, collated.
        convert: gives the copy its precision; None = it has it.

    Raises:
        SurveyError: the method asks for a value that only computing gives, or something else goes wrong.
    """
    twin = twin_of(module)
    if convert is not None:
        convert(twin)
    for child in twin.modules():
        watch_calls(child)
    with FlopCounterMode(display=False) as counter:
        surveyor = _Surveyor(twin, counter.get_total_flops)
        quiet(twin, surveyor)
        stopped = surveyor.run(lambda: twin.training_step(*_step_arguments(twin, batch)))
        found = surveyor.close(stopped)
    names = {name for name, _ in twin.named_parameters()}
    if stopped is not None and (not found.marks or names - found.uses.keys()):
        where = f"after {found.marks[-1]}" if found.marks else "before any weight is used"
        raise SurveyError(f"training_step needs a value {where}: {found.stopped}") from stopped
    _take_as_used(found, dict(twin.named_parameters()))
    return found


def _take_as_used(found: Survey, parameters: Mapping[str, Tensor]) -> None:
    """Weights that no operation touched belong to the calls of the innermost module around them that was called.

    A module may take a short cut where tensors have no values (a mixture of experts can't know who gets what).
    """
    calls: dict[str, list[Call]] = {}
    for call in found.calls:
        calls.setdefault(call.module, []).append(call)
    for name, weight in parameters.items():
        if name in found.uses:
            continue
        words = name.split(".")
        outward = (".".join(words[:end]) for end in range(len(words) - 1, 0, -1))
        around = next((module for module in outward if module in calls), "")
        if around and found.starts:
            ends = {end for call in calls[around] for end in (call.start, max(call.start, call.stop - 1))}
            found.uses[name] = sorted(ends)
            segment = max(sum(start <= min(ends) for start in found.starts) - 1, 0)
            found.parameters[segment] += weight.numel()


def _step_arguments(module: LightningModule, batch: Any) -> tuple[Any, ...]:
    """Return what `training_step` takes: a batch, and its number if there is room for it."""
    import inspect

    copied = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
    return (copied, 0)[: len(inspect.signature(module.training_step).parameters)]


def quiet(twin: LightningModule, record: Record) -> None:
    """Have `twin.log` only note that its value is needed."""

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        record.keep(value)

    twin.log = log  # type: ignore[method-assign]
    twin.log_dict = lambda values, *args, **kwargs: record.keep(values)  # type: ignore[method-assign]


def cuts(costs: Sequence[float], stages: int, sent: Sequence[int | None]) -> list[int]:
    """Return the segments that the second and later stages begin with.

    The dearest stage is at most `SLACK` times what it has to be; among those ways the one that sends least.

    Args:
        costs: of the segments.
        stages: how many.
        sent: bytes that cross a cut before each segment; None = none can be there.

    Raises:
        ValueError: there aren't enough places.
    """
    if sum(size is not None for size in sent[1:]) < stages - 1:
        raise ValueError(f"{1 + sum(size is not None for size in sent[1:])} segments for {stages} stages")
    best = dearest(costs, stages, sent)
    return _share(costs, stages, sent, lambda worst, bytes_: bytes_ if worst <= SLACK * best else float("inf"))[1]


def dearest(costs: Sequence[float], stages: int, sent: Sequence[int | None]) -> float:
    """Return the cost of the dearest stage of the best way to cut; arguments as of `cuts`."""
    return _share(costs, stages, sent, lambda worst, bytes_: worst)[0]


def _share(
    costs: Sequence[float], stages: int, sent: Sequence[int | None], score: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Dynamic programme over (stages, segments) so far; a state keeps the ways that none beats in both numbers."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    ways: list[list[tuple[float, float, list[int]]]] = [[] for _ in range(len(costs) + 1)]
    ways[0] = [(0.0, 0.0, [])]
    for stage in range(stages):
        longer: list[list[tuple[float, float, list[int]]]] = [[] for _ in range(len(costs) + 1)]
        for start in range(len(costs)):
            size = 0 if stage == 0 else sent[start]
            if not ways[start] or size is None:
                continue
            for stop in range(start + 1, len(costs) + 1):
                spent = sums[stop] - sums[start]
                for worst, bytes_, chosen in ways[start]:
                    way = (max(worst, spent), bytes_ + size, [*chosen, start] if stage else chosen)
                    longer[stop].append(way)
        ways = [_front(some) for some in longer]
    worst, bytes_, chosen = min(ways[-1], key=lambda way: (score(way[0], way[1]), way[0], way[1]))
    return worst, chosen


def _front(ways: list[tuple[float, float, list[int]]]) -> list[tuple[float, float, list[int]]]:
    """Keep what no other way beats in both cost and bytes."""
    kept: list[tuple[float, float, list[int]]] = []
    for way in sorted(ways, key=lambda way: (way[0], way[1])):
        if not kept or way[1] < kept[-1][1]:
            kept.append(way)
    return kept


def stage_costs(costs: Sequence[float], chosen: Sequence[int]) -> list[float]:
    """Return the cost of each stage."""
    bounds = [0, *chosen, len(costs)]
    return [sum(costs[start:stop]) for start, stop in pairwise(bounds)]


def units_of(found: Survey, chosen: Sequence[int]) -> list[str]:
    """Return the modules that no cut goes through in any of their calls; what is inside of one isn't left out."""
    events = [found.starts[segment] for segment in chosen]
    torn = {call.module for call in found.calls if any(call.start < event < call.stop for event in events)}
    return [name for name in dict.fromkeys(call.module for call in found.calls) if name and name not in torn]


def holders(found: Survey, chosen: Sequence[int], names: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each parameter or buffer: those that use it; the first if none does.

    Raises:
        SurveyError: a buffer is changed on one stage and used on another.
    """
    held = {}
    for name in names:
        stages = sorted({found.stage_of(chosen, event) for event in found.uses.get(name, [])}) or [0]
        if len(stages) > 1 and name in found.writes:
            raise SurveyError(f"buffer {name} is changed and would be used on stages {stages}")
        held[name] = tuple(stages)
    return held
