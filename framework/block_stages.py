"""Cutting an unchanged LightningModule into pipeline stages between the blocks of a list.

A stage runs the user's own step method on every rank, with the modules of other stages replaced:

* blocks after the stage's own: the first of them ends the call (`_Cut`), and what the last own block returned goes on;
* blocks before them run once on the meta device, to learn what they return; the one just before the stage's first block
  returns what was received instead (`_Entry`). Everything before it costs next to nothing: its parameters lie on the
  meta device, and any operation that touches one yields a meta tensor (`_MetaPrefix`);
* the last stage runs on to the end and returns what the step method returns.

So the module needs no edit and keeps its parameter names. Which modules belong to the first and the last stage follows
from the order of registration: what is registered before the list of blocks belongs to the first stage, what comes
after to the last; parameters that hang directly on a parent of the list belong to the first stage.

Several stages of one rank share the user's module: each has a `_View`, the dicts of sub-modules and parameters that
are swapped in while it runs. Outside of a stage the module holds the union of what this rank owns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from framework.adapters.torch_private import tree_leaves, tree_map
from framework.errors import RunFailedError
from framework.parts import ModelPart, find_blocks
from framework.stages import Stage, sendable


class _Cut(Exception):
    """Raised by the first block of the next stage: this stage is done."""


class _MetaPrefix(TorchFunctionMode):
    """Moves all tensor arguments of an operation to the meta device if one of them lies there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(leaf.is_meta for leaf in leaves) and not all(leaf.is_meta for leaf in leaves):
            args, kwargs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        return func(*args, **kwargs)


class Absent(nn.Module):
    """Stands where a module of another stage was; has no parameters."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Say why it can't be called."""
        raise RunFailedError(
            f"'{self.name}' belongs to another pipeline stage but was called on this one: what runs before the list of "
            "blocks must be registered before it, what runs after it after it, and nothing may be used on both sides. "
            "Type pp.cut=graph, which follows what is called."
        )


class _Passed(nn.Module):
    """An earlier stage's block: runs on the meta device once for given shapes, then returns what it returned."""

    def __init__(self, block: nn.Module, enter: _Entry | None) -> None:
        super().__init__()
        self.block = block
        self.enter = enter
        self._known: dict[Any, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return meta tensors; the last one before the stage's own blocks returns what was received."""
        key = tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        if key not in self._known:
            meta = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            with torch.no_grad():
                self._known[key] = self.block(*meta[0], **meta[1])
        return self._known[key] if self.enter is None else self.enter.replace(self._known[key])


class _Entry:
    """What a stage received, and the mode that makes everything before it cost nothing."""

    def __init__(self) -> None:
        self.received: Sequence[Tensor] = ()
        self._prefix = ExitStack()

    @contextmanager
    def prefix(self, received: Sequence[Tensor]) -> Iterator[None]:
        """Run the part before the stage's own blocks on the meta device until `replace` is called."""
        self.received = received
        with self._prefix:
            self._prefix.enter_context(_MetaPrefix())
            yield

    def replace(self, returned: Any) -> Any:
        """Put the received tensors in the place of the tensors of `returned`, in order."""
        self._prefix.close()
        arrived = iter(self.received)
        return tree_map(lambda leaf: next(arrived) if isinstance(leaf, Tensor) else leaf, returned)


class _Next(nn.Module):
    """The first block of the next stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """End this stage."""
        raise _Cut


class _View(AbstractContextManager[None]):
    """The dicts of sub-modules and parameters of the parents of the blocks, as one stage sees them."""

    def __init__(self, dicts: Sequence[tuple[nn.Module, dict[str, Any], dict[str, Any]]]) -> None:
        self._dicts = dicts
        self._depth = 0
        self._saved: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of the parents, while swapped

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._saved = [(parent._modules, parent._parameters) for parent, _, _ in self._dicts]
            for parent, modules, parameters in self._dicts:
                parent.__dict__["_modules"], parent.__dict__["_parameters"] = modules, parameters

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            for (parent, _, _), (own_modules, own_parameters) in zip(self._dicts, self._saved, strict=True):
                parent.__dict__["_modules"], parent.__dict__["_parameters"] = own_modules, own_parameters


class BlockStage(Stage):
    """One stage.

    Args:
        root: the user's module.
        view: what it looks like to this stage.
        entry: where received tensors enter; None on the first stage.
        last_block: the stage's last block, whose result is sent on; None on the last stage.
    """

    def __init__(
        self,
        root: LightningModule,
        view: AbstractContextManager[None],
        entry: _Entry | None,
        last_block: nn.Module | None,
    ) -> None:
        super().__init__(root, view)
        self.entry = entry
        self.last_block = last_block
        self._returned: Any = None
        self.watching = False

    def watch(self) -> None:
        """Note what the last block returns; called after all wrapping, so that the hook runs last."""
        if self.last_block is not None and not self.watching:
            self.watching = True
            self.last_block.register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: Any, returned: Any) -> None:
        self._returned = returned

    def forward(self, *received: Tensor, micro: Tensor) -> Any:
        """Run one micro-batch; returns the tensors to send on, or on the last stage what the step method returned."""
        index = int(micro)
        try:
            if self.entry is None:
                result = self.run(index, _plainly)
            else:
                with self.entry.prefix(received):
                    result = self.run(index, _plainly)
        except _Cut:
            tensors = tuple(sendable(leaf) for leaf in tree_leaves(self._returned) if isinstance(leaf, Tensor))
            self._returned = None
            return tensors[0] if len(tensors) == 1 else tensors
        if self.last_block is not None:
            raise RunFailedError("The step method ended without calling all blocks of the pipeline.")
        return result


def _plainly(step: Callable[[], Any]) -> Any:
    return step()


def split_evenly(blocks: int, stages: int) -> list[range]:
    """Share `blocks` out over `stages`, in order; the later stages get one less where it doesn't divide."""
    size, more = divmod(blocks, stages)
    starts = [index * size + min(index, more) for index in range(stages + 1)]
    return [range(starts[i], starts[i + 1]) for i in range(stages)]


def blocks_of(root: nn.Module, path: str | None) -> tuple[str, list[str]]:
    """Return the name of the list of blocks and its keys; None finds the longest list of alike modules.

    Raises:
        ValueError: there is no such list; says what there is.
    """
    if path is None:
        lists: dict[str, int] = {}
        for name in find_blocks(root):
            lists[name.rpartition(".")[0]] = lists.get(name.rpartition(".")[0], 0) + 1
        if not lists:
            raise ValueError(f"{type(root).__name__} has no list of two or more alike modules to cut between")
        path = max(lists, key=lambda name: lists[name])
    try:
        container = root.get_submodule(path)
    except AttributeError:
        lists_found = sorted({name.rpartition(".")[0] for name in find_blocks(root)})
        raise ValueError(f"{type(root).__name__} has no module '{path}'; it has {', '.join(lists_found)}") from None
    return path, [key for key, _ in container.named_children()]


def cut(root: LightningModule, path: str, ranges: Sequence[range], mine: Sequence[int]) -> list[ModelPart]:
    """Cut `root` in place into the stages `mine` of this rank.

    Args:
        root: the user's module, with parameters on the meta device or real ones.
        path: name of the list of blocks.
        ranges: for each stage, which blocks it has.
        mine: numbers of this rank's stages, ascending.

    Returns:
        A part for each of `mine`. `root` keeps the union of them.
    """
    container = root.get_submodule(path)
    keys = list(container._modules)
    blocks = [container._modules[key] for key in keys]
    parents = [(prefix, root.get_submodule(prefix)) for prefix in _prefixes(path)]  # root first, container last
    first, last = 0, len(ranges) - 1
    owner: dict[tuple[int, str], int] = {}  # (parent's depth, child's name) -> the stage that owns it
    for depth, (_, parent) in enumerate(parents[:-1]):
        onward = path.split(".")[depth]
        position = list(parent._modules).index(onward)
        for at, child in enumerate(parent._modules):
            if child != onward:
                owner[depth, child] = first if at < position else last

    views: list[_View] = []
    entries: list[_Entry | None] = []
    for stage in mine:
        entry = _Entry() if stage > 0 else None
        dicts = []
        for depth, (prefix, parent) in enumerate(parents[:-1]):
            modules: dict[str, Any] = {}
            for child, module in parent._modules.items():
                holder = owner.get((depth, child))
                name = f"{prefix}.{child}".lstrip(".")
                if holder is None or holder == stage or module is None:
                    modules[child] = module
                elif holder < stage:
                    modules[child] = copy.deepcopy(module).to("meta")
                else:
                    modules[child] = Absent(name)
            parameters = parent._parameters if stage == first else {k: _meta(p) for k, p in parent._parameters.items()}
            dicts.append((parent, modules, parameters))
        chosen: dict[str, Any] = {}
        for position, key in enumerate(keys):
            if position in ranges[stage]:
                chosen[key] = blocks[position]
            elif position < ranges[stage].start:
                before = copy.deepcopy(blocks[position]).to("meta")  # type: ignore[union-attr]
                chosen[key] = _Passed(before, entry if position == ranges[stage].start - 1 else None)
            elif position == ranges[stage].stop:
                chosen[key] = _Next()
        dicts.append((container, chosen, container._parameters))
        views.append(_View(dicts))
        entries.append(entry)

    _keep_union(root, parents, owner, keys, ranges, mine)

    parts = []
    for stage, view, entry in zip(mine, views, entries, strict=True):
        last_block = None if stage == last else blocks[ranges[stage].stop - 1]
        module = BlockStage(root, view, entry, last_block)
        owned = _owned_modules(parents, owner, stage) | {
            f"{path}.{keys[position]}.{name}".rstrip("."): child
            for position in ranges[stage]
            for name, child in blocks[position].named_modules()  # type: ignore[union-attr]
        }
        mine_parameters = {p for child in owned.values() for p in child._parameters.values() if p is not None}
        if stage == first:
            mine_parameters |= {p for _, parent in parents for p in parent._parameters.values() if p is not None}
        with view:
            foreign = {p for p in nn.Module.parameters(root) if p not in mine_parameters}
        parts.append(
            ModelPart(
                root=root,
                module=module,
                blocks={
                    f"{path}.{keys[at]}": block for at, block in enumerate(blocks) if at in ranges[stage] and block
                },
                owned=owned,
                foreign=foreign,
                index=stage,
                stages=len(ranges),
                view=view,
            )
        )
    return parts


def _prefixes(path: str) -> list[str]:
    """Return `["", "a", "a.b"]` for `a.b`."""
    words = path.split(".")
    return [".".join(words[:length]) for length in range(len(words) + 1)]


def _meta(parameter: nn.Parameter | None) -> nn.Parameter | None:
    return None if parameter is None else nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def _owned_modules(
    parents: Sequence[tuple[str, nn.Module]], owner: dict[tuple[int, str], int], stage: int
) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for (depth, child), holder in owner.items():
        if holder == stage:
            prefix, parent = parents[depth]
            module = parent._modules.get(child)
            if module is not None:
                name = f"{prefix}.{child}".lstrip(".")
                found |= {f"{name}.{inner}".rstrip("."): m for inner, m in module.named_modules()}
    return found


def _keep_union(
    root: nn.Module,
    parents: Sequence[tuple[str, nn.Module]],
    owner: dict[tuple[int, str], int],
    keys: Sequence[str],
    ranges: Sequence[range],
    mine: Sequence[int],
) -> None:
    """Leave in the user's module only what one of this rank's stages owns."""
    for depth, (prefix, parent) in enumerate(parents[:-1]):
        for child, module in list(parent._modules.items()):
            holder = owner.get((depth, child))
            if holder is not None and holder not in mine and module is not None:
                parent._modules[child] = Absent(f"{prefix}.{child}".lstrip("."))
        if 0 not in mine:
            # a new dict: the views of other stages keep the old one's meta copies
            parent.__dict__["_parameters"] = {}
    container = parents[-1][1]
    kept = {position for stage in mine for position in ranges[stage]}
    container.__dict__["_modules"] = {key: container._modules[key] for at, key in enumerate(keys) if at in kept}
