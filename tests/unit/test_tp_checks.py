"""What `tp=dtensor` refuses, and in which words (P29); patterns; random streams."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from tp_models import Gpt

from framework.dropout import FEATURES
from framework.plan import MeshSpec, RunPlan
from framework_plugins.tp.dtensor import DTensorParallel
from framework_plugins.tp.layout import WORDS, matches, resolve
from framework_plugins.tp.ranges import every_rank_has_some, piece
from framework_plugins.tp.streams import Streams, _mix


def complaints(model: LightningModule, size: int = 2, **words: object) -> list[str]:
    plan = RunPlan(run_id="r", run_dir="/nowhere", mesh=MeshSpec(tp=size))
    return [str(problem) for problem in DTensorParallel(**words).check_model(plan=plan, model=model)]


def gpt(**settings: object) -> Gpt:
    with torch.device("meta"):
        return Gpt(**settings)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("words", [{}, {"sequence_parallel": True}, {"loss_parallel": True}])
def test_a_model_that_divides_is_accepted(size: int, words: dict[str, bool]) -> None:
    assert complaints(gpt(heads=4, kv_heads=4), size, **words) == []


@pytest.mark.parametrize(
    ("settings", "size", "wanted"),
    [
        (
            {"heads": 3, "kv_heads": 3, "head_dim": 4},
            2,
            ["layers.0.attention (and 1 more like it) has 3 heads, which 2 ranks"],
        ),
        (
            {"hidden": 5},
            2,
            [
                "layers.0.mlp.w1 (and 1 more like it) has 5 output",
                "0.mlp.w2 (and 1 more like it) has 5 input",
                "tp=none",
            ],
        ),
        (
            {"heads": 2, "kv_heads": 1},
            2,
            ["layers.0.attention (and 1 more like it) has 1 kv_heads, which 2 ranks can't"],
        ),
        (
            {"heads": 6, "kv_heads": 6},
            4,
            ["layers.0.attention (and 1 more like it) has 6 heads, which 4 ranks", "Type tp.size=3"],
        ),
        ({"vocab": 9, "heads": 8, "kv_heads": 8}, 8, ["layer tokens has 9 rows", "layer head has 9 output features"]),
    ],
)
def test_what_does_not_divide_is_named_with_its_size(settings: dict[str, int], size: int, wanted: list[str]) -> None:
    found = complaints(gpt(**settings), size)
    for text in wanted:
        assert any(text in line for line in found), found
        assert all(f"tp.size={size}" in line for line in found), found


def test_heads_are_found_from_head_dim_alone() -> None:
    model = gpt(heads=3, kv_heads=3)
    for block in model.layers:
        del block.attention.heads, block.attention.kv_heads
    lines = complaints(model)
    assert len(lines) == 3, "wq, wk and wv, of both layers"
    line = next(line for line in lines if "wq" in line)
    assert "wq (and 1 more like it) has 3 heads (12 = 3 x head_dim 4), which 2 ranks can't share evenly." in line


def test_an_uneven_vocabulary_is_accepted() -> None:
    assert complaints(gpt(vocab=9), 2, loss_parallel=True) == []


def test_unknown_words_and_names_get_the_nearest() -> None:
    found = complaints(gpt(), plan={**Gpt.tp_plan, "layers.*.mlp.w2": "rowise", "layers.*.atention.wo": "rowwise"})
    assert any("'rowise' is no way to split a layer; there are colwise, rowwise" in line for line in found)
    assert any(line.endswith("Type layers.*.mlp.w2: rowwise.") for line in found)
    assert any("no layer of the model has such a name. Type layers.*.attention.wo." in line for line in found)
    assert len(found) == 2, "what follows from a typing error isn't complained about"


def test_a_model_without_a_plan() -> None:
    class Bare(LightningModule):
        pass

    (line,) = complaints(Bare())
    assert "Bare has no attribute `tp_plan`" in line
    assert "tp=none" in line


def test_layers_that_nobody_said_anything_about() -> None:
    beside = {k: v for k, v in Gpt.tp_plan.items() if "q_norm" not in k}
    found = complaints(gpt(), plan=beside)
    (line,) = found
    assert line.startswith(
        "tp=dtensor: layer layers.0.attention.q_norm (and 1 more like it) stands beside split layers"
    )
    assert line.endswith("Type layers.*.attention.q_norm: shared (split activations), copied (whole) or norm.")
    stream = {k: v for k, v in Gpt.tp_plan.items() if k != "norm"}
    assert complaints(gpt(), plan=stream) == []
    (line,) = complaints(gpt(), plan=stream, sequence_parallel=True)
    assert line.startswith("tp.sequence_parallel=true: norm has parameters, but the plan doesn't say")


def test_other_refusals() -> None:
    headless = {k: v for k, v in Gpt.tp_plan.items() if k != "head"}
    assert any("no `head`" in line for line in complaints(gpt(), plan=headless, loss_parallel=True))
    assert any("`embedding`" in line for line in complaints(gpt(), plan=headless, sequence_parallel=True))
    twice = complaints(gpt(), plan={**Gpt.tp_plan, "layers.0.mlp.w1": "rowwise"})
    assert any("layers.0.mlp.w1 is named twice: 'layers.*.mlp.w1' says colwise and" in line for line in twice)
    kinds = complaints(gpt(), plan={**Gpt.tp_plan, "norm": "colwise"})
    assert any("layer norm is a LayerNorm; only torch's Linear can be split so." in line for line in kinds)
    model = gpt()
    model.tokens.max_norm = 1.0
    assert any("tokens has max_norm" in line for line in complaints(model))
    tied = complaints(gpt(tied=True), plan={k: v for k, v in Gpt.tp_plan.items() if k != "tokens"})
    assert any("layers tokens and head share one parameter" in line for line in tied)
    with pytest.raises(ValueError, match=r"tp\.size=0 must be at least 1"):
        DTensorParallel(size=0)


class Inner(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_a_linear_with_a_forward_of_its_own_is_refused() -> None:
    model = gpt()
    model.layers[0].mlp.w1 = Inner(16, 24, device="meta")
    assert any("layers.0.mlp.w1 is a Inner" in line for line in complaints(model))


def test_divided_attributes() -> None:
    plan = {**Gpt.tp_plan, "layers.*.attention.heads": "divide"}
    assert complaints(gpt(), plan=plan) == []
    assert any("has 3 heads" in line for line in complaints(gpt(heads=3, kv_heads=3), plan=plan))
    wrong = complaints(gpt(), plan={**Gpt.tp_plan, "layers.*.attention.head": "divide"})
    assert any("layers.0.attention has no integer attribute 'head'" in line for line in wrong)


def test_size_one_needs_nothing() -> None:
    assert complaints(gpt(heads=3, hidden=5), 1) == []


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("layers.*.wq", "layers.0.wq", True),
        ("layers.*", "layers.0.wq", False),
        ("layers.*.w[qk]", "layers.3.wk", True),
        ("*", "head", True),
        ("head", "heads", False),
    ],
)
def test_patterns_go_part_by_part(pattern: str, name: str, fits: bool) -> None:
    assert matches(pattern, name) is fits


def test_resolution() -> None:
    names = ["", "a", "a.0", "a.1", "b", "a.0.x"]
    layout = resolve({"a.*": "colwise", "b": "norm", "c": "head", "a.0.n": "divide"}, names)
    assert layout.words == {"a.0": "colwise", "a.1": "colwise", "b": "norm"}
    assert layout.divided == [("a.0", "n")]
    assert layout.unmatched == ["c"]
    assert set(layout.words.values()) <= set(WORDS)


@pytest.mark.parametrize(("size", "ranks"), [(9, 2), (8, 2), (9, 4), (9, 8), (1, 1), (3, 4)])
def test_ranges_are_those_of_dtensor(size: int, ranks: int) -> None:
    chunks = torch.arange(size).chunk(ranks)
    ours = [list(range(*piece(size, ranks, rank))) for rank in range(ranks)]
    assert ours == [chunk.tolist() for chunk in chunks] + [[]] * (ranks - len(chunks))
    assert every_rank_has_some(size, ranks) == all(ours)


def test_streams() -> None:
    def draws(rank: int) -> list[torch.Tensor]:
        torch.manual_seed(5)
        streams = Streams(rank, "cpu", 2)
        result = [torch.rand(4)]
        streams.to_own(FEATURES)
        assert streams.split
        result.append(torch.rand(4))
        streams.to_own(FEATURES)  # already there: goes on
        result.append(torch.rand(4))
        streams.to_main()
        streams.to_main()
        assert not streams.split
        return [*result, torch.rand(4)]

    zero, one = draws(0), draws(1)
    for position, equal in enumerate((True, False, False, True)):
        assert torch.equal(zero[position], one[position]) is equal
    assert not torch.equal(zero[1], zero[2])
    assert all(torch.equal(a, b) for a, b in zip(zero, draws(0), strict=True))
    assert len({_mix(seed, rank) & 0xFFFFFFFF for seed in range(50) for rank in range(8)}) == 400
