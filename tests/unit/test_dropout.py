"""Masks as a function of module, step, sample and place: whatever piece a rank has, it is a piece of the same mask."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from framework import dropout
from framework.dropout import FEATURES, SEQUENCE, Masks, Split, Tokens

SAMPLES, LENGTH, WIDTH = 6, 8, 4
ONES = torch.ones(SAMPLES, LENGTH, WIDTH)


class Two(nn.Module):
    """Drops twice with one module."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x) + 10 * self.drop(x)


def begun(step: int = 0, samples: range = range(SAMPLES), seed: int = 1, p: float = 0.5) -> tuple[Two, Masks]:
    module = Two(p)
    masks = dropout.install(module, seed)
    assert masks is not None
    masks.begin(step, samples)
    return module, masks


def test_a_mask_belongs_to_a_sample_wherever_it_is() -> None:
    whole = begun()[0](ONES)
    for samples in (range(0, 2), range(2, 6), range(1, 6, 2)):
        piece = begun(samples=samples)[0](ONES[: len(samples)])
        assert torch.equal(piece, whole[samples.start : samples.stop : samples.step])


def test_what_a_mask_depends_on() -> None:
    whole = begun()[0](ONES)
    values = set(whole.unique().tolist())
    assert values == {0.0, 2.0, 20.0, 22.0}, "the second call drops something else"
    assert not torch.equal(whole[0], whole[1])
    for other in (begun(step=1), begun(seed=2)):
        assert not torch.equal(other[0](ONES), whole)
    torch.rand(3)
    assert torch.equal(begun()[0](ONES), whole)


def test_a_rate_is_met_and_the_mean_kept() -> None:
    module, _ = begun(p=0.25)
    x = torch.ones(SAMPLES, 100, 100, dtype=torch.float64)
    dropped = module.drop(x)
    assert float((dropped == 0).double().mean()) == pytest.approx(0.25, abs=0.01)
    assert set(dropped.unique().tolist()) == {0.0, 1 / 0.75}
    assert torch.equal(begun(p=1.0)[0](ONES), torch.zeros_like(ONES))


def test_gradients_go_where_values_went() -> None:
    module, _ = begun()
    x = ONES.clone().requires_grad_()
    y = module.drop(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("ranks", [2, 4])
def test_pieces_of_sequence_and_features(ranks: int) -> None:
    whole = begun()[0].drop(ONES)
    heads = torch.ones(SAMPLES, WIDTH, LENGTH, LENGTH)
    of_heads = begun()[0].drop(heads)
    for rank in range(ranks):
        for cut, dim, x, want in (
            (SEQUENCE, 1, ONES, whole),
            (FEATURES, 2, ONES, whole),
            (FEATURES, 1, heads, of_heads),
        ):
            module, masks = begun()
            masks.split = Split(cut, rank, ranks)
            assert torch.equal(module.drop(x.chunk(ranks, dim)[rank]), want.chunk(ranks, dim)[rank])


def test_pieces_of_context_parallelism_that_tensor_parallelism_cuts_again() -> None:
    whole = begun()[0].drop(ONES)
    mine = torch.tensor([0, 1, 6, 7])
    module, masks = begun()
    masks.tokens = Tokens(mine, LENGTH)
    assert torch.equal(module.drop(ONES[:, mine]), whole[:, mine])
    module, masks = begun()
    masks.tokens, masks.split = Tokens(mine, LENGTH), Split(SEQUENCE, 1, 2)
    assert torch.equal(module.drop(ONES[:, mine[2:]]), whole[:, mine[2:]])


def test_micro_batches_and_what_is_computed_again() -> None:
    whole = begun()[0](ONES)
    module, masks = begun()
    again = []
    for index in range(3):
        masks.micro_batch(index, 3)
        run = masks.recomputed(module)
        x = ONES[:2]
        assert torch.equal(run(x), whole[2 * index : 2 * index + 2])
        again.append(run)
    for index in (1, 0, 2):
        assert torch.equal(again[index](ONES[:2]), whole[2 * index : 2 * index + 2])
    assert torch.equal(module.drop(ONES[:2]), begun_after(2, whole)), "what is computed again counts for nothing else"


def begun_after(calls: int, whole: Tensor) -> Tensor:
    """The third call of the module for the last micro-batch."""
    module, masks = begun()
    masks.micro_batch(2, 3)
    for _ in range(calls):
        module.drop(ONES[:2])
    return module.drop(ONES[:2])


def test_channels_are_dropped_whole() -> None:
    module = nn.Sequential(nn.Dropout2d(0.5))
    masks = dropout.install(module, 1)
    masks.begin(0, range(SAMPLES))
    y = module(torch.ones(SAMPLES, 8, 3, 3)).flatten(2)
    assert torch.equal(y.min(-1).values, y.max(-1).values)
    assert set(y.unique().tolist()) == {0.0, 2.0}


def test_another_dim_0_is_said_once(caplog) -> None:
    module, masks = begun()
    with caplog.at_level(logging.WARNING):
        module(ONES.flatten(0, 1))
    assert [record.message for record in caplog.records] == [
        "drop drops from a tensor of shape (48, 4), whose dim 0 isn't the 6 samples of the micro-batch: its masks "
        "depend on the mix."
    ]
    assert masks.by_rank == {"drop"}


def test_nothing_is_changed_where_nothing_drops() -> None:
    class Own(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            return x * 3

    assert dropout.install(nn.Sequential(nn.Dropout(0.0), nn.Linear(2, 2), Own(0.5)), 1) is None
    module, _ = begun()
    module.eval()
    assert torch.equal(module(ONES), ONES * 11)


def test_what_was_never_called_is_known() -> None:
    module = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)])
    masks = dropout.install(module, 1)
    masks.begin(0, range(SAMPLES))
    module[0](ONES)
    assert masks.unused == {"1"}


def test_one_module_under_two_names_is_said(caplog) -> None:
    shared = nn.Dropout(0.5)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Dropout(0.5)})
    with caplog.at_level(logging.WARNING):
        masks = dropout.install(model, 1)
    assert [record.message for record in caplog.records] == ["a, b is one module, so its masks depend on the mix."]
    assert (masks.by_rank, masks.unused) == ({"a", "b"}, {"c"})
