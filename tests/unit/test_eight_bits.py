"""`optimizer=adamw8bit`: what is saved of its state and how it is understood, on plain tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from plans import make_plan
from torch import nn
from torchao.optim import AdamW8bit as Torchaos
from torchao.optim.subclass_8bit import OptimState8bit

from framework.state import flatten_optimizer, optimizer_state, optimizer_template, restore_optimizer
from framework_plugins.optimizer import adamw8bit, fewer_bits
from framework_plugins.optimizer.eight_bits import AdamW8bit

SLOTS = ("exp_avg", "exp_avg_sq")


class Weights(LightningModule):
    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.held = nn.ParameterList(
            torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n, shape in enumerate(shapes)
        )


def stepped(module: Weights, kind: type = AdamW8bit, steps: int = 4) -> Any:
    optimizer = kind(module.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for parameter in module.parameters():
            rows = torch.randn((parameter.shape[0], *[1] * (parameter.ndim - 1)), generator=generator)
            parameter.grad = torch.randn(parameter.shape, generator=generator) * rows
        optimizer.step()
    return optimizer


def values(state: dict[str, Any], slot: str) -> torch.Tensor:
    tensor = state[slot]
    return tensor.dequantize() if isinstance(tensor, OptimState8bit) else tensor


def test_a_step_is_torchaos() -> None:
    ours, theirs = Weights((64, 128), (7,)), Weights((64, 128), (7,))
    stepped(ours)
    with torch.compiler.set_stance("force_eager"):
        stepped(theirs, Torchaos)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_nothing_is_compiled() -> None:
    """As torchao has it, the step would be compiled for each shape."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    stepped(Weights((64, 128)))
    assert not torch._dynamo.utils.counters["frames"]


def test_the_same_state_comes_back_to_the_bit() -> None:
    module, twin = Weights((64, 128), (16, 16, 32), (7,), (5, 1000)), Weights((64, 128), (16, 16, 32), (7,), (5, 1000))
    optimizer, fresh = stepped(module), AdamW8bit(twin.parameters(), lr=0.01)
    kinds = [type(optimizer.state[p]["exp_avg"]) is OptimState8bit for p in module.parameters()]
    assert kinds == [True, True, False, False]  # too few elements; no whole number of blocks
    flat = flatten_optimizer(optimizer_state(module, optimizer), "o.")
    assert all(type(tensor) is torch.Tensor for tensor in flat.values())
    template = optimizer_template(twin, fresh, "o.", {name: (t.dtype, tuple(t.shape)) for name, t in flat.items()})
    for name, tensor in flat.items():
        template[name].copy_(tensor)
    restore_optimizer(twin, fresh, "o.", template, [{"values": {}, "names": []}])
    for one, other in zip(module.parameters(), twin.parameters(), strict=True):
        before, after = optimizer.state[one], fresh.state[other]
        assert torch.equal(before["step"], after["step"])
        for slot in SLOTS:
            if isinstance(before[slot], OptimState8bit):
                assert torch.equal(before[slot].codes, after[slot].codes)
                assert torch.equal(before[slot].scale, after[slot].scale)
            else:
                assert torch.equal(before[slot], after[slot])


def test_the_largest_number_of_a_block_may_be_negative() -> None:
    """Rounded anew it would get another scale: codes alone, or values alone, wouldn't come back."""
    module = Weights((64, 128))
    optimizer = stepped(module)
    (parameter,) = module.parameters()
    state = optimizer.state[parameter]["exp_avg"]
    anew = OptimState8bit.zeros((64, 128))
    anew.copy_(state.dequantize())
    assert not torch.equal(anew.scale, state.scale)


@pytest.mark.parametrize(
    ("cut", "exact"),
    [
        ((slice(0, 32), slice(None)), True),  # blocks are two rows of 128
        ((slice(32, 64), slice(None)), True),
        ((slice(0, 33), slice(None)), True),  # no whole number of blocks: kept whole
        ((slice(1, 33), slice(None)), False),  # across the blocks
        ((slice(None), slice(0, 64)), False),
    ],
)
def test_a_piece_of_it_under_another_mix(cut: Any, exact: bool) -> None:
    module = Weights((64, 128))
    optimizer = stepped(module)
    (parameter,) = module.parameters()
    saved = {
        key: value[cut].contiguous() if value.ndim else value for key, value in optimizer.saved_state(parameter).items()
    }
    after = optimizer.loaded_state(nn.Parameter(parameter.detach()[cut].contiguous()), saved)
    for slot in SLOTS:
        want, got = values(optimizer.state[parameter], slot)[cut], values(after, slot)
        assert torch.equal(got, want) == exact
        assert float((got - want).norm() / want.norm()) < 0.02


def test_small_pieces_become_large_ones() -> None:
    module = Weights((16, 128), (16, 128))
    optimizer = stepped(module)
    pieces = [optimizer.saved_state(parameter) for parameter in module.parameters()]
    saved = {
        key: torch.cat([piece[key] for piece in pieces]) if value.ndim else value for key, value in pieces[0].items()
    }
    after = optimizer.loaded_state(nn.Parameter(torch.zeros(32, 128)), saved)
    for slot in SLOTS:
        assert isinstance(after[slot], OptimState8bit)
        want = torch.cat([optimizer.state[parameter][slot] for parameter in module.parameters()])
        assert float((after[slot].dequantize() - want).norm() / want.norm()) < 0.02


def test_what_the_state_takes() -> None:
    from framework.memory import held_bytes

    module = Weights((64, 128), (16, 100), (5, 1000))
    optimizer = stepped(module, steps=1)
    for parameter in module.parameters():
        held = sum(held_bytes(value) for value in optimizer.state[parameter].values())
        assert held == optimizer.state_bytes(parameter.numel(), 4)


def test_a_package_that_is_missing_and_precisions_that_are_finer(monkeypatch: pytest.MonkeyPatch) -> None:
    option = adamw8bit.AdamW8bit()
    assert not option.check_plan(plan=make_plan(1))
    (problem,) = option.check_plan(plan=make_plan(1, precision="fp64"))
    assert "with precision=fp64 torchao computes the step in fp32" in problem.reason
    monkeypatch.setattr(fewer_bits, "find_spec", lambda name: None)
    (problem,) = option.check_plan(plan=make_plan(1))
    assert str(problem) == (
        'optimizer=adamw8bit: the package torchao isn\'t installed. Type pip install "lightning-framework[lowbit]".'
    )
