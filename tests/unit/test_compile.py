"""`compile=block`: settings, complaints; its numbers stand in the table of mixes."""

from __future__ import annotations

import pytest
import torch
from plans import make_plan
from torch import nn

from framework.parts import whole
from framework_plugins.compile.block import CompiledBlocks


class Stack(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_blocks_are_compiled_in_place_and_keep_their_names():
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(2, 4)
    names, want = list(model.state_dict()), model(x)
    CompiledBlocks(backend="eager").apply_compile(whole(model), make_plan(1))
    assert list(model.state_dict()) == names
    assert all(layer._compiled_call_impl is not None for layer in model.layers)
    torch.testing.assert_close(model(x), want)


def test_what_cannot_be_compiled_is_said():
    plan = make_plan(1)
    said = CompiledBlocks(backend="inducter").check_model(plan, Stack())
    assert [problem.setting for problem in said] == ["compile.backend=inducter"]
    assert "inductor" in said[0].reason
    said = CompiledBlocks().check_model(plan, nn.Linear(2, 2))
    assert "no list of two or more blocks" in said[0].reason
    with pytest.raises(ValueError, match="has no modes"):
        CompiledBlocks(backend="aot_eager", mode="max-autotune")
