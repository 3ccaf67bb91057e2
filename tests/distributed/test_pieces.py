"""Whole tensors from what ranks have: pieces, copies, and what is missing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from framework.verify import pieces
from framework.verify.pieces import Piece


def piece(values: Tensor, *place: range | tuple[int, ...], shape: tuple[int, ...] = (4, 3)) -> Piece:
    return Piece(shape, place, values)


WHOLE = torch.arange(12.0).view(4, 3)
TOP, BOTTOM = (piece(WHOLE[rows.start : rows.stop], rows, range(3)) for rows in (range(2), range(2, 4)))


def test_pieces_make_a_whole_whatever_rank_has_them() -> None:
    odd = piece(WHOLE[[0, 3]], (0, 3), range(3))
    even = piece(WHOLE[[1, 2]], (1, 2), range(3))
    for everyone in ([{"w": TOP}, {"w": BOTTOM}], [{"w": BOTTOM}, {}, {"w": TOP}], [{"w": odd}, {"w": even}]):
        made, apart = pieces.whole(everyone)
        assert torch.equal(made["w"], WHOLE)
        assert apart == {}
    assert pieces.global_norm([pieces.norms({"w": TOP}, 2), pieces.norms({"w": BOTTOM}, 2)], 2) == pytest.approx(
        float(WHOLE.norm())
    )


def test_copies_count_once_and_are_compared() -> None:
    other = piece(TOP.values * (1 + 1e-6), *TOP.place)
    everyone = [{"w": TOP}, {"w": BOTTOM}, {"w": TOP}, {"w": other}]
    made, apart = pieces.whole(everyone)
    assert torch.equal(made["w"], WHOLE)
    assert apart == {"w on rank 3": pytest.approx(1e-6, rel=0.1)}
    squares = [pieces.norms(theirs, 2) for theirs in everyone[:3]]
    assert pieces.global_norm(squares, 2) == pytest.approx(float(WHOLE.norm()))
    assert pieces.global_norm([pieces.norms(theirs, math.inf) for theirs in everyone[:3]], math.inf) == 11.0


@pytest.mark.parametrize(
    "everyone",
    [
        [{"w": TOP}],
        [{"w": TOP}, {"w": piece(WHOLE, range(4), range(3))}],
        [{"w": TOP}, {"w": piece(WHOLE[2:].half(), *BOTTOM.place)}],
        [{"w": TOP}, {"w": piece(WHOLE[2:], *BOTTOM.place, shape=(5, 3))}],
    ],
    ids=["missing", "overlapping", "other dtype", "other shape"],
)
def test_what_does_not_fit_is_infinitely_far(everyone: list[dict[str, Piece]]) -> None:
    assert math.inf in pieces.whole(everyone)[1].values()


def held() -> tuple[dict[str, Piece], dict[str, Tensor]]:
    """Layouts of every kind, on each of four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6, dtype=torch.float64), nn.Linear(6, 7, dtype=torch.float64))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])  # dim 0 of the first is cut twice, and unevenly
    partial = DTensor.from_local(torch.full((2,), 0.5), mesh, [Partial(), Replicate()])
    uneven = distribute_tensor(torch.arange(5.0), mesh, [Shard(0), Replicate()])
    extra = {"sum": partial, "uneven": uneven, "scalar": torch.tensor(3.0), "elsewhere": torch.empty(2, device="meta")}
    whole = {name: p.full_tensor() for name, p in model.named_parameters()}
    return pieces.of([*model.named_parameters(), *extra.items()]), whole


def test_layouts_of_dtensors(pool) -> None:
    ranks = pool.run(held, 4)
    made, apart = pieces.whole([mine for mine, _ in ranks])
    want = ranks[0][1]
    assert apart == {}
    assert made.keys() == {*want, "sum", "uneven", "scalar"}
    assert all(torch.equal(made[name], tensor) for name, tensor in want.items())
    assert made["sum"].tolist() == [1.0, 1.0]
    assert made["uneven"].tolist() == [0, 1, 2, 3, 4]
    assert made["scalar"].item() == 3.0
