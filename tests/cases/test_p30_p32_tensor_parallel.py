"""P30 to P32 for both tensor-parallel options: a bias counts once, nothing is padded, random numbers by region."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tp_models import Gpt, batches

from framework.mesh import Mesh
from framework.parts import ModelPart, whole
from framework.plan import MeshSpec, RunPlan
from framework_plugins.activation.full import Full
from framework_plugins.tp.dtensor import DTensorParallel
from framework_plugins.tp.megatron import MegatronParallel
from framework_plugins.tp.vocab_loss import VocabLoss

OPTIONS = {"dtensor": DTensorParallel, "megatron": MegatronParallel}
each_option = pytest.mark.parametrize("option", OPTIONS)


def split(option: str, model: LightningModule, mesh: Mesh, **words: Any) -> ModelPart:
    made = OPTIONS[option](**words)
    plan = RunPlan(run_id="r", run_dir="/nowhere", mesh=mesh.spec)
    assert not [str(problem) for problem in made.check_model(plan=plan, model=model)]
    part = whole(model)
    made.apply_tensor_parallel(part=part, mesh=mesh)
    return part


# -- P30 ---------------------------------------------------------------------------------------------------------------
class Pair(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        nn.init.ones_(self.up.bias)
        nn.init.ones_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def biases(option: str):
    x = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1))
    want, model = Pair(), Pair()
    split(option, model, Mesh(MeshSpec(tp=2)), plan={"up": "colwise", "down": "rowwise"})
    outputs = [one(x) for one in (want, model)]
    for output in outputs:
        output.sum().backward()
    ratios = [float(model.get_parameter(n).grad.full_tensor().sum() / want.get_parameter(n).grad.sum())
              for n in ("up.bias", "down.bias")]  # fmt: skip
    return float((outputs[1] - outputs[0]).abs().max()), ratios


@each_option
def test_p30_a_row_split_bias_is_added_once(pool, option: str) -> None:
    for error, ratios in pool.run(biases, 2, option):
        assert error <= 1e-6
        assert ratios == pytest.approx([1.0, 1.0], rel=1e-6)


# -- P31 ---------------------------------------------------------------------------------------------------------------
def uneven_vocabulary(option: str, folder: str, loss_parallel: bool):
    mesh = Mesh(MeshSpec(tp=2))
    model = Gpt(vocab=9).init_weights()
    part = split(option, model, mesh, loss_parallel=loss_parallel)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    batch = batches(1, vocab=9)[0]
    with VocabLoss() if loss_parallel else torch.enable_grad():
        loss = model.training_step(batch)["loss"]
    assert bool(part.contexts) == loss_parallel
    rows = [model.tokens.weight.full_tensor().shape[0], model.tokens.weight.to_local().shape[0]]
    errors = []
    for wrong in ({"ids": 9}, {"ids": -1}, {"targets": 9}, {"targets": -1}):
        ((column, value),) = wrong.items()
        bad = copy.deepcopy(batch)
        bad[column][1, 2] = value
        try:
            with VocabLoss() if loss_parallel else torch.enable_grad():
                model.training_step(bad)
            errors.append("none")
        except IndexError as error:
            errors.append(str(error))
    return float(loss), rows, errors


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # this process has no group, and needs none
@pytest.mark.parametrize("loss_parallel", [False, True])
@each_option
def test_p31_a_vocabulary_of_nine_on_two_ranks(pool, tmp_path: Path, option: str, loss_parallel: bool) -> None:
    results = pool.run(uneven_vocabulary, 2, option, str(tmp_path / "saved"), loss_parallel)
    for rank, (loss, rows, errors) in enumerate(results):
        assert loss == pytest.approx(math.log(9), abs=1e-12)
        assert rows == [9, (5, 4)[rank]]
        assert [e.split(" is")[0] for e in errors] == ["Id 9", "Id -1", "Target 9", "Target -1"]
    alone, want = Gpt(vocab=9), Gpt(vocab=9).init_weights()
    state = {"model": alone.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path / "saved"))
    assert state["model"]["tokens.weight"].shape == (9, 16)
    for name, value in want.state_dict().items():
        assert torch.equal(state["model"][name], value), name


# -- P32 ---------------------------------------------------------------------------------------------------------------
def initial(option: str):
    """Ranks that were seeded differently by mistake."""
    mesh = Mesh(MeshSpec(tp=2))

    class Free(Gpt):
        tp_plan: ClassVar = {k: v for k, v in Gpt.tp_plan.items() if k not in ("norm", "positions")}

    model = Free()
    model.init_weights(seed=dist.get_rank())
    split(option, model, mesh)
    plain = {n: p.detach().clone() for n, p in model.named_parameters() if not isinstance(p, DTensor)}
    shard = model.layers[0].mlp.w1.weight.to_local().detach().clone()
    whole_weights = {n: p.full_tensor() for n, p in model.named_parameters() if isinstance(p, DTensor)}
    return plain, shard, whole_weights


@each_option
def test_p32_start_is_equal_outside_the_plan_and_distinct_inside(pool, option: str) -> None:
    (plain, shard, weights), (other_plain, other_shard, _) = pool.run(initial, 2, option)
    assert set(plain) == {"positions.weight", "norm.weight", "norm.bias"}
    for name, value in plain.items():
        assert torch.equal(value, other_plain[name]), name
    assert not torch.equal(shard, other_shard)
    for name, value in Gpt().init_weights(seed=0).named_parameters():
        assert torch.equal((plain | weights)[name], value), name  # tp 2 = tp 1


def masks(option: str, sequence_parallel: bool, checkpointed: bool):
    """Where dropout fell, in one forward and backward; and the gradients that it led to."""
    mesh = Mesh(MeshSpec(tp=2))
    model = Gpt(dropout=0.5).init_weights()
    part = split(option, model, mesh, sequence_parallel=sequence_parallel)
    if checkpointed:
        Full().apply_activation_checkpointing(part=part)
    seen: dict[str, list[Tensor]] = {}

    def note(name: str):
        def hook(_: nn.Module, inputs: Any, output: Tensor) -> None:
            seen.setdefault(name, []).append((output != 0).detach().clone())

        return hook

    def attention(_: nn.Module, inputs: Any) -> None:
        seen.setdefault("attention", []).append(inputs[0].detach().clone())

    model.drop.register_forward_hook(note("embedding"))
    block = model.layers[1]
    block.drop.register_forward_hook(note("residual"))
    block.mlp.drop.register_forward_hook(note("hidden"))
    block.attention.wo.register_forward_pre_hook(attention)
    with torch.no_grad():  # then attention's output tells its mask alone
        for layer in (block.attention.wq, block.attention.wk, block.attention.wv):
            layer.weight.zero_()
        block.attention.wv.bias.fill_(1.0)
    torch.manual_seed(100)
    loss = model.training_step(batches(1)[0])["loss"]
    after = torch.rand(3)
    loss.backward()
    again = torch.rand(3)
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return seen, after, again, gradients, float(loss)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@each_option
def test_p32_masks_are_equal_where_ranks_compute_the_same(pool, option: str, sequence_parallel: bool) -> None:
    (one, after, again, _, loss), (two, after_two, again_two, _, loss_two) = pool.run(
        masks, 2, option, sequence_parallel, False
    )
    assert not torch.equal(one["attention"][0], two["attention"][0])
    assert not torch.equal(one["hidden"][0], two["hidden"][0])
    for region in ("embedding", "residual"):
        assert one[region][0].shape[1] == (4 if sequence_parallel else 8)
        assert torch.equal(one[region][0], two[region][0]) == (not sequence_parallel), region
    assert torch.equal(after, after_two), "the main stream went on alike"
    assert torch.equal(again, again_two)
    assert loss == pytest.approx(loss_two, rel=1e-12)
    assert not torch.equal(one["residual"][0], one["residual"][1]), "each draw is a new one"


@pytest.mark.parametrize("sequence_parallel", [False, True])
@each_option
def test_p32_recomputation_draws_the_same_masks(pool, option: str, sequence_parallel: bool) -> None:
    want = pool.run(masks, 2, option, sequence_parallel, False)
    got = pool.run(masks, 2, option, sequence_parallel, True)
    for (seen, after, again, gradients, loss), (seen_ac, after_ac, again_ac, gradients_ac, loss_ac) in zip(
        want, got, strict=True
    ):
        assert loss == loss_ac
        assert torch.equal(after, after_ac)
        assert torch.equal(again, again_ac), "recomputation left the main stream where it was"
        for name, gradient in gradients.items():
            assert torch.equal(gradient, gradients_ac[name]), name
        for region in ("attention", "hidden", "residual"):
            first = len(seen[region])
            recomputed = seen_ac[region][first:]
            assert recomputed, region
            assert all(torch.equal(a, b) for a, b in zip(recomputed, seen[region], strict=False)), region
