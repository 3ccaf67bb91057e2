"""Private names of torch about what a forward computes and keeps; `test_private_apis.py` notices when one moves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

See = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


class _Operators(TorchDispatchMode):
    """Tells of every operator below autograd; half of what a block computes is one function to the public mode."""

    def __init__(self, see: See) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.see(func, args, kwargs, out)
        return out


def operators(see: See) -> AbstractContextManager[Any]:
    """Inside, `see(operator, arguments, keywords, result)` is told of every operator after it ran."""
    return _Operators(see)


def written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operator writes into."""
    found = []
    for index, argument in enumerate(operator._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [
                one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, Tensor)
            ]
    return found


def version(tensor: Tensor) -> int:
    """Return how often the memory of `tensor` was written in place, as autograd counts it."""
    return int(tensor._version)


def is_weight(tensor: Tensor, inputs: Collection[Any]) -> bool:
    """Whether a tensor is a parameter, or made of parameters alone: transposed, in autocast's format, one expert's.

    Args:
        tensor: saved by a block.
        inputs: nodes of the graph that made the block's inputs; what comes from them is no weight.
    """
    if isinstance(tensor, nn.Parameter):
        return True
    todo, seen = [tensor.grad_fn], 0
    while todo:
        node: Any = todo.pop()
        ends = isinstance(getattr(node, "variable", None), nn.Parameter)
        if node is None or node in inputs or not (ends or node.next_functions) or seen == _NODES:
            return False
        seen += 1
        todo += [before for before, _ in node.next_functions if before is not None]
    return True


_NODES = 32
"""That lie between a weight and what is made of it, at most; what has more behind it is taken for an activation."""


def memory_tracker() -> Any:
    """Return torch's tracker of live tensors by category, for `tools/bench.py savings`; it slows a step down.

    What is mapped from files isn't among them, as the system takes its memory back when it needs it: `most_mapped` are
    the most bytes of that at once.
    """
    from torch.distributed._tools.common_utils import get_untyped_storages
    from torch.distributed._tools.mem_tracker import MemTracker

    class Tracker(MemTracker):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()
            self.mapped: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
            self.most_mapped = 0

        def _track(self, reftype: Any, t: Tensor) -> None:
            storages = get_untyped_storages(t)
            if not all(storage.filename for storage in storages):
                super()._track(reftype, t)
                return
            self.mapped.update((storage, storage.nbytes()) for storage in storages)
            self.most_mapped = max(self.most_mapped, sum(self.mapped.values()))

    return Tracker()
