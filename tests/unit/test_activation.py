"""Activation checkpointing: same gradients to the bit, less memory, same names."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from framework.parts import whole
from framework.plan import MeshSpec, RunPlan
from framework_plugins.activation.budget import Budget, Cost, Measured, choose, measure
from framework_plugins.activation.full import Full
from framework_plugins.activation.recompute import every_nth
from framework_plugins.activation.selective import Selective, contexts, policy

WIDTH, HEADS, BLOCKS = 32, 4, 4


class Block(nn.Module):
    calls = 0

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        Block.calls += 1
        samples, length, _ = x.shape
        q, k, v = (y.view(samples, length, HEADS, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(x)) * 0.5), self.dropout)


class Model(LightningModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


class Storages(TorchDispatchMode):
    """Remembers every storage that an operator makes in memory (and not in a file), without keeping it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                reference = StorageWeakRef(storage)
                self.seen[reference.cdata] = (reference, 0 if storage.filename else storage.nbytes())
        return out

    def alive(self, model: nn.Module) -> int:
        """Bytes still held, weights (which views lead to) left out."""
        weights = {StorageWeakRef(p.untyped_storage()).cdata for p in model.parameters()}
        return sum(
            size for key, (reference, size) in self.seen.items() if key not in weights and not reference.expired()
        )


@contextmanager
def made_storages() -> Iterator[Storages]:
    with Storages() as storages:
        yield storages


def gradients(option: Any, dropout: float = 0.0) -> tuple[dict[str, Tensor], int, int]:
    """Return gradients by name, bytes alive between forward and backward, and how often a block's forward ran."""
    model = Model(dropout)
    if option is not None:
        option.apply_activation_checkpointing(part=whole(model))
    x = torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    torch.manual_seed(7)
    Block.calls = 0
    with made_storages() as storages:
        loss = model(x)
    alive = storages.alive(model)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}, alive, Block.calls


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("option", [
    Full(), Full(every=2), Selective(), Selective(every=3),
    Selective(budget=0), Selective(budget=0.3), Selective(budget=0.7), Selective(budget=0.5, every=2),
])  # fmt: skip
def test_same_gradients_to_the_bit(option: Any, dropout: float) -> None:
    want, _, _ = gradients(None, dropout)
    got, _, calls = gradients(option, dropout)
    assert calls > BLOCKS
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name


def test_a_mask_that_is_not_replayed_changes_the_gradients() -> None:
    """So that the row above can fail."""
    want, _, _ = gradients(None, 0.3)
    got, _, _ = gradients(Full(preserve_rng_state=False), 0.3)
    assert not all(torch.equal(got[name], gradient) for name, gradient in want.items())


def test_memory_is_really_saved() -> None:
    plain = gradients(None)[1]
    full = gradients(Full())[1]
    second = gradients(Full(every=2))[1]
    selective = gradients(Selective())[1]
    boundary = 4 * 16 * WIDTH * 4  # bytes of one block's output
    assert full <= boundary * BLOCKS + 64, (plain, full, selective)
    assert full < 0.1 * plain
    assert full < selective < 0.8 * plain
    assert second == pytest.approx((plain + full) / 2, rel=0.05)


@pytest.mark.parametrize("option", [Full(), Selective(), Selective(budget=0.5)])
def test_names_hooks_and_copies_stay(option: Any) -> None:
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    option.apply_activation_checkpointing(part=whole(model))
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == names
    seen = []
    model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(2, 3, WIDTH)
    before = float(model(x).detach())
    assert seen == [1]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert float(model(x).detach()) == before
    assert float(twin(x).detach()) != before


def test_nothing_is_wrapped_without_gradients() -> None:
    model = Model()
    Full().apply_activation_checkpointing(part=whole(model))
    with torch.no_grad():
        assert not model(torch.randn(2, 3, WIDTH)).requires_grad


@pytest.mark.parametrize("option", [Full(), Selective(), Selective(budget=0.5)])
def test_two_backward_passes_over_one_block(option: Any) -> None:
    """What a zero-bubble schedule does: first the gradients of the inputs, later those of the weights."""

    def split(option: Any) -> list[Tensor]:
        model = Model(0.3)
        if option is not None:
            option.apply_activation_checkpointing(part=whole(model))
        x = torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
        torch.manual_seed(7)
        loss = model(x)
        (of_input,) = torch.autograd.grad(loss, x, retain_graph=True)
        return [of_input, *torch.autograd.grad(loss, list(model.parameters()))]

    for got, want in zip(split(option), split(None), strict=True):
        assert torch.equal(got, want)


def test_the_bytes_kept_follow_the_budget() -> None:
    boundary = 4 * 16 * WIDTH * 4 * BLOCKS  # inputs of the blocks
    plain, full = gradients(None)[1], gradients(Full())[1]
    measured = measure(Block.forward, Block(0.0), [torch.randn(4, 16, WIDTH, requires_grad=True)], {})
    saved, sizes = plain - boundary, [cost.bytes for cost in measured.costs]
    assert measured.saved * BLOCKS == pytest.approx(saved, abs=64 * BLOCKS)
    budgets = [0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1]
    held = [gradients(Selective(budget=budget))[1] for budget in budgets]
    assert held[0] == full
    assert held[-1] == plain
    assert held == sorted(held)
    for budget, size in zip(budgets, held, strict=True):
        assert size - boundary <= budget * saved + 64 * BLOCKS, budget
        most = min(budget * saved, sum(sizes) * BLOCKS)
        assert size - boundary >= most - max(sizes) * BLOCKS, budget  # what is left out doesn't fit


def test_the_most_compute_a_byte_is_kept_first() -> None:
    big, small = Cost(("aten::mm", 0), 80, 8e4), Cost(("aten::gelu", 0), 40, 40.0)
    dear, other = Cost(("aten::addmm", 0), 30, 9e4), Cost(("_c10d_functional::all_reduce", 0), 20, 20.0)
    measured = Measured(
        [small, big, dear], [other, Cost(("_c10d_functional::all_gather_into_tensor", 0), 50, 9.0)], 200
    )

    def kept(budget: float) -> set[str]:
        return {name.partition("::")[2] for name, _ in choose(measured, budget, lambda name: "all_reduce" in name)}

    assert kept(0.01) == {"all_reduce"}  # never left to what fits: all ranks do the same
    assert kept(0.25) == {"all_reduce", "addmm"}
    assert kept(0.5) == {"all_reduce", "addmm", "gelu"}  # the large one doesn't fit, the next does
    assert kept(0.65) == {"all_reduce", "addmm", "mm"}
    assert kept(1.0) == {"all_reduce", "addmm", "mm", "gelu"}


class Awkward(nn.Module):
    """Writes into what a product returned, draws numbers, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x * torch.rand_like(x)), inplace=True)
        return self.second(F.dropout(self.norm(x.flatten(0, 1)).view_as(x), 0.5))


def test_what_is_written_into_or_drawn_is_never_kept_and_measuring_leaves_no_trace() -> None:
    block, x = Awkward(), torch.randn(4, 8, WIDTH)
    state = torch.get_rng_state()
    measured = measure(Awkward.forward, block, [x], {})
    assert torch.equal(torch.get_rng_state(), state)
    assert int(block.norm.num_batches_tracked) == 0
    assert not block.norm.running_mean.any()
    kinds = [cost.call for cost in measured.costs]
    assert ("aten::addmm", 0) not in kinds  # relu_ writes into it
    assert not {name for name, _ in kinds if "rand" in name or "bernoulli" in name or "dropout" in name}
    assert not measured.crosses


def test_a_block_is_measured_once_and_not_on_the_meta_device() -> None:
    chooser, block = Budget(0.5, lambda name: False, contexts), Block(0.0)
    assert chooser(Block.forward, block.to("meta"), torch.empty(1, 4, WIDTH, device="meta")) == {}
    assert chooser.measured is None
    block, Block.calls = Block(0.0), 0
    for _ in range(3):
        assert chooser(Block.forward, block, torch.randn(1, 4, WIDTH))["early_stop"] is True
    assert Block.calls == 1
    assert chooser.kept


def test_attention_that_drops_is_not_kept() -> None:
    attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
    q = torch.zeros(1, 1, 1, 8)
    assert policy(None, attention, q, q, q, None, True, 0.0).name == "MUST_SAVE"
    assert policy(None, attention, q, q, q, None, True, 0.1).name == "PREFER_RECOMPUTE"
    assert policy(None, attention, q, q, q, None, True).name == "MUST_SAVE"
    assert policy(None, torch.ops.aten.mm.default, q, q).name == "MUST_SAVE"
    assert policy(None, torch.ops.aten.add.Tensor, q, q).name == "PREFER_RECOMPUTE"


def test_every_counts_over_the_whole_model() -> None:
    stage = {f"layers.{i}": nn.Identity() for i in (3, 4, 5)}
    assert every_nth(stage, 2) == [stage["layers.4"]]
    assert every_nth({"first": nn.Identity(), "second": nn.Identity()}, 2)[0] is not None


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"activation\.every=0 must be at least 1"):
        Full(every=0)

    with pytest.raises(ValueError, match=r"activation\.budget=50 is a part .* from 0 to 1"):
        Selective(budget=50)
    compiled = RunPlan(run_id="r", run_dir="/nowhere", components={"compile": {"option": "block"}})
    (problem,) = Selective(budget=0.5).check_plan(plan=compiled)
    assert problem.fix == "activation.budget=null or compile=none"
    assert not Selective().check_plan(plan=compiled)
    experts = RunPlan(
        run_id="r", run_dir="/nowhere", mesh=MeshSpec(dp_shard=2, ep=2), components={"ep": {"option": "alltoall"}}
    )
    (problem,) = Selective(budget=0.5).check_plan(plan=experts)
    assert "with ep=alltoall experts are gathered" in problem.reason

    class Flat(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(2, 2)

    plan = RunPlan(run_id="r", run_dir="/nowhere")
    for option in (Full(), Selective()):
        (problem,) = option.check_model(plan=plan, model=Flat())
        assert "Flat has no list of two or more blocks" in str(problem)
        assert not option.check_model(plan=plan, model=Model())
