"""What operations return on the meta device, remembered: to look a shape up costs a tenth of working it out.

A stage that is cut anywhere in a step method runs all operations before its own without values, in every micro-batch
(`framework.following`). They are the same ones each time, and on the meta device torch runs them in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from framework.adapters.torch_private import tree_leaves, tree_map

LIMIT = 4096
"""Operations that are remembered; with arguments that never come back all are forgotten, so that memory is bounded."""

_PLAIN = (
    int,
    float,
    complex,
    bool,
    str,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.Size,
)


class _NotPlainError(Exception):
    """Something whose value says not enough about what an operation does with it."""


class Remembered:
    """Calls functions on meta tensors, each once for given shapes, strides, dtypes and plain arguments.

    An object of any other kind among the arguments or results (a function, a subclass of Tensor) has the function
    called each time, and so has a function without a hash. Functions that change an argument must not be called
    through this.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def __call__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what `function(*args, **kwargs)` returns; tensors that it returns new are new each time."""
        try:
            state = torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
            key = (function, state, _key(args), _key(kwargs))
            known = self._known.get(key)
        except (_NotPlainError, TypeError):  # TypeError: a function that has no hash
            return function(*args, **kwargs)
        if known is None:
            result = function(*args, **kwargs)
            given = {id(leaf): at for at, leaf in enumerate(tree_leaves((args, kwargs))) if isinstance(leaf, Tensor)}
            if len(self._known) >= LIMIT:
                self._known.clear()
            with suppress(_NotPlainError):  # then it is called again the next time
                self._known[key] = tree_map(lambda leaf: _Leaf(leaf, given.get(id(leaf))), result)
            return result
        if type(known) is _Leaf and known.given is None:
            return known.made()
        leaves = tree_leaves((args, kwargs))
        return tree_map(lambda leaf: leaf.made() if leaf.given is None else leaves[leaf.given], known)


class _Leaf:
    """How to make one result again: an argument returned as it is, a new tensor, or a plain value."""

    def __init__(self, value: Any, given: int | None) -> None:
        self.given = given
        self.like = _key(value) if isinstance(value, Tensor) else None
        if self.like is None and not isinstance(value, _PLAIN):
            raise _NotPlainError
        self.value = None if isinstance(value, Tensor) else value

    def made(self) -> Any:
        if self.like is None:
            return self.value
        shape, stride, dtype = self.like
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _key(value: Any) -> Any:
    """Return what tells apart two arguments, hashable; 1, 1.0 and True are three."""
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        if value.layout is not torch.strided:
            raise _NotPlainError
        return value.shape, value.stride(), value.dtype
    if kind is tuple or kind is list:
        return (kind, *map(_key, value))
    if kind is dict:
        return (kind, *((name, _key(item)) for name, item in value.items()))
    if kind is slice:
        return (kind, _key(value.start), _key(value.stop), _key(value.step))
    if isinstance(value, _PLAIN):
        return kind, value
    raise _NotPlainError
