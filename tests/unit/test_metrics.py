"""`framework.metrics`: sums by name of what was logged, as numbers of the moment."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from framework.metrics import Entry, Layout, Totals, numbers, snapshot


def totals(*steps: tuple[Any, str, float | None, Any]) -> Totals:
    result = Totals()
    for value, reduction, size, weight in steps:
        result.add({"x": Entry(value, reduction, size)}, weight)
    result.settle()
    return result


@pytest.mark.parametrize(
    ("reduction", "wanted"),
    [("mean", (2.0 * 1 + 5.0 * 3, 4.0)), ("sum", (7.0, 4.0)), ("min", (2.0, 4.0)), ("max", (5.0, 4.0))],
)
def test_two_steps_are_added_up_as_they_are_reduced(reduction: str, wanted: tuple[float, float]) -> None:
    assert totals((2.0, reduction, None, 1), (5.0, reduction, None, 3)).entries["x"][:2] == wanted


def test_a_mean_without_tokens_counts_nothing_and_a_nan_elsewhere_is_seen() -> None:
    assert totals((math.nan, "mean", None, 0), (5.0, "mean", None, 3)).entries["x"][:2] == (15.0, 3.0)
    assert math.isnan(totals((math.nan, "max", None, 1), (5.0, "max", None, 1)).entries["x"][0])
    assert math.isnan(totals((5.0, "min", None, 1), (math.nan, "min", None, 1)).entries["x"][0])


def test_a_batch_size_of_its_own_wins_over_the_weight_of_the_loss() -> None:
    assert totals((2.0, "mean", 8.0, 1)).entries["x"][:2] == (16.0, 8.0)


def test_a_weight_is_the_number_of_the_moment() -> None:
    """Its owner may go on counting in the same tensor."""
    seen, waiting = torch.zeros((), dtype=torch.float64), Totals()
    for samples in (2, 4):
        seen += samples
        waiting.add({"x": Entry(1.0, "mean", None)}, seen)
    waiting.settle()
    assert waiting.entries["x"][:2] == (8.0, 8.0)


@pytest.mark.parametrize(
    "value",
    [
        3,
        True,
        torch.tensor(2),
        torch.tensor([2.5]),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor(1.5, requires_grad=True),
    ],
)
def test_any_scalar_becomes_a_number(value: Any) -> None:
    assert numbers([value]) == [float(value.detach() if isinstance(value, torch.Tensor) else value)]


def test_a_layout_gives_zeros_for_what_a_rank_did_not_log() -> None:
    layout = Layout()
    layout.agree(totals((2.0, "mean", None, 4)), contributes=True)
    assert layout.pack(Totals()) == [0.0, 0.0]
    ((name, value, weight, _),) = layout.unpack([0.0, 0.0], Totals(), torch.device("cpu"))
    assert (name, weight) == ("x", 0.0)
    assert math.isnan(value)


def norm_of_a_shard() -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return snapshot(distribute_tensor(torch.tensor([3.0, 4.0]), mesh, [Shard(0)]).norm())


def test_a_sharded_value_is_the_whole_one(pool: Any) -> None:
    """`item` of a DTensor is this rank's piece: 3 and 4 instead of 5."""
    assert pool.run(norm_of_a_shard, 2) == [5.0, 5.0]
