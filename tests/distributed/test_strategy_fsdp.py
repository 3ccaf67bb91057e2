"""`strategy=fsdp` on modules that use their parameters in unusual places, or only on some ranks (P23)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from fitting import fit
from plans import make_plan, option
from torch import Tensor, nn
from user_modules import Mlp, Rows, loader, regression

from framework.testing import RanksError
from framework.verify.reference import Bounds, Result, disagreements, train

DATA = regression(samples=40)


class HeadOutside(Mlp):
    """Its step method uses a layer after it called the module itself."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.head = nn.Linear(4, 4)
        for parameter in self.head.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.head(self(batch["x"])), batch["y"])
        self.log("train_loss", loss)
        return loss


def mean_squared_error(model: HeadOutside, batch: Any) -> tuple[Tensor, int]:
    return nn.functional.mse_loss(model.head(model(batch["x"])), batch["y"]), len(batch["x"])


def test_a_layer_used_after_the_module_was_called_is_whole(pool) -> None:
    plan = make_plan(2, strategy="fsdp", micro_batch_size=4)
    want = train(HeadOutside(), [[batch] for batch in loader(DATA, 8)], mean_squared_error, lr=0.1, momentum=0.9)
    for probe in pool.run(fit, 2, plan, HeadOutside, DATA, process_group=False):
        updates = {name: probe.final[name] - start for name, start in probe.initial.items()}
        got = Result(losses=probe.losses, first_gradients=probe.gradients[0], updates=updates)
        got.grad_norms = want.grad_norms
        assert disagreements(got, want, Bounds(1e-6, 1e-5, 1e-5)) == []


# -- parameters that only some ranks use ---------------------------------------------------------------------------
class Routed(Mlp):
    """Each sample says which branch it takes; all branches have one shape, and all samples of a rank take one.

    Args:
        units: the branches are blocks, which fsdp shards as units of their own.
        optimizer: `sgd` or `adamw`.
    """

    def __init__(self, units: bool, optimizer: str = "sgd") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(8)
        branches = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
        if units:
            self.branches = nn.ModuleList(branches)
        else:
            self.branches = nn.ModuleDict({"a": Holder(branches[0]), "b": branches[1], "c": nn.Identity()})
            self.third = branches[2]
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
        self.units, self.optimizer_name = units, optimizer

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        branches = list(self.branches) if self.units else [self.branches["a"], self.branches["b"], self.third]
        y = torch.empty_like(x)
        for number in kind.unique().tolist():
            y[kind == number] = branches[number](x[kind == number])
        return super().forward(x) + y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch["x"], batch["kind"]), batch["y"])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Holder(nn.Module):
    """Makes the modules of a list unlike, so that none of them is a block."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def routes(*steps: tuple[int, int]) -> Rows:
    """Samples of steps of two ranks with four samples each: which branch each rank takes in each step."""
    rows = regression(8 * len(steps), dtype=torch.float64)
    rows.columns["kind"] = torch.tensor([kind for step in steps for kind in step for _ in range(4)])
    return rows


def routed(pool: Any, find: bool, units: bool, rows: Rows, optimizer: str = "sgd", **words: Any) -> list[Any]:
    chosen = {"strategy": option("strategy", "fsdp", find_unused_parameters=find)}
    words = {"micro_batch_size": 4, "precision": "fp64", **words}
    plan = make_plan(2, strategy="fsdp", components=chosen, **words)
    return pool.run(fit, 2, plan, partial(Routed, units, optimizer), rows, process_group=False, timeout=60)


def routed_loss(model: Routed, batch: Any) -> tuple[Tensor, int]:
    return nn.functional.mse_loss(model(batch["x"], batch["kind"]), batch["y"]), len(batch["x"])


APART = ((0, 1), (0, 1), (1, 0), (0, 0))


@pytest.mark.parametrize("units", [False, True], ids=["in one unit", "units"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranks_may_use_different_branches_with_the_option(pool, units, accumulation) -> None:
    words = {"accumulation": accumulation, "trainer": {"accumulate_grad_batches": accumulation}}
    rows = routes(*APART)
    batches = [[batch] for batch in loader(rows, 8 * accumulation)]
    want = train(Routed(units).double(), batches, routed_loss, lr=0.1, momentum=0.9)
    for seen in routed(pool, True, units, rows, **words):
        updates = {name: seen.final[name] - start for name, start in seen.initial.items()}
        got = Result(losses=seen.losses, first_gradients=seen.gradients[0], updates=updates)
        got.grad_norms = want.grad_norms
        # the third branch has no gradient anywhere and no update
        assert {
            line for line in disagreements(got, want, Bounds()) if "third" not in line and "s.2" not in line
        } == set()
        assert not any(name.startswith(("third", "branches.2")) for name in seen.gradients[0])


def test_what_no_rank_uses_is_not_moved_by_weight_decay(pool) -> None:
    for seen in routed(pool, True, False, routes(*APART), "adamw"):
        assert torch.equal(seen.final["third.0.weight"], seen.initial["third.0.weight"])
        assert not torch.equal(seen.final["branches.b.0.weight"], seen.initial["branches.b.0.weight"])


@pytest.mark.parametrize(
    ("units", "steps", "words"),
    [
        (False, ((0, 1),), "branches.a.inner.0.bias, branches.a.inner.0.weight, branches.b.0.bias, branches.b.0.weight"
                           " got no gradient on rank 0, 1, but did on others"),
        (True, ((0, 1),), "Ranks use different parts of the model: rank 0 runs branches.0, rank 1 runs branches.1"),
        (False, ((0, 0), (0, 1)), "branches.a.inner.0.weight, branches.a.inner.0.bias got no gradient on rank 1"),
        (True, ((0, 0), (0, 1)), "strategy.find_unused_parameters=true"),
    ],
    ids=["same unit", "other units", "same unit, later", "other units, later"],
)  # fmt: skip
def test_without_the_option_it_is_named(pool, units, steps, words) -> None:
    with pytest.raises(RanksError) as caught:
        routed(pool, False, units, routes(*steps))
    assert words in str(caught.value)
    assert "strategy.find_unused_parameters=true" in str(caught.value)


def test_what_no_rank_uses_needs_no_option(pool) -> None:
    seen = routed(pool, False, False, routes((0, 0), (0, 0)), "adamw")[0]
    assert torch.equal(seen.final["third.0.weight"], seen.initial["third.0.weight"])
