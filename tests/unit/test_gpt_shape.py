"""`model=gpt` and `model=mlp`: the shapes and numbers that users rely on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from framework_plugins.model.gpt import GPT, Attention, rotate, rotation
from framework_plugins.model.mlp import MLP

SMALL: dict[str, Any] = {"vocab_size": 11, "width": 16, "layers": 2, "heads": 4, "context": 12}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def batch(vocabulary: int = 11, length: int = 8) -> dict[str, Tensor]:
    ids = torch.randint(0, vocabulary, (3, length + 1), generator=torch.Generator().manual_seed(1))
    return {"inputs": ids[:, :-1], "targets": ids[:, 1:]}


def test_parameter_counts() -> None:
    with torch.device("meta"):
        assert count(GPT()) == 918_656
        assert count(GPT(tied=True)) == 918_656 - 256 * 128
        llama = GPT(vocab_size=32000, width=4096, layers=32, heads=32, hidden=11008, context=4096)
    assert count(llama) == 6_738_415_616, "Llama-2-7B as published"
    assert all(parameter.is_meta for parameter in llama.parameters())


def test_first_loss_is_that_of_a_guess() -> None:
    torch.manual_seed(0)
    loss = GPT(**SMALL).loss(batch())
    assert abs(loss["loss"].item() / math.log(11) - 1) < 0.05
    assert loss["weight"] == 24


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_token_sees_only_those_before_it(kv_heads: int) -> None:
    torch.manual_seed(0)
    model = GPT(**SMALL, kv_heads=kv_heads).double().eval()
    ids = batch()["inputs"]
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    one, other = model(ids), model(changed)
    assert one.dtype == torch.float64
    assert torch.equal(one[:, :5], other[:, :5])
    assert not torch.allclose(one[:, 5:], other[:, 5:])


def test_rotary_positions_depend_on_the_distance_only() -> None:
    cos, sin = rotation(torch.arange(20), 8, 10000.0)
    cos, sin = cos.double(), sin.double()
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).expand(
        2, 1, 1, 20, 8
    )
    scores = (rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2))[0, 0]
    for distance in range(1, 10):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5)
    assert torch.allclose(rotate(q, cos, sin).norm(dim=-1), q.norm(dim=-1), atol=1e-6)


def test_attention_is_that_of_the_paper() -> None:
    """Against the formula, written out head by head, with grouped keys and values."""
    torch.manual_seed(0)
    attention = Attention(16, heads=4, kv_heads=2).double()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    cos, sin = rotation(torch.arange(6), 4, 10000.0)
    q, k, v = (w(x).reshape(2, 6, -1, 4) for w in (attention.wq, attention.wk, attention.wv))
    mask = torch.full((6, 6), -math.inf, dtype=torch.float64).triu(1)
    heads = []
    for head in range(4):
        one_q, one_k = (rotate(y[:, None], cos, sin)[:, 0] for y in (q[:, :, head], k[:, :, head // 2]))
        weights = torch.softmax(one_q @ one_k.transpose(1, 2) / 2.0 + mask, dim=-1)
        heads.append(weights @ v[:, :, head // 2])
    assert torch.allclose(attention(x, cos, sin), attention.wo(torch.cat(heads, -1)), atol=1e-9)


def test_attention_works_on_a_part_of_the_heads() -> None:
    """What tensor parallelism does: each rank has some heads, and the ranks' outputs are added up."""
    torch.manual_seed(0)
    whole = Attention(16, heads=4, kv_heads=4).double()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    cos, sin = rotation(torch.arange(6), 4, 10000.0)
    parts = []
    for half in range(2):
        part = Attention(16, heads=4, kv_heads=4).double()
        for name in ("wq", "wk", "wv"):
            getattr(part, name).weight = nn.Parameter(getattr(whole, name).weight[half * 8 : half * 8 + 8])
        part.wo.weight = nn.Parameter(whole.wo.weight[:, half * 8 : half * 8 + 8])
        parts.append(part(x, cos, sin))
    assert torch.allclose(sum(parts), whole(x, cos, sin))


def test_targets_that_do_not_count_have_no_weight() -> None:
    torch.manual_seed(0)
    model, rows = GPT(**SMALL), batch()
    rows["targets"] = rows["targets"].clone()
    rows["targets"][0, 3:] = -100
    result = model.loss(rows)
    assert result["weight"] == 3 * 8 - 5
    each = F.cross_entropy(model(rows["inputs"]).flatten(0, 1), rows["targets"].flatten(), reduction="none")
    assert torch.allclose(result["loss"], each.sum() / 19)


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    model, ids = GPT(**SMALL, dropout=0.5), batch()["inputs"]
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


@pytest.mark.parametrize(
    ("settings", "words"), [({"heads": 5}, "width=16 must be"), ({"kv_heads": 3}, "heads=4 must be a multiple")]
)
def test_shapes_that_do_not_fit_are_refused(settings: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GPT(**{**SMALL, **settings})


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="13 tokens is longer than context=12"):
        GPT(**SMALL)(torch.zeros(1, 13, dtype=torch.int64))


def test_every_word_of_the_tp_plan_names_a_layer() -> None:
    names = {name for name, _ in GPT(**SMALL).named_modules()}
    assert {pattern.replace("*", "0") for pattern in GPT.tp_plan} <= names


def test_modules_are_registered_in_the_order_of_execution() -> None:
    """Pipeline stages follow from it."""
    model, order = GPT(**SMALL), []
    for name, child in model.named_modules():
        if name and not list(child.children()):
            child.register_forward_hook(lambda *_, name=name: order.append(name.split(".")[0]))
    model(batch()["inputs"])
    assert list(dict.fromkeys(order)) == [name for name, _ in model.named_children()]


def test_mlp_by_hand() -> None:
    torch.manual_seed(0)
    model = MLP(inputs=4, width=8, layers=0, classes=4)
    assert count(model) == 4 * 8 + 8 + 8 * 4 + 4, "the MLP 4-8-4 of the cases"
    first, output = model.first[0], model.output
    x = torch.randn(5, 2, 2)
    assert isinstance(first, nn.Linear)
    by_hand = torch.relu(x.flatten(1) @ first.weight.T + first.bias) @ output.weight.T + output.bias
    assert torch.allclose(model(x), by_hand, atol=1e-6)
    assert len(MLP().layers) == 4
