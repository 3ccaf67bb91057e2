"""What the process harness sends between processes arrives as it was, a view without the rest of its storage."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from framework.testing.rank_process import dumps

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type_arrive(dtype: torch.dtype) -> None:
    sent = {"whole": torch.arange(6).view(2, 3).to(dtype), "scalar": torch.tensor(1).to(dtype)}
    got = pickle.loads(dumps(sent))
    for name, tensor in sent.items():
        assert torch.equal(got[name], tensor)
        assert got[name].dtype == dtype
        got[name].zero_()  # it can be written to


def test_a_view_travels_alone() -> None:
    view = torch.arange(1_000_000.0)[::100_000]
    sent = dumps({"view": view})
    assert len(sent) < 1_000
    assert torch.equal(pickle.loads(sent)["view"], view)


def test_what_is_more_than_a_tensor_stays_so() -> None:
    got = pickle.loads(dumps([nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)]))
    assert isinstance(got[0], nn.Parameter)
    assert got[1].requires_grad
