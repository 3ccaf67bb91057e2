"""Private names of torch about what a forward computes and keeps; `test_private_apis.py` notices when one moves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
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
