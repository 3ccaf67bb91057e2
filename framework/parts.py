"""`ModelPart`: the piece of a LightningModule that one stage of one rank holds, as the surgery plugins see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from lightning.pytorch import LightningModule
from torch import nn

if TYPE_CHECKING:
    from framework.dropout import Masks


class Reduction(Protocol):
    """What a data-parallel option has to do around the backward passes of a part, where no wrapper of its does it."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Micro-steps inside, all of a window but its last, leave gradients on the rank."""

    def finish(self, dropped: bool = False) -> Sequence[str]:
        """Called on all ranks after the last backward of a window, before anything reads a gradient; collective.

        Args:
            dropped: all ranks agreed to leave the step out before its backward, so there may be no gradient at all.

        Returns:
            Names of parameters that got no gradient here and had to; then nothing was reduced.
        """


@dataclass(eq=False)
class ModelPart:
    """One stage's share of the model; without a pipeline the whole model is the only part.

    Names are always global: the name in the user's LightningModule (`model.layers.7.attention.wq`).

    Attributes:
        root: the user's LightningModule.
        module: what is called to run this part, and so what a data-parallel wrap is applied to last. Without a
            pipeline this is `root`.
        blocks: the repeated blocks of this part, by name: units of sharding, checkpointing and compilation.
        owned: all modules of this part (blocks, embeddings, norms, heads and their children), by name.
        foreign: parameters reachable from `module` that another stage owns (on the meta device).
        index: stage number, 0 first.
        stages: number of stages in all.
        experts: modules whose parameters are DTensors over axis ep, by name: a data-parallel wrap averages their
            gradients over dp_mod_ep (and dp_replicate) instead of dp_shard.
        view: inside it `root` looks as this part sees it; entered around surgery on the part.
        shared: parameters that several stages hold a copy of, by (first) name -> those stages.
        contexts: entered by the strategy around each step's forward and backward (`loss_parallel`, say).
        initialised: called with each parameter of a module without weights as soon as it has its initial values, for
            engines that shard a parameter only then; None = nothing to do.
        reduction: of the gradients; None where `module` itself does it.
        cuts: what the strategy does to each batch before its step (context parallelism cuts sequences).
        masks: of dropout, one object for all parts of a rank: who cuts activations tells it how; None = nothing drops.
        first: whether this is the first of this rank's parts: what acts once a rank is put here.
    """

    root: LightningModule
    module: nn.Module
    blocks: dict[str, nn.Module]
    owned: dict[str, nn.Module]
    foreign: set[nn.Parameter] = field(default_factory=set)
    index: int = 0
    stages: int = 1
    experts: dict[str, nn.Module] = field(default_factory=dict)
    view: AbstractContextManager[None] = field(default_factory=nullcontext)
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    initialised: Callable[[nn.Parameter], None] | None = None
    reduction: Reduction | None = None
    cuts: list[Callable[[Any], Any]] = field(default_factory=list)
    masks: Masks | None = None
    first: bool = True

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield each owned parameter once."""
        seen = set(self.foreign)
        for parameter in self.module.parameters():
            if parameter not in seen:
                seen.add(parameter)
                yield parameter


def find_blocks(root: nn.Module) -> dict[str, nn.Module]:
    """Find the repeated blocks of a model: children of the outermost lists of two or more modules of one class.

    Returns global name -> block in order; empty if the model has no such list.
    """
    blocks: dict[str, nn.Module] = {}
    for name, child in root.named_children():
        children = list(child.named_children())
        if (
            isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
            and len(children) > 1
            and len({type(grandchild) for _, grandchild in children}) == 1
            and any(True for _ in children[0][1].parameters())
        ):
            blocks |= {f"{name}.{key}": block for key, block in children}
        else:
            blocks |= {f"{name}.{key}": block for key, block in find_blocks(child).items()}
    return blocks


def whole(root: LightningModule) -> ModelPart:
    """Return the part that holds everything."""
    return ModelPart(root=root, module=root, blocks=find_blocks(root), owned=dict(root.named_modules()))
