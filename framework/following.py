"""Following a step method call by call, so that a stage of a pipeline runs only its own part of it.

The user's step method runs on every stage, as it is. What it does is a sequence of *events*: operations of torch, and
calls of modules that no cut goes through. A stage begins at a `Mark`, the first call of a module or the first use of a
parameter, and ends at the next stage's mark. Before its beginning

* an operation that touches a parameter, or what came of one, runs on the meta device: shapes are right, nothing is
  computed, and a module is asked only once for given shapes;
* an operation on the batch alone runs for real: masks and positions are cheaper made again than sent. What is drawn at
  random there counts as computed, since ranks draw differently.

At its beginning the values that are still needed are put in the place of their meta tensors: Python code goes on
holding those, and every later operation gets what they stand for. Values are named by event and position among its
results, which are the same on all stages; which ones cross a cut is found out by following the whole method on the meta
device once (`Record`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from framework.adapters import torch_private
from framework.adapters.torch_private import tree_leaves, tree_map
from framework.errors import RunFailedError
from framework.remembered import Remembered

Name = tuple[int, int]
"""Number of an event, and which of its results."""


class _Cut(Exception):
    """Raised at the mark of the next stage: this stage is done."""


@dataclass(frozen=True)
class Mark:
    """Where a stage begins.

    Attributes:
        module: name of a module.
        parameter: name of a parameter that hangs directly on it and is used for the first time; empty = the module is
            called for the first time.
    """

    module: str
    parameter: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.parameter}".strip(".")

    def on(self, root: nn.Module) -> _Place:
        """Return the same place on a module."""
        return _Place(root.get_submodule(self.module), self.parameter)


@dataclass(frozen=True)
class _Place:
    module: nn.Module
    parameter: str

    def called(self, module: nn.Module) -> bool:
        return not self.parameter and module is self.module

    def used(self, leaves: Sequence[Any]) -> bool:
        if not self.parameter:
            return False
        parameter = self.module._parameters.get(self.parameter)
        return any(leaf is parameter for leaf in leaves)


def changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the tensor that an operation changes in place; None if there is none."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.startswith("__i") and name.endswith("__") and name not in _NOT_IN_PLACE)
    if in_place or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True:
        return args[0] if args else kwargs.get("input")
    return kwargs.get("out")


_NOT_IN_PLACE = ("__invert__", "__index__", "__int__", "__iter__")
_DEVICE = Tensor.device.__get__


class Follower(TorchFunctionMode):
    """Follows one run of a step method.

    Args:
        device: of this rank.
        pretend: `(module, args, kwargs) -> result` runs a module on the meta device.
        begin: where the stage begins; None = at once.
        end: where it ends; None = with the method.
        units: modules that are followed as one event.
        received: values of earlier stages by name.
        wanted: names of the values to keep for later stages.
        entered: called when the stage begins, if something comes before it.
        remember: calls operations on meta tensors; None = each is run.
    """

    def __init__(
        self,
        device: torch.device,
        pretend: Callable[[nn.Module, Any, Any], Any],
        begin: _Place | None,
        end: _Place | None,
        units: Mapping[nn.Module, str],
        received: Mapping[Name, Tensor],
        wanted: Sequence[Name],
        entered: Callable[[], None] = lambda: None,
        remember: Remembered | None = None,
    ) -> None:
        super().__init__()
        self.entered = entered
        self.remember = remember
        self.device = device
        self.pretend = pretend
        self.begin, self.end = begin, end
        self.units = units
        self.received = received
        self.kept: dict[Name, Tensor] = {name: received[name] for name in wanted if name in received}
        self.wanted: dict[int, list[int]] = {}
        for event, position in wanted:
            self.wanted.setdefault(event, []).append(position)
        self.ahead = begin is not None
        """Whether the stage's beginning is still to come."""
        self.count = 0
        self.names: dict[int, tuple[Any, Name]] = {}
        """id of a tensor that Python code may hold -> it (so that the id stays its own), its name."""
        self.stands: dict[int, tuple[Any, Tensor]] = {}
        """id of a tensor -> it, and what it stands for."""
        self.deferred: list[Callable[[], None]] = []
        self._aside = True

    # -- the two ways in -------------------------------------------------------------------------------------------
    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow what runs inside."""
        global _current  # noqa: PLW0603 - one step method runs at a time in a process
        outer, _current = _current, self
        original = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            run = original.__get__(None, cls)
            return run(*args, **kwargs) if self._aside else self._operation(run, args, kwargs)

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
        self._aside = False
        try:
            with self:
                yield
        finally:
            self._aside = True
            torch.autograd.Function.apply = original  # type: ignore[method-assign]
            _current = outer

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Don't follow what runs inside."""
        if self._aside:
            yield
            return
        self._aside = True
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__enter__()  # type: ignore[no-untyped-call]
            self._aside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # what the operation calls itself isn't followed: torch takes the mode off meanwhile
        aside, self._aside = self._aside, True
        try:
            if getattr(func, "__name__", "") in ("__get__", "__set__"):
                return self._attribute(func, args, kwargs)
            if func is Tensor.__iter__:
                return iter(self._operation(torch.unbind, args, kwargs))
            return self._operation(func, args, kwargs)
        finally:
            self._aside = aside

    def called(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module is called; `run` is its call."""
        if self._aside:
            return run(*args, **kwargs)
        if self.ahead and self.begin is not None and self.begin.called(module):
            self._enter()
        if not self.ahead and self.end is not None and self.end.called(module):
            raise _Cut
        if module not in self.units:
            with self.inside(module):
                return run(*args, **kwargs)
        with self.aside():
            if self.ahead:
                has_state = any(True for _ in module.parameters()) or any(True for _ in module.buffers())

                def pretend(*args: Any, **kwargs: Any) -> Any:
                    return self.pretend(module, args, kwargs)

                return self._pretend(pretend, args, kwargs, real=run, target=None, unreal=has_state)
            return self._perform(run, args, kwargs, in_place=False)

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Called around a call of a module that is followed inside."""
        yield

    # -- events ----------------------------------------------------------------------------------------------------
    def _attribute(self, func: Any, args: Any, kwargs: Any) -> Any:
        args = tree_map(self._stood_for, args)
        if func == _DEVICE and args[0].is_meta:
            return self.device
        return func(*args, **kwargs)

    def _operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        if self.ahead and self.begin is not None and self.begin.used(leaves):
            self._enter()
        if self.ahead:
            target = changed(func, args, kwargs)
            remember = self.remember if target is None else None
            return self._pretend(func, args, kwargs, real=func, target=target, remember=remember)
        if self.end is not None and self.end.used(leaves):
            raise _Cut
        return self._perform(func, args, kwargs, in_place=True)

    def _pretend(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        *,
        real: Any,
        target: Any,
        unreal: bool = False,
        remember: Remembered | None = None,
    ) -> Any:
        """Run an event that comes before this stage: `real` if no argument is computed, else `func` on meta tensors."""
        event = self.count
        self.count += 1
        self.saw(event, func, tree_leaves((args, kwargs)), target)
        args, kwargs = tree_map(self._stood_for, (args, kwargs))
        unreal = unreal or any(isinstance(x, Tensor) and _unreal(x) for x in tree_leaves((args, kwargs)))
        if not unreal:
            drawn = torch.default_generator.get_state()
            result = real(*args, **kwargs)
            if torch.equal(drawn, torch.default_generator.get_state()):
                return result
            result = tree_map(_to_meta, result)
            image = None if target is None else _to_meta(target)
        else:
            args, kwargs = tree_map(_to_meta, (args, kwargs))
            image = None if target is None else changed(func, args, kwargs)
            with torch.no_grad():
                result = func(*args, **kwargs) if remember is None else remember(func, args, kwargs)
        results = tree_leaves(result)
        if target is not None:
            self._name(event, [image])
            if image is not None and image is not target:
                self.stands[id(target)] = (target, image)
            results = [target]
            result = tree_map(lambda leaf: target if leaf is image else leaf, result)
        self._name(event, results)
        return result

    def _name(self, event: int, results: Sequence[Any]) -> None:
        for position, leaf in enumerate(results):
            if isinstance(leaf, Tensor):
                self.names[id(leaf)] = (leaf, (event, position))
                self.named((event, position), leaf)

    def _perform(self, func: Any, args: Any, kwargs: Any, *, in_place: bool) -> Any:
        """Run an event of this stage."""
        event = self.count
        self.count += 1
        args, kwargs = tree_map(self._stood_for, (args, kwargs))
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                raise RunFailedError(
                    f"A value of shape {tuple(leaf.shape)} that an earlier pipeline stage computes is used by "
                    f"{getattr(func, '__name__', 'a module')}, but wasn't sent: the step method took another path than "
                    "when it was cut. Type pp.cut=blocks or pp=none."
                )
        result = func(*args, **kwargs)
        if event in self.wanted:
            target = changed(func, args, kwargs) if in_place else None
            results = [target] if target is not None else tree_leaves(result)
            for position in self.wanted[event]:
                self.kept[event, position] = results[position]
        return result

    def _enter(self) -> None:
        """The stage begins: what was received takes the place of the meta tensors that have its names."""
        self.ahead = False
        self.entered()
        for leaf, name in self.names.values():
            if name in self.received:
                self.stands[id(leaf)] = (leaf, self.received[name])

    def _stood_for(self, leaf: Any) -> Any:
        found = self.stands.get(id(leaf))
        return leaf if found is None else found[1]

    def resolve(self, value: Any) -> Any:
        """Return what tensors in `value` stand for."""
        return tree_map(self._stood_for, value)

    # -- for records -----------------------------------------------------------------------------------------------
    def saw(self, event: int, func: Any, leaves: Sequence[Any], target: Any) -> None:
        """An event before the stage's beginning has these arguments."""

    def named(self, name: Name, leaf: Tensor) -> None:
        """A result got a name."""


def _unreal(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, nn.Parameter)


def _to_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):  # without values there is nothing to move: `x.to(y.device)`
        return torch.device("meta")
    return leaf.detach().to("meta") if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


_current: Follower | None = None


def watch_calls(module: nn.Module) -> None:
    """Have calls of `module` go through whoever follows; call after all that acts on calls was put on it."""

    def call(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs) if _current is None else _current.called(module, run, args, kwargs)

    torch_private.around_calls(module, call)


@dataclass
class Crossing:
    """What crosses the cuts, for one method and shape of batch: for each cut the names, in order."""

    names: list[list[Name]] = field(default_factory=list)


class Record(Follower):
    """Follows a whole method on the meta device and notes when each value was made and last used.

    Args:
        device: of this rank.
        pretend: as of `Follower`.
        units: as of `Follower`.
        marks: of the second and later stages, on the module that is followed.
    """

    def __init__(
        self,
        device: torch.device,
        pretend: Callable[[nn.Module, Any, Any], Any],
        units: Mapping[nn.Module, str],
        marks: Sequence[_Place] = (),
    ) -> None:
        super().__init__(device, pretend, None, None, units, {}, ())
        self.ahead = True
        self.marks = marks
        self.cuts: list[int] = []
        """Number of the first event after each mark so far."""
        self.born: dict[Name, Tensor] = {}
        self.used: dict[Name, int] = {}

    def called(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """As `Follower`, and passes marks."""
        if not self._aside and len(self.cuts) < len(self.marks) and self.marks[len(self.cuts)].called(module):
            self.cuts.append(self.count)
        return super().called(module, run, args, kwargs)

    def _operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        if len(self.cuts) < len(self.marks) and self.marks[len(self.cuts)].used(tree_leaves((args, kwargs))):
            self.cuts.append(self.count)
        return super()._operation(func, args, kwargs)

    def saw(self, event: int, func: Any, leaves: Sequence[Any], target: Any) -> None:
        """Note uses."""
        for leaf in leaves:
            if id(leaf) in self.names:
                self.used[self.names[id(leaf)][1]] = event

    def named(self, name: Name, leaf: Tensor) -> None:
        """Note births."""
        self.born[name] = leaf

    def keep(self, value: Any) -> None:
        """The tensors in `value` are needed at the end."""
        for leaf in tree_leaves(value):
            if id(leaf) in self.names:
                self.used[self.names[id(leaf)][1]] = self.count + 1

    def run(self, method: Callable[[], Any]) -> Exception | None:
        """Follow `method`; return what stopped it, None if it came to its end.

        After the last mark the method may do what needs values (a mask as an index): whatever its code holds at that
        moment is then taken to be needed.
        """
        try:
            with self.following():
                result = method()
            self.keep(result)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError, IndexError) as error:
            frame = error.__traceback__
            while frame is not None:
                self.keep([value for value in frame.tb_frame.f_locals.values() if value is not self])
                frame = frame.tb_next
            return error
        return None

    def alive(self, cut: int) -> list[Name]:
        """Return the names of what is made before event `cut` and needed from it on, in order."""
        return sorted(name for name in self.born if name[0] < cut <= self.used.get(name, -1))
