"""Plans that are found by tracing: what is split, what is left whole, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from tp_models import Gpt

from framework.errors import UsageError
from framework.plan import MeshSpec, RunPlan
from framework_plugins.model.gpt import GPT
from framework_plugins.tp.layout import resolve
from framework_plugins.tp.megatron import MegatronParallel
from framework_plugins.tp.tracing import find, guard_

WIDTH, HEADS, SIZE = 16, 4, 4


def test_the_plans_of_known_models_are_found() -> None:
    """But for norms on whole activations, which need no word, they are those written by hand."""
    for model in (Gpt(), GPT(layers=2, kv_heads=2)):
        found = find(model)
        assert found.whole == {}
        where = [name for name, _ in model.named_modules()]
        by_hand = {k: v for k, v in resolve(model.tp_plan, where).words.items() if v != "norm"}
        assert resolve(found.words, where).words == by_hand
    assert find(model).sides["layers.0"] == {"cos", "sin"}


class Attention(nn.Module):
    """As users write it: with the number of heads in its views, and products and a softmax by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads, self.last = HEADS, SIZE

    def split(self, y: Tensor) -> Tensor:
        return y.view(y.shape[0], y.shape[1], self.heads, self.last).transpose(1, 2)

    def join(self, y: Tensor) -> Tensor:
        return y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(SIZE) + mask
        return self.o(self.join(scores.softmax(dim=-1) @ v))


class LooseWidth(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.last = -1


class Literal(Attention):
    def split(self, y: Tensor) -> Tensor:
        return y.view(y.shape[0], y.shape[1], 4, -1).transpose(1, 2)


class CountedTwice(Attention):
    """Divides by the number of heads, too."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, mask) / self.heads


class NotTransposed(Attention):
    """Attention from head to head: a piece of the heads isn't enough."""

    def split(self, y: Tensor) -> Tensor:
        return y.view(y.shape[0], y.shape[1], self.heads, self.last)


class WidthInView(Attention):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        v = self.split(self.v(x)) + 0 * self.split(self.q(x)) + 0 * self.split(self.k(x))
        return self.o(v.transpose(1, 2).reshape(x.shape[0], x.shape[1], WIDTH))


class LearnedBias(Attention):
    """What is added to the scores learns: each rank would have the gradient of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, mask + self.bias)


class Starred(nn.Module):
    """Passes `x.shape[:-1]` number by number; the mask is optional."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.q(x).view(*x.shape[:-1], -1, SIZE).transpose(1, 2)
        return self.o(F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).flatten(-2))


class Two(nn.Module):
    """up and down, with something in between."""

    def __init__(self, between: Any = torch.relu) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)) * self.gate(x))


class Residual(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) + x) + self.gate(x)


class Looked(Two):
    """Hands on what it hides."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.up(x)
        return self.down(hidden * self.gate(x)), hidden


class Branching(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) if x.sum() > 0 else self.gate(x)


class Reused(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(self.gate(x)) * self.up(x))


SPLIT = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
MLP = {"up": "colwise", "gate": "colwise", "down": "rowwise"}
MODELS = {
    "heads": (Attention, {**SPLIT, "heads": "divide"}),
    "width of heads left open": (LooseWidth, {**SPLIT, "heads": "divide"}),
    "heads as a literal": (Literal, {}),
    "heads used elsewhere": (CountedTwice, {}),
    "heads not transposed": (NotTransposed, {}),
    "width in a view": (WidthInView, {}),
    "learned bias": (LearnedBias, {}),
    "starred": (Starred, {"q": "colwise", "o": "rowwise"}),
    "elementwise": (Two, MLP),
    "softmax over the width": (lambda: Two(lambda y: y.softmax(-1)), {}),
    "mean": (lambda: Two(lambda y: y - y.mean(-1, keepdim=True)), {}),
    "scaled by the width": (lambda: Two(lambda y: y / y.shape[-1]), {}),
    "own normalisation": (lambda: Two(nn.LayerNorm(WIDTH)), {}),
    "residual inside": (Residual, {}),
    "hidden is returned": (Looked, {}),
    "control flow": (Branching, {}),
    "one layer in two places": (Reused, {}),
    "sequential": (lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, WIDTH)),
                   {"0": "colwise", "3": "rowwise"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_only_what_is_certain_is_split(name: str) -> None:
    make, wanted = MODELS[name]
    found = find(nn.ModuleDict({"blocks": nn.ModuleList([make(), make()])}))
    blocks = ("blocks.0", "blocks.1")
    layout = resolve(found.words, [*blocks, *(f"{block}.{key}" for block in blocks for key in wanted)])
    seen = layout.words | {f"{owner}.{attribute}": "divide" for owner, attribute in layout.divided}
    assert seen == {f"{block}.{key}": word for block in blocks for key, word in wanted.items()}
    assert bool(found.whole) == (not wanted), "what stays whole is told"


def test_nothing_of_the_model_changes() -> None:
    class Keeps(Two):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.up(x)
            return self.down(self.kept)

    model = nn.ModuleList([Keeps(), Attention()])
    weights = [id(parameter) for parameter in model.parameters()]
    assert find(model).words
    assert not hasattr(model[0], "kept")
    assert model[1].heads == HEADS
    assert [id(parameter) for parameter in model.parameters()] == weights


def test_what_tracing_took_for_granted_is_checked_once() -> None:
    attention, starred = nn.ModuleList([Attention(), Attention()]), nn.ModuleList([Starred(), Starred()])
    for model in (attention, starred):
        guard_(dict(model.named_modules()), find(model))
    x, mask = torch.randn(2, 3, WIDTH), torch.zeros(3, 3)
    with pytest.raises(UsageError, match="argument mask of 0 enters split layers and learns"):
        attention[0](x, mask.requires_grad_())
    attention[1](x, mask.detach())
    attention[1](x, mask)
    with pytest.raises(UsageError, match="tracing 0 with mask=None, but it is given another"):
        starred[0](x, torch.zeros(3, 3))
    starred[1](x)
    with pytest.raises(UsageError, match=r"\[samples, positions, width\], but 0\.q got \[3, 16\]"):
        starred[0](x[0])


def complaints(model: LightningModule, **words: Any) -> list[str]:
    plan = RunPlan(run_id="r", run_dir="/nowhere", mesh=MeshSpec(tp=2))
    return [str(problem) for problem in MegatronParallel(**words).check_model(plan=plan, model=model)]


class Bare(Gpt):
    tp_plan = None  # type: ignore[assignment]


def test_a_model_without_a_plan_is_traced() -> None:
    assert complaints(Bare()) == []
    assert complaints(Bare(), loss_parallel=True) == []
    assert any("has 3 heads" in line for line in complaints(Bare(heads=3, kv_heads=3)))
    (line,) = complaints(Bare(), sequence_parallel=True)
    assert "the plan was found by tracing, which doesn't tell what gets a piece of the sequence: {'layers.*." in line


def test_why_nothing_was_found_is_told() -> None:
    class Odd(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Branching(), Branching()])

    (line,) = complaints(Odd())
    assert line.startswith("tp=megatron: Odd has no attribute `tp_plan`")
    assert "blocks.0 (and 1 more like it): can't be traced (symbolically traced variables cannot be used as" in line
