"""What is remembered of operations on the meta device is what running them again would give."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from framework.remembered import LIMIT, Remembered


def meta(*shape: int, **options: Any) -> Tensor:
    return torch.empty(shape, device="meta", **options)


class Counted:
    """Counts the calls of functions; a function of its own has a hash, so it may be remembered."""

    def __init__(self) -> None:
        self.calls = Counter[str]()
        self.remembered = Remembered()

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.calls[function.__name__] += 1
            return function(*args, **kwargs)

        self.counting = getattr(self, "counting", {})
        return self.remembered(self.counting.setdefault(function, counting), args, kwargs)


CASES = [
    (torch.matmul, (meta(3, 4), meta(4, 5)), {}),
    (torch.transpose, (meta(3, 4), 0, 1), {}),
    (Tensor.expand, (meta(3, 1), 3, 7), {}),
    (torch.split, (meta(6, 4, dtype=torch.bfloat16), 2), {"dim": 0}),
    (torch.cat, ([meta(2, 3), meta(4, 3)],), {}),
    (Tensor.__getitem__, (meta(5, 4), (slice(1, 3), None, ...)), {}),
    (Tensor.size, (meta(5, 4),), {}),
    (torch.topk, (meta(5, 4), 2), {}),
    (F.layer_norm, (meta(2, 8), (8,), nn.Parameter(meta(8))), {}),
    (Tensor.to, (meta(5, 4), torch.float64), {}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_second_call_gives_the_same_shapes_strides_and_dtypes(function: Any, args: Any, kwargs: Any) -> None:
    counted = Counted()
    first, second = (counted(function, *args, **kwargs) for _ in range(2))
    for want, got in zip(leaves(function(*args, **kwargs)), leaves(second), strict=True):
        assert type(want) is type(got)
        if isinstance(want, Tensor):
            assert (got.shape, got.stride(), got.dtype, got.is_meta) == (want.shape, want.stride(), want.dtype, True)
            assert all(got is not one for one in leaves(first))  # tensors are told apart by what they are
        else:
            assert got == want
    assert type(second) is type(first)


def leaves(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def test_it_runs_once_for_given_arguments_and_again_for_others() -> None:
    counted = Counted()
    for shape in ((2, 3), (2, 3), (3, 3), (2, 3)):
        counted(torch.relu, meta(*shape))
    assert counted.calls == {"relu": 2}
    for number in (1, 1.0, True, 1):  # equal and of one hash, and not the same
        assert counted(torch.add, meta(2, dtype=torch.int64), number).dtype == (
            torch.float32 if number is not True and isinstance(number, float) else torch.int64
        )
    assert counted.calls["add"] == 3
    counted(torch.relu, meta(3, 2).T)  # other strides
    counted(torch.relu, meta(2, 3, dtype=torch.float64))
    assert counted.calls["relu"] == 4


def test_an_argument_that_comes_back_stays_itself() -> None:
    """`x.contiguous()` is x: what follows a value by its identity must find it again."""
    remembered = Remembered()
    remembered(Tensor.contiguous, (meta(2, 3),), {})
    again = meta(2, 3)
    assert remembered(Tensor.contiguous, (again,), {}) is again


def test_the_default_dtype_and_autocast_count() -> None:
    counted = Counted()
    assert counted(torch.zeros, 2, device=torch.device("meta")).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert counted(torch.zeros, 2, device=torch.device("meta")).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        counted(torch.zeros, 2, device=torch.device("meta"))
    assert counted.calls == {"zeros": 3}


def test_what_no_key_tells_apart_runs_each_time() -> None:
    class Special(Tensor):
        pass

    counted = Counted()
    for _ in range(2):
        counted(torch.relu, meta(2).as_subclass(Special))
        counted(lambda_with_a_function, meta(2), abs)
    assert counted.calls == {"relu": 2, "lambda_with_a_function": 2}


def lambda_with_a_function(tensor: Tensor, function: Any) -> Tensor:
    return tensor


def test_memory_is_bounded() -> None:
    remembered = Remembered()
    for number in range(LIMIT + 10):
        remembered(torch.mul, (meta(1), float(number)), {})
    assert len(remembered._known) <= LIMIT
