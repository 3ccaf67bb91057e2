"""What `cp=...` refuses, and in which words; how batches are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from framework.compose import compose
from framework.errors import PlanError, UsageError
from framework.memory import bytes_per_rank
from framework.plan import MeshSpec, RunPlan
from framework_plugins.cp.allgather import AllGather
from framework_plugins.cp.option import ContextParallel
from framework_plugins.cp.ring import Ring
from framework_plugins.cp.sequences import BatchCut, Pieces
from framework_plugins.cp.ulysses import Ulysses
from framework_plugins.model.gpt import GPT
from framework_plugins.strategy.fsdp import FSDP

DIMS = {"inputs": 1, "targets": 1, "positions": 1}


class Plain(LightningModule):
    """Says nothing of sequences."""


class Said(Plain):
    cp_plan = DIMS


class Manual(Said):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Recurrent(Said):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(2, 2)


def complaints(model: LightningModule, option: ContextParallel | None = None, cp: int = 2) -> list[str]:
    plan = RunPlan(run_id="r", run_dir="/nowhere", mesh=MeshSpec(cp=cp))
    return [str(problem) for problem in (option or Ring()).check_model(plan=plan, model=model)]


def test_attention_inside_of_documents_is_refused_before_anything_starts() -> None:
    with pytest.raises(PlanError, match=r"cp=ring: keeping attention to documents.*Type data\.attention=window"):
        compose(["data=packed", "cp=ring"])
    assert compose(["data=packed", "cp=ring", "data.attention=window"]).mesh.cp == 2


@pytest.mark.parametrize(
    ("model", "option", "words"),
    [
        (Plain, None, ["Plain has no attribute `cp_plan`", 'Type cp_plan = {"inputs": 1']),
        (Said, Ring(seq_dims={"x": 1}), ["has no `positions`", 'from batch["positions"] [samples, length]']),
        (Manual, None, ["Manual optimizes by itself", "cp=none"]),
        (Recurrent, None, ["layer encoder is a LSTM", "scaled_dot_product_attention"]),
    ],
)
def test_modules_that_would_be_silently_wrong(model: Any, option: Any, words: list[str]) -> None:
    found = complaints(model(), option)
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found


def test_modules_that_are_accepted() -> None:
    with torch.device("meta"):
        gpt = GPT(layers=2, width=16, heads=2)
    assert complaints(gpt) == complaints(gpt, Ulysses()) == complaints(Said()) == []
    assert complaints(Plain(), Ring(seq_dims=DIMS)) == []
    assert complaints(Plain(), cp=1) == []


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("cp=ring model.context=100", "sequences of 100 tokens can't be cut into 8 equal pieces. Type data.context=96"),
        ("cp=ulysses model.context=2", "can't be cut into 4 equal pieces. Type data.context=4"),
        ("cp=ulysses model.heads=2", "4 ranks can't share 2 heads (2 of keys and values) evenly. Type cp.size=2, or"),
        ("cp=ulysses tp=dtensor", "4 ranks can't share 4 heads (4 of keys and values) over tp 2 evenly"),
        ("cp=ulysses model.heads=12 model.width=96 model.kv_heads=3", "(3 of keys and values) evenly. Type cp.size=3"),
        ("cp=ring cp.balance=zigzag", "cp.balance=zigzag: is unknown; choose head_tail or none"),
        ("cp=ring cp.size=0", "cp.size=0: must be at least 1"),
    ],
)
def test_plans_that_are_refused(words: str, wanted: str) -> None:
    size = [] if "cp.size" in words else ["cp.size=4"]
    with pytest.raises(PlanError) as error:
        compose([*words.split(), *size])
    assert wanted in str(error.value)


def test_what_is_a_sequence_may_be_typed() -> None:
    words = ["cp=ring", "cp.seq_dims={inputs: 1, targets: 1, positions: 1, mask: null}"]
    assert compose(words).components["cp"]["seq_dims"] == {**DIMS, "mask": None}
    with pytest.raises(PlanError, match="has no `positions`"):
        compose(["cp=ring", "cp.seq_dims={inputs: 1}"])
    with pytest.raises(PlanError, match="MLP has no attribute `cp_plan`"):
        compose(["cp=ring", "model=mlp", "data=digits"])


def test_a_strategy_that_does_not_reduce_over_the_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compose(["cp=ring", "strategy=fsdp"])
    without = FSDP.requirements

    def requirements(self: FSDP) -> Any:
        words = without(self)
        return type(words)(needs=words.needs, gives=words.gives - {"reduces_over_context"}, why=words.why)

    requirements.framework_impl = without.framework_impl  # type: ignore[attr-defined]
    monkeypatch.setattr(FSDP, "requirements", requirements)
    with pytest.raises(PlanError, match="gradients of the 2 pieces of a sequence would not be averaged"):
        compose(["cp=ring", "strategy=fsdp"])


def test_a_rank_holds_its_share_of_what_is_sharded_over_both_axes() -> None:
    plan = compose(["cp=allgather", "strategy=fsdp", "devices=4"])
    assert (plan.mesh.dp_shard, plan.mesh.cp, plan.mesh.data_ranks) == (2, 2, 2)
    spec = {name: value for name, value in plan.components["model"].items() if name not in ("_target_", "option")}
    with torch.device("meta"):
        model = GPT(**spec)
    whole = sum(parameter.numel() for parameter in model.parameters())
    held = [one.parameters for one in bytes_per_rank(plan, model)]
    assert sum(held) == whole
    assert max(held) < 0.26 * whole


# -- cutting of batches ------------------------------------------------------------------------------------------------
def cut(batch: Any, rank: int = 1, ranks: int = 2, balanced: bool = True, dims: Any = None) -> dict[str, Any]:
    return BatchCut(Pieces(rank, ranks, balanced), DIMS if dims is None else dims, "ring")(batch)


def ids(samples: int = 3, length: int = 8) -> torch.Tensor:
    return torch.arange(samples * length).view(samples, length)


def test_a_rank_gets_its_pieces_and_their_places() -> None:
    found = cut({"inputs": ids(), "targets": ids() + 1, "names": ["a", "b", "c"], "scale": torch.tensor(2.0)})
    assert found["inputs"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13], [18, 19, 20, 21]]
    assert torch.equal(found["targets"], found["inputs"] + 1)
    assert found["positions"].tolist() == [[2, 3, 4, 5]] * 3
    assert found["names"] == ["a", "b", "c"]
    assert cut({"inputs": ids()}, rank=0)["positions"][0].tolist() == [0, 1, 6, 7]
    assert cut({"inputs": ids()}, rank=1, balanced=False)["positions"][0].tolist() == [4, 5, 6, 7]


def test_positions_of_the_data_are_cut_like_the_rest() -> None:
    found = cut({"inputs": ids(), "positions": ids() * 10})
    assert torch.equal(found["positions"], found["inputs"] * 10)


def test_sequences_along_dim_0() -> None:
    found = cut({"x": ids().T}, dims={"x": 0, "positions": 0})
    assert torch.equal(found["x"], cut({"inputs": ids()})["inputs"].T)
    assert found["positions"].T.tolist() == [[2, 3, 4, 5]] * 3


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((ids(), ids()), ["this batch is a tuple"]),
        ({"x": ids()}, ["none of inputs, targets, positions"]),
        ({"inputs": ids(), "targets": ids(length=4)}, ["{'inputs': 8, 'targets': 4}"]),
        ({"inputs": ids(length=10)}, ["4 equal pieces, and 10 tokens", "make them 8 or 12 long", "cp.balance=none"]),
        ({"inputs": ids(), "mask": torch.ones(3, 1, 8)}, ["an entry 'mask' of shape (3, 1, 8)", "add 'mask': 2"]),
    ],
)
def test_batches_that_cannot_be_cut(batch: Any, words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        cut(batch)
    assert all(word in str(error.value) for word in words), error.value


def test_an_entry_that_each_rank_needs_whole() -> None:
    whole = torch.ones(3, 8)
    assert torch.equal(cut({"inputs": ids(), "mask": whole}, dims=DIMS | {"mask": None})["mask"], whole)


def test_the_balanced_options_say_how_many_pieces() -> None:
    assert (Ring().count(4), AllGather(balance="none").count(4), Ulysses().count(4)) == (8, 4, 4)
