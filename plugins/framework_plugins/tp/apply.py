"""Apply a layout to the modules of one stage."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from framework.parts import ModelPart
from framework_plugins.tp.gradient_shapes import note_
from framework_plugins.tp.layout import Layout, parent
from framework_plugins.tp.styles import (
    Axis,
    Colwise,
    Embedding,
    Head,
    Replicated,
    Rowwise,
    Siblings,
    _Layer,
    broadcast_,
    enclose_,
)


def split_(part: ModelPart, layout: Layout, axis: Axis) -> None:
    """Split the layers of `part` in place; parameters that no pattern names stay plain and become equal over the axis.

    Args:
        part: one stage; its weights are real or on the meta device.
        layout: the plan, resolved for the names in `part.owned`.
        axis: shared state of the part's layers.
    """
    siblings: dict[str, Siblings] = {}
    done: set[nn.Module] = set()
    paths = {module: name for name, module in part.owned.items()}
    for name, word in layout.words.items():
        module = part.owned[name]
        if module in done:
            continue
        done.add(module)
        family = siblings.setdefault(parent(name), Siblings(axis))
        for target in _targets(module, word):
            if axis.check_shapes:
                note_(target, paths[target], word, axis.mesh.size(), axis.mesh.get_local_rank())
            parallelize_module(target, axis.mesh, _style(word, axis, family))
            done.add(target)
    for name, attribute in layout.divided:
        setattr(part.owned[name], attribute, getattr(part.owned[name], attribute) // axis.mesh.size())
    for module in part.owned.values():
        if module not in done:
            broadcast_(module, axis)
    for name, block in part.blocks.items():
        enclose_(block, axis, [one for owner, one in siblings.items() if f"{owner}.".startswith(f"{name}.")])
    part.module.register_forward_hook(lambda *_: axis.streams.to_main(), always_call=True)


def _targets(module: nn.Module, word: str) -> list[nn.Module]:
    """Return the modules to change: the layer, or for replicated words each module inside that has parameters."""
    if word not in ("norm", "shared", "copied"):
        return [module]
    return [one for one in module.modules() if any(True for _ in one.parameters(recurse=False))]


def _style(word: str, axis: Axis, siblings: Siblings) -> _Layer:
    if word == "colwise":
        return Colwise(axis, siblings)
    if word == "rowwise":
        return Rowwise(axis, siblings)
    if word == "embedding":
        return Embedding(axis)
    if word == "head":
        return Head(axis)
    return Replicated(axis, summed=word == "shared" or (word == "norm" and axis.sequence_parallel))
