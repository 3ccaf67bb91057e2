"""The split loss, operators and their conjugates, checked shapes, and what tensor parallelism can't do."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F
from tp_models import Gpt

from framework.mesh import Mesh
from framework.parts import ModelPart, whole
from framework.plan import MeshSpec, RunPlan
from framework.testing import RanksError
from framework_plugins.tp import vocab_loss
from framework_plugins.tp.dtensor import DTensorParallel
from framework_plugins.tp.layers import LayerParallel
from framework_plugins.tp.megatron import MegatronParallel
from framework_plugins.tp.operators import (
    copy_to_region,
    gather_from_region,
    gather_sequence,
    reduce_from_region,
    reduce_scatter_sequence,
    scatter_to_region,
)
from framework_plugins.tp.ranges import piece
from framework_plugins.tp.styles import Axis
from framework_plugins.tp.vocab_loss import VocabLoss


def split(model: LightningModule, mesh: Mesh, **words: Any) -> ModelPart:
    option = DTensorParallel(**words)
    plan = RunPlan(run_id="r", run_dir="/nowhere", mesh=mesh.spec)
    assert not [str(problem) for problem in option.check_model(plan=plan, model=model)]
    part = whole(model)
    option.apply_tensor_parallel(part=part, mesh=mesh)
    return part


# -- operators ---------------------------------------------------------------------------------------------------------
def conjugates(columns: int) -> list[tuple[str, float]]:
    """Outputs and gradients of each operator against what they must be, which every rank can work out."""
    mesh = Mesh(MeshSpec(tp=dist.get_world_size()))["tp"]
    ranks, rank = mesh.size(), mesh.get_local_rank()

    def everyone(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [torch.randn(shape, dtype=torch.float64) for shape in shapes]

    torch.manual_seed(0)
    widths = [end - start for start, end in (piece(columns, ranks, one) for one in range(ranks))]
    same, columnwise = [(3, 4, columns)] * ranks, [(3, 4, width) for width in widths]
    rows = [(3, 4 // ranks, 5)] * ranks
    long = [(3, 4, 5)] * ranks
    found = []
    for name, operator, given, back, output, gradient in (
        ("copy", lambda x: copy_to_region(x, mesh), same[:1], same, lambda x: x[0], sum),
        ("reduce", lambda x: reduce_from_region(x, mesh), same, same[:1], sum, lambda g: g[0]),
        ("gather", lambda x: gather_from_region(x, columns, mesh), columnwise, same[:1],
         lambda x: torch.cat(x, -1), lambda g: g[0].split(widths, -1)[rank]),
        ("scatter", lambda x: scatter_to_region(x, mesh), same[:1], columnwise,
         lambda x: x[0].split(widths, -1)[rank], lambda g: torch.cat(g, -1)),
        ("gather sequence", lambda x: gather_sequence(x, mesh), rows, long,
         lambda x: torch.cat(x, -2), lambda g: sum(g).chunk(ranks, -2)[rank]),
        ("reduce-scatter sequence", lambda x: reduce_scatter_sequence(x, mesh), long, rows,
         lambda x: sum(x).chunk(ranks, -2)[rank], lambda g: torch.cat(g, -2)),
    ):  # fmt: skip
        inputs, gradients = everyone(*given), everyone(*back)
        x = inputs[rank % len(inputs)].clone().requires_grad_()
        y = operator(x)
        y.backward(gradients[rank % len(gradients)])
        wrong = (y.detach() - output(inputs)).abs().sum() + (x.grad - gradient(gradients)).abs().sum()
        found.append((name, float(wrong)))
    factor = torch.arange(1.0, ranks + 1)
    x = torch.tensor(3.0, requires_grad=True)
    (first,) = torch.autograd.grad(reduce_from_region(factor[rank] * copy_to_region(x, mesh) ** 3, mesh), x,
                                   create_graph=True)  # fmt: skip
    (second,) = torch.autograd.grad(first, x)
    found.append(("gradient of the gradient", float((second - 18 * factor.sum()).abs())))
    return found


@pytest.mark.parametrize(("ranks", "columns"), [(2, 6), (2, 5), (4, 9)])
def test_operators_and_their_conjugates(pool, ranks: int, columns: int) -> None:
    for found in pool.run(conjugates, ranks, columns):
        assert len(found) == 7
        assert {name: error for name, error in found if not error < 1e-12} == {}


# -- checked shapes ----------------------------------------------------------------------------------------------------
class Pair(LightningModule):
    tp_plan: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def left_whole(option: type[LayerParallel], check_shapes: bool) -> bool:
    """The weights of a pair aren't cut: shapes fit, and each sum is `tp` times what it should be."""
    torch.manual_seed(0)
    model, mesh = Pair(), Mesh(MeshSpec(tp=2))
    x = torch.randn(3, 5, 6)
    want = model(x) - model.down.bias
    made = option(check_shapes=check_shapes)
    original = Axis.distribute
    Axis.distribute = lambda self, module, name, placement: original(self, module, name, Replicate())
    try:
        made.apply_tensor_parallel(part=whole(model), mesh=mesh)
    finally:
        Axis.distribute = original
    got = model(x)
    got.sum().backward()
    return torch.allclose(got - model.down.bias.to_local(), 2 * want, atol=1e-6)


@pytest.mark.parametrize("option", [DTensorParallel, MegatronParallel])
def test_a_gradient_of_the_wrong_shape_is_named(pool, option: type[LayerParallel]) -> None:
    assert pool.run(left_whole, 2, option, False) == [True, True], "wrong, and nothing says so"
    with pytest.raises(
        RanksError, match=r"gradient of down\.weight has shape \[6, 8\].* is \[6, 4\] \(\[out, in/tp\]\)"
    ):
        pool.run(left_whole, 2, option, True)


# -- the split loss ----------------------------------------------------------------------------------------------------
def losses(classes: int):
    """Our loss, gradients and error cases against torch's on whole logits and its `loss_parallel`."""
    mesh = Mesh(MeshSpec(tp=2))["tp"]
    calls = []
    original = vocab_loss.cross_entropy
    vocab_loss.cross_entropy = lambda *args, **options: calls.append(options) or original(*args, **options)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, classes, generator=generator, dtype=torch.float64) * 3
    target = torch.randint(0, classes, (6,), generator=generator)
    target[2] = -100
    rows = []
    for options in ({}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 1}, {"label_smoothing": 0.1},
                    {"weight": torch.rand(classes, generator=generator, dtype=torch.float64)}):  # fmt: skip
        plain = logits.clone().requires_grad_()
        target[2] = options.get("ignore_index", -100)
        want = F.cross_entropy(plain, target, **options)
        want.sum().backward()
        pieces = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        with VocabLoss():
            got = F.cross_entropy(pieces.view(2, 3, classes).flatten(0, 1), target, **options)
        got.sum().backward()
        assert type(got) is Tensor
        rows.append((str(sorted(options)), float((got - want).detach().abs().max()),
                     float((pieces.grad.full_tensor() - plain.grad).abs().max())))  # fmt: skip
    theirs = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(theirs, target)
        loss.backward()
    ours = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    with VocabLoss():
        loss_ours = nn.CrossEntropyLoss()(ours, target)
        image = F.cross_entropy(ours.unflatten(0, (2, 3)).transpose(1, 2), target.unflatten(0, (2, 3)))
        hits = (ours.argmax(-1) == target).sum()
    vocab_loss.cross_entropy = original
    assert len(calls) == 6, "label smoothing and class weights are computed on joined logits, the rest is not"
    loss_ours.backward()
    difference = (ours.grad.to_local() - theirs.grad.to_local()).abs().max()
    rows.append(("torch", abs(float(loss_ours.detach()) - float(loss.full_tensor().detach())), float(difference)))
    rows.append(("image", float((image - loss_ours).detach().abs()), 0.0))
    return rows, int(hits), int((logits.argmax(-1) == target).sum())


@pytest.mark.parametrize("classes", [8, 9])
def test_split_loss_equals_the_whole_one(pool, classes: int) -> None:
    for rows, hits, want in pool.run(losses, 2, classes):
        for name, loss, gradient in rows:
            assert loss < 1e-12, name
            assert gradient < 1e-12, name
        assert hits == want


def low_precision():
    mesh = Mesh(MeshSpec(tp=2))["tp"]
    logits = (torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * 8).bfloat16()
    target = torch.arange(64) % 8
    with VocabLoss():
        loss = F.cross_entropy(distribute_tensor(logits, mesh, [Shard(1)]), target)
    return float(loss), float(F.cross_entropy(logits.float(), target))


def test_split_loss_is_computed_in_float32(pool) -> None:
    for got, want in pool.run(low_precision, 2):
        assert got == pytest.approx(want, rel=1e-6)


# -- limits ------------------------------------------------------------------------------------------------------------
def odd_length():
    model = Gpt().init_weights()
    split(model, Mesh(MeshSpec(tp=2)), sequence_parallel=True)
    model(torch.zeros(1, 7, dtype=torch.long))


def test_sequence_that_cannot_be_cut_is_refused(pool) -> None:
    with pytest.raises(RanksError, match=r"cuts sequences into 2 pieces .* has 7 positions; type"):
        pool.run(odd_length, 2)


class Fixed(LightningModule):
    """Keeps to its number of heads in `view`, as many models do."""

    tp_plan: ClassVar = {"mix.q": "colwise", "mix.o": "rowwise", "mix.heads": "divide"}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Module()
        self.mix.heads = 4
        self.mix.q, self.mix.o = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix.o(torch.softmax(self.mix.q(x).view(*x.shape[:-1], self.mix.heads, -1), -1).flatten(-2))


def divided():
    want, model = Fixed(), Fixed()
    split(model, Mesh(MeshSpec(tp=2)))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.mix.q.weight.zero_()
    return float((model(x) - want(x)).detach().abs().max()), float((twin(x) - want(x)).detach().abs().max())


def test_attributes_can_be_divided_and_copies_are_their_own(pool) -> None:
    for error, of_twin in pool.run(divided, 2):
        assert error < 1e-6
        assert of_twin > 1e-3
