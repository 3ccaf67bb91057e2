"""Clipping in one process: same numbers as torch's own function."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from framework.clipping import clip_, total_norm


def model_with_gradients(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    model[1].bias.grad = None
    return model


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("bound", [0.3, 100.0])
def test_equals_torch(norm_type: float, bound: float) -> None:
    ours, theirs = model_with_gradients(torch.float64), model_with_gradients(torch.float64)
    want = nn.utils.clip_grad_norm_(theirs.parameters(), bound, norm_type)
    got = clip_(ours.parameters(), None, bound, norm_type)
    assert float(got) == pytest.approx(float(want), rel=1e-14)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-14, atol=0)


def test_value_cuts_elements() -> None:
    ours, theirs = model_with_gradients(), model_with_gradients()
    nn.utils.clip_grad_value_(theirs.parameters(), 0.25)
    clip_(ours.parameters(), None, 0.25, algorithm="value")
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        if a.grad is not None:
            assert torch.equal(a.grad, b.grad)
            assert float(a.grad.abs().max()) <= 0.25


def test_low_precision_is_added_up_in_float32() -> None:
    """In bf16, 4096 squares of 0.01 stop growing at a fraction of their sum."""
    parameter = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    norm = total_norm([parameter], None)
    assert norm.dtype is torch.float32
    assert float(norm) == pytest.approx(64 * float(torch.tensor(0.01, dtype=torch.bfloat16)), rel=1e-5)


def test_sparse_gradients() -> None:
    dense, sparse = nn.Embedding(6, 3), nn.Embedding(6, 3, sparse=True)
    sparse.load_state_dict(copy.deepcopy(dense.state_dict()))
    ids = torch.tensor([1, 1, 4])
    for table in (dense, sparse):
        table(ids).pow(2).sum().backward()
        table.norm = float(clip_(table.parameters(), None, 0.5))
    assert sparse.norm == pytest.approx(dense.norm, rel=1e-6)
    torch.testing.assert_close(sparse.weight.grad.to_dense(), dense.weight.grad)


def test_no_parameters_is_zero() -> None:
    assert float(total_norm([], None)) == 0.0


def test_mistakes_name_the_setting() -> None:
    model = model_with_gradients()
    with pytest.raises(ValueError, match="=median is unknown: type one of norm, inf_norm, value"):
        clip_(model.parameters(), None, 1.0, algorithm="median")
    with pytest.raises(ValueError, match=r"gradient_clip_val=-1\.0"):
        clip_(model.parameters(), None, -1.0)
    with pytest.raises(ValueError, match="norm_type=0"):
        total_norm(model.parameters(), None, 0)
