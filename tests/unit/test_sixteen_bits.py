"""`optimizer=adamw_bf16`: what a step does, what is saved of its state, and which averages would stand still."""

from __future__ import annotations

import pytest
import torch
from plans import make_plan
from test_eight_bits import SLOTS, Weights, stepped
from torch import nn

from framework.memory import held_bytes, probe
from framework.state import flatten_optimizer, optimizer_state, optimizer_template, restore_optimizer
from framework_plugins.optimizer.adamw_bf16 import AdamWBf16 as Option
from framework_plugins.optimizer.sixteen_bits import AdamWBf16


def test_a_step_is_adamws_with_averages_rounded_once() -> None:
    """The rule written out, in fp32; bias corrections as in Adam's paper."""
    module = Weights((64, 128), (7,))
    start = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = stepped(module, AdamWBf16, steps=3)
    twin, gradients = Weights((64, 128), (7,)), []
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        for parameter in twin.parameters():
            rows = torch.randn((parameter.shape[0], *[1] * (parameter.ndim - 1)), generator=generator)
            gradients.append(torch.randn(parameter.shape, generator=generator) * rows)
    for number, (parameter, weight) in enumerate(zip(module.parameters(), start, strict=True)):
        first, second = torch.zeros_like(weight), torch.zeros_like(weight)
        for step, gradient in enumerate(gradients[number::2], 1):
            first = 0.9 * first + 0.1 * gradient
            second = 0.95 * second + 0.05 * gradient**2
            weight = weight - 0.01 * 0.1 * weight  # noqa: PLW2901
            weight = weight - 0.01 * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)  # noqa: PLW2901
            first, second = first.bfloat16().float(), second.bfloat16().float()
        torch.testing.assert_close(parameter.detach(), weight, rtol=1e-5, atol=1e-6)
        state = optimizer.state[parameter]
        assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.bfloat16
        torch.testing.assert_close(state["exp_avg"].float(), first, rtol=2**-7, atol=1e-6)
        torch.testing.assert_close(state["exp_avg_sq"].float(), second, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_bytes_each_beside_weights_of_any_format(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(8, 8, dtype=dtype))
    optimizer = AdamWBf16([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = sum(held_bytes(value) for value in optimizer.state[parameter].values())
    assert held == optimizer.state_bytes(64, dtype.itemsize) == 64 * 4 + 4
    assert probe(optimizer, optimizer.param_groups[0], dtype) == (4.0, 4)


@pytest.mark.parametrize("after", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [torch.float32, torch.bfloat16])
def test_the_same_state_comes_back_whatever_the_weights_are(before: torch.dtype, after: torch.dtype) -> None:
    """Saved beside weights of the averages' own format, it could be taken for something that follows it."""
    module, twin = Weights((64, 128), (7,)).to(before), Weights((64, 128), (7,)).to(after)
    optimizer = AdamWBf16(module.parameters(), lr=0.01)
    fresh = AdamWBf16(twin.parameters(), lr=0.01)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    flat = flatten_optimizer(optimizer_state(module, optimizer), "o.")
    entries = {name: (t.dtype, tuple(t.shape)) for name, t in flat.items()}
    entries |= {f"model.{name}": (t.dtype, tuple(t.shape)) for name, t in module.named_parameters()}
    template = optimizer_template(twin, fresh, "o.", entries)
    for name, tensor in flat.items():
        template[name].copy_(tensor)
    restore_optimizer(twin, fresh, "o.", template, [{"values": {}, "names": []}])
    for one, other in zip(module.parameters(), twin.parameters(), strict=True):
        for slot in SLOTS:
            assert fresh.state[other][slot].dtype is torch.bfloat16
            assert torch.equal(optimizer.state[one][slot], fresh.state[other][slot])


def stands_still(beta: float) -> bool:
    """Whether some average doesn't fall though nothing is added to it."""
    average = torch.arange(128, 256).bfloat16() / 128  # all mantissas
    return bool(((average.float() * beta).bfloat16() == average).any())


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.99, 0.996, 0.9962, 0.999, 0.9999])
def test_averages_that_would_stand_still_are_refused(beta: float) -> None:
    problems = [*Option(betas=[0.9, beta]).check_plan(plan=make_plan(1))]
    assert bool(problems) == stands_still(beta)
    assert all(problem.fix == "optimizer.betas=[0.9,0.99]" for problem in problems)
