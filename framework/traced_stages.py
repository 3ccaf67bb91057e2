"""Cutting an unchanged LightningModule into stages of like cost, wherever its weights are first used.

Every stage keeps the user's whole module, with the weights of other stages taken out, and follows the user's own step
method (`framework.following`) from its first line: the part before its own runs on the meta device and costs next to
nothing, values that cross a cut are received and sent, and the next stage's mark ends it. So skip connections, tuples,
dicts, integers, several calls of the module and losses on hidden values need nothing special, and names don't change.

A weight that is used on several stages is held by each of them (`framework.shared_weights` adds its gradients up).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from framework.adapters.torch_private import tree_map
from framework.errors import RunFailedError
from framework.following import Follower, Mark, Name, Record, _Cut, watch_calls
from framework.parts import ModelPart, find_blocks
from framework.remembered import Remembered
from framework.stages import Stage, sendable
from framework.survey import Survey, holders, quiet, twin_of, units_of

_MISSING = object()


class _Slots(AbstractContextManager[None]):
    """Puts meta tensors where the weights of other stages are, or were.

    Args:
        slots: (dict of a module, key, meta tensor).
    """

    def __init__(self, slots: Sequence[tuple[dict[str, Any], str, Tensor]]) -> None:
        self._slots = slots
        self._depth = 0
        self._saved: list[Any] = []

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._saved = [held.get(key, _MISSING) for held, key, _ in self._slots]
            for held, key, image in self._slots:
                held[key] = image

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            for (held, key, _), saved in zip(self._slots, self._saved, strict=True):
                if saved is _MISSING:
                    del held[key]
                else:
                    held[key] = saved


@dataclass(eq=False)
class Cutting:
    """What all stages of a rank know of the cuts.

    Attributes:
        root: the user's module.
        twin: its copy on the meta device.
        marks: where the second and later stages begin.
        units: modules that no cut goes through -> name.
        changed: for each cut, whether a value that crosses is changed in place later.
        device: of this rank.
    """

    root: LightningModule
    twin: LightningModule
    marks: Sequence[Mark]
    units: Mapping[nn.Module, str]
    changed: Sequence[bool]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _crossing: dict[Any, list[list[Name]]] = field(default_factory=dict)
    remember: Remembered = field(default_factory=Remembered)
    _watched: bool = False

    def watch(self) -> None:
        """Have calls of units and marks followed, on the module and on its twin; the first call counts."""
        if not self._watched:
            self._watched = True
            names = {*self.units.values(), *(mark.module for mark in self.marks if not mark.parameter)}
            for name in names:
                watch_calls(self.root.get_submodule(name))
                watch_calls(self.twin.get_submodule(name))

    def crossing(self, method: str, shapes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[Name]]:
        """Return for each cut what crosses it; a method is followed once for given shapes."""
        key = (method, shapes, self.root.training)
        if key not in self._crossing:
            # a copy: the method may change its batch
            args = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, args)
            self._crossing[key] = self._follow(lambda: getattr(self.twin, method)(*args, **kwargs))
        return self._crossing[key]

    def _follow(self, step: Callable[[], Any]) -> list[list[Name]]:
        _same_modes(self.root, self.twin)
        units = {self.twin.get_submodule(name): name for name in self.units.values()}
        record = Record(self.device, _call, units, [mark.on(self.twin) for mark in self.marks])
        quiet(self.twin, record)
        stopped = record.run(step)
        if len(record.cuts) < len(self.marks):
            because = f" ({stopped})" if stopped is not None else ""
            raise RunFailedError(
                f"The step method ended before '{self.marks[len(record.cuts)]}', where pipeline stage "
                f"{len(record.cuts) + 1} begins, was reached{because}: what is called in training must be called in "
                "the same order here. Type pp=none, or leave this method out."
            )
        names = [record.alive(cut) for cut in record.cuts]
        for cut, crossing in enumerate(names):
            if not crossing:
                raise RunFailedError(f"Nothing that stage {cut} computes is used later; type pp=none.")
        return names

    def pretend(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return what a unit would return, on the meta device; computed once for given shapes and settings."""
        unit = _Unit(module, self.twin.get_submodule(self.units[module]), module.training)
        return self.remember(unit, args, kwargs)


@dataclass(frozen=True)
class _Unit:
    """A module's twin in the module's mode, as a function that `Remembered` knows again."""

    module: nn.Module
    twin: nn.Module
    training: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _same_modes(self.module, self.twin)
        return self.twin(*args, **kwargs)


def _call(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _same_modes(module: nn.Module, twin: nn.Module) -> None:
    for one, other in zip(module.modules(), twin.modules(), strict=True):
        other.training = one.training


class TracedStage(Stage):
    """One stage.

    Args:
        cutting: the cuts.
        view: what the module looks like to this stage.
        index: of the stage.
        images: meta tensors that stand where other stages' weights are.
        before: how often each module is called before the stage begins.
    """

    def __init__(
        self,
        cutting: Cutting,
        view: AbstractContextManager[None],
        index: int,
        images: set[Tensor],
        before: Mapping[str, int],
    ) -> None:
        super().__init__(cutting.root, view)
        self.cutting = cutting
        self.index = index
        self.images = images
        self.before = before
        self.is_last = index == len(cutting.marks)
        self._names: dict[int, list[list[Name]]] = {}

    def watch(self) -> None:
        """Follow calls; called after all wrapping."""
        self.cutting.watch()

    def learn(self, micro: int, method: str, shapes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find out what crosses the cuts in micro-batch `micro`."""
        self._names[micro] = self.cutting.crossing(method, shapes, args, kwargs)

    def forward(self, *received: Tensor, micro: Tensor) -> Any:
        """Run one micro-batch; returns what to send on, or on the last stage what the step method returned."""
        index = int(micro)
        names = self._names[index]
        arriving = names[self.index - 1] if self.index else []
        leaving = [] if self.is_last else names[self.index]
        if len(arriving) != len(received):
            raise RunFailedError(
                f"Pipeline stage {self.index} received {len(received)} values and expected {len(arriving)}: the step "
                "method took another path on the stage before. Type pp.cut=blocks or pp=none."
            )
        for one in received:
            if one.requires_grad and torch.is_grad_enabled():
                one.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]  # a gradient is sent, which asks for that
        if self.index and self.cutting.changed[self.index - 1] and torch.is_grad_enabled():
            received = tuple(one.clone() if one.is_floating_point() else one for one in received)
        marks = [mark.on(self.root) for mark in self.cutting.marks]
        follower = Follower(
            self.cutting.device,
            self.cutting.pretend,
            marks[self.index - 1] if self.index else None,
            None if self.is_last else marks[self.index],
            self.cutting.units,
            dict(zip(arriving, received, strict=True)),
            leaving,
            self._entered,
            self.cutting.remember,
        )
        try:
            result = self.run(index, partial(self._step, follower))
        except _Cut:
            tensors = tuple(sendable(follower.kept[name]) for name in leaving)
            return tensors[0] if len(tensors) == 1 else tensors
        if not self.is_last:
            raise RunFailedError(f"The step method ended before '{self.cutting.marks[self.index]}' was reached.")
        return result

    def _entered(self) -> None:
        if self.masks is not None:
            self.masks.passed(self.before)

    def _step(self, follower: Follower, step: Callable[[], Any]) -> Any:
        """Run the step method; what it logs before this stage begins is logged when its value has arrived."""
        log = self.root.log

        def later(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            with follower.aside():
                if follower.ahead and isinstance(value, Tensor) and value.is_meta:
                    follower.deferred.append(lambda: log(name, follower.resolve(value), *args, **kwargs))
                else:
                    log(name, follower.resolve(value), *args, **kwargs)

        kept = self.root.__dict__.get("log", _MISSING)
        self.root.__dict__["log"] = later
        try:
            with follower.following():
                result = step()
        finally:
            if kept is _MISSING:
                del self.root.__dict__["log"]
            else:
                self.root.__dict__["log"] = kept
        for one in follower.deferred:
            one()
        return follower.resolve(result)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """As nn.Module, through the view, without other stages' parameters."""
        with self.view:
            found = [(n, p) for n, p in nn.Module.named_parameters(self, *args, **kwargs) if p not in self.images]
        yield from found


def cut_traced(
    root: LightningModule, found: Survey, chosen: Sequence[int], mine: Sequence[int], device: torch.device
) -> list[ModelPart]:
    """Cut `root` in place into the stages `mine` of this rank.

    Args:
        root: the user's module, with parameters on the meta device or real ones.
        found: its survey.
        chosen: the segments that the second and later stages begin with.
        mine: numbers of this rank's stages, ascending.
        device: of this rank.

    Returns:
        A part for each of `mine`. `root` keeps the union of their weights.

    Raises:
        SurveyError: a buffer would be changed on one stage and used on another.
    """
    twin = twin_of(root)
    names = {id(t): n for n, t in reversed([*root.named_parameters(), *root.named_buffers()])}
    held = holders(found, chosen, dict.fromkeys(names.values()))
    units = {root.get_submodule(name): name for name in reversed(units_of(found, chosen))}
    marks = [found.marks[segment] for segment in chosen]
    cutting = Cutting(root, twin, marks, units, [found.changed[segment] for segment in chosen], device)
    slots: list[tuple[dict[str, Any], str, tuple[int, ...], Any]] = [
        (own, key, held[names[id(tensor)]], twin_own[key])
        for module, other in zip(root.modules(), twin.modules(), strict=True)
        for own, twin_own in ((module._parameters, other._parameters), (module._buffers, other._buffers))
        for key, tensor in own.items()
        if tensor is not None
    ]
    parts = []
    called = {call.module: found.stage_of(chosen, call.start) for call in reversed(found.calls)}
    for stage in mine:
        foreign = [(own, key, image) for own, key, stages, image in slots if stage not in stages]
        images = {image for *_, image in foreign}
        begins = found.starts[chosen[stage - 1]] if stage else 0
        before = Counter(call.module for call in found.calls if call.start < begins)
        view = _Slots(foreign)
        owned = {name: m for name, m in root.named_modules() if _belongs(m, name, stage, held, names, called)}
        blocks = {
            name: block
            for name, block in find_blocks(root).items()
            if called.get(name) == stage
            and block in units
            and all(held[names[id(parameter)]] == (stage,) for parameter in block.parameters())
        }
        parts.append(
            ModelPart(
                root=root,
                module=TracedStage(cutting, view, stage, images, before),
                blocks=blocks,
                owned=owned,
                foreign={image for image in images if isinstance(image, nn.Parameter)},
                index=stage,
                stages=len(chosen) + 1,
                view=view,
                shared={name: stages for name, stages in held.items() if len(stages) > 1 and _learns(root, name)},
            )
        )
    for own, key, stages, _ in slots:
        if not set(stages) & set(mine):
            del own[key]
    return parts


def _learns(root: nn.Module, name: str) -> bool:
    """Whether `name` is a parameter (not a buffer)."""
    prefix, _, key = name.rpartition(".")
    return key in root.get_submodule(prefix)._parameters


def _belongs(
    module: nn.Module,
    name: str,
    stage: int,
    held: Mapping[str, tuple[int, ...]],
    names: Mapping[int, str],
    called: Mapping[str, int],
) -> bool:
    """Whether a module is of a stage: its own weights are; without any, those inside; without any, its call."""
    own = [p for p in module._parameters.values() if p is not None] or list(module.parameters())
    if own:
        return all(stage in held[names[id(parameter)]] for parameter in own)
    return bool(name) and called.get(name, 0) == stage
