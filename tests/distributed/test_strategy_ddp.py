"""`strategy=ddp` beyond the parity table: what travels, when, from which start, and copies that drift apart."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fitting import fit
from lightning.pytorch import Callback
from mixes import Mix
from parity import SHAPE, SmallGpt, global_batches, initial_of, mean_loss, outcomes_of
from plans import make_plan, option
from torch import nn
from user_modules import Mlp, Scalar, regression, tokens

from framework.reduction import GradientReduction
from framework.testing import RanksError

DATA = regression(samples=32)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def ddp_plan(
    world_size: int = 2, *, strategy: str = "ddp", components: dict[str, Any] | None = None, **words: Any
) -> Any:
    settings = {key: words.pop(key) for key in [k for k in words if k in _fields(strategy)]}
    words = {"micro_batch_size": 4, **words}
    chosen = {"strategy": option("strategy", strategy, **settings)}
    return make_plan(world_size, strategy=strategy, components={**chosen, **(components or {})}, **words)


def _fields(strategy: str) -> set[str]:
    return set(option("strategy", strategy))


# -- hooks ---------------------------------------------------------------------------------------------------------
def mean_of_rounded(gradients: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """One process's idea of the wire: each rank's gradient divided, rounded, and the sum rounded."""
    total = (gradients[0] / len(gradients)).to(dtype)
    for gradient in gradients[1:]:
        total = total + (gradient / len(gradients)).to(dtype)
    return total.to(gradients[0].dtype)


@pytest.mark.parametrize(
    "words", ["", "strategy.reduction=overlap", "strategy.reduction=overlap strategy.bucket_cap_mb=0.001"]
)
@pytest.mark.parametrize("hook", list(DTYPES))
def test_first_gradients_are_the_mean_of_each_ranks_rounded_gradient(pool, hook, words) -> None:
    mix = Mix("", 2, f"strategy=ddp strategy.hook={hook} {words}")
    start = initial_of(pool, "fp64")
    batch = global_batches(2)[0]
    weights = [mean_loss(_model(start), piece)[1] for piece in batch]
    each = [_gradients(start, piece, weight / (sum(weights) / 2)) for piece, weight in zip(batch, weights, strict=True)]
    for outcome in outcomes_of(pool, mix):
        for name, gradient in outcome.result.first_gradients.items():
            want = mean_of_rounded([one[name] for one in each], DTYPES[hook])
            exact = sum(one[name] for one in each) / 2
            # values that lie on the edge between two roundings may fall to either side: order of summation
            off = (gradient - want).abs() > 1e-12
            assert off.double().mean() < 0.01, name
            assert not torch.allclose(gradient, exact, rtol=1e-7, atol=0) or not exact.any(), name


def _model(start: dict[str, torch.Tensor]) -> SmallGpt:
    model = SmallGpt(**SHAPE).double()
    model.load_state_dict(start)
    return model


def _gradients(start: dict[str, torch.Tensor], piece: Any, scale: float) -> dict[str, torch.Tensor]:
    model = _model(start)
    (mean_loss(model, piece)[0] * scale).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("hook", "xs", "want"),
    [
        ("none", (1 + 2**-9, 1.0), 1 + 2**-10),
        ("fp16", (1 + 2**-9, 1.0), 1 + 2**-10),  # 11 bits keep it
        ("bf16", (1 + 2**-9, 1.0), 1.0),  # 8 bits don't
        ("fp16", (1 + 2**-11, 1.0), 1.0),
        ("fp16", (1.0e6, 1.0), float("inf")),
        ("bf16", (2.0**100, 0.0), 2.0**99),
    ],
)
@pytest.mark.parametrize("reduction", ["bucketed", "overlap"])
def test_the_wire_has_the_dtype_that_was_asked_for(pool, hook, xs, want, reduction) -> None:
    plan = ddp_plan(hook=hook, reduction=reduction, micro_batch_size=1)
    for seen in pool.run(fit, 2, plan, Scalar, tokens([xs[0]], [xs[1]]), process_group=False):
        assert seen.gradients[0]["w"].item() == want


def test_a_pipeline_rounds_each_replicas_gradient_once(pool) -> None:
    mix = Mix("", 4, "strategy=ddp strategy.hook=bf16 pp=gpipe pp.microbatches=4")
    start = initial_of(pool, "fp64")
    batch = global_batches(2)[0]
    total = sum(mean_loss(_model(start), piece)[1] for piece in batch)
    each = [_gradients(start, piece, mean_loss(_model(start), piece)[1] / (total / 2)) for piece in batch]
    largest = 0.0
    for name, gradient in outcomes_of(pool, mix)[0].result.first_gradients.items():
        exact = sum(one[name] for one in each) / 2
        scale = max(float(one[name].abs().max()) for one in each)
        largest = max(largest, float((gradient - exact).abs().max()) / scale)
        # half a unit in the last place of 8 bits for each half and for their sum
        assert (gradient - exact).abs().max() <= scale * 2**-8, name
    assert largest > 1e-5, "nothing was rounded"


def test_powersgd_projects_the_mean_gradient_and_survives_several_buckets(pool) -> None:
    """First compressed step, no errors remembered yet: P Pᵀ M with orthonormal P, so of low rank, the rest orthogonal.

    More than one bucket on the way stopped torch's hook under gloo: both of its threads waited in a callback.
    """
    steps, start_step = 4, 2
    plan = ddp_plan(hook="powersgd", powersgd_rank=1, powersgd_start_step=start_step, bucket_cap_mb=0.002,
                    precision="fp64", trainer={"max_steps": steps})  # fmt: skip
    data = regression(32, dtype=torch.float64)
    compressed = pool.run(fit, 2, plan, Wide, data, process_group=False, timeout=60)
    whole = pool.run(fit, 2, ddp_plan(precision="fp64", trainer={"max_steps": steps}), Wide, data, process_group=False)
    seen = 0
    for step in range(start_step + 1):
        for name, gradient in compressed[0].gradients[step].items():
            assert torch.equal(gradient, compressed[1].gradients[step][name]), "replicas differ"
            mean = whole[0].gradients[step][name]
            if step < start_step or gradient.ndim < 2:
                torch.testing.assert_close(gradient, mean, rtol=1e-9, atol=1e-12)
                continue
            seen += 1
            assert torch.linalg.matrix_rank(gradient, rtol=1e-9) == 1, name
            assert torch.linalg.matrix_rank(mean, rtol=1e-9) > 1, name
            rest = mean - gradient
            assert abs((gradient * rest).sum()) < 1e-9 * gradient.square().sum(), name
            assert rest.norm() < mean.norm()
    assert seen == 4


class Wide(Mlp):
    """Matrices large enough that compression pays."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.layers = nn.ModuleList([
            nn.Sequential(nn.Linear(4, 32), nn.Tanh()),
            nn.Sequential(nn.Linear(32, 32), nn.Tanh()),
            nn.Sequential(nn.Linear(32, 32), nn.Tanh()),
            nn.Sequential(nn.Linear(32, 4)),
        ])  # fmt: skip
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


# -- when ------------------------------------------------------------------------------------------------------------
def overlapping(bucket_bytes: int) -> tuple[int, list[int]]:
    """Return how many reductions had started when the backward of the first layer began, for each of two windows."""
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    reduction = GradientReduction(dict(model.named_parameters()), dist.group.WORLD, bucket_bytes=bucket_bytes)
    started: list[int] = []
    model[0].register_full_backward_pre_hook(lambda *_: started.append(reduction._started))
    x = torch.ones(2, 4)
    with reduction.no_sync():
        model(x).sum().backward()
    model(x).sum().backward()
    reduction.finish()
    return len(reduction._buckets), started


def test_reductions_start_during_the_backward_of_the_last_micro_step_only(pool) -> None:
    assert pool.run(overlapping, 2, 0) == [(4, [0, 3])] * 2
    assert pool.run(overlapping, 2, 128) == [(2, [0, 1])] * 2
    assert pool.run(overlapping, 2, 2**20) == [(1, [0, 0])] * 2


class Tied(Mlp):
    """Its two layers share one matrix, and a third is frozen."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
        self.layers[1].weight = self.layers[0].weight
        self.layers[2].requires_grad_(False)


def test_overlap_with_tied_and_frozen_weights_equals_the_wrapper(pool) -> None:
    data = regression(32, dtype=torch.float64)
    words = {"precision": "fp64", "accumulation": 2, "trainer": {"accumulate_grad_batches": 2}}
    ours = pool.run(fit, 2, ddp_plan(reduction="overlap", **words), Tied, data, process_group=False)
    torchs = pool.run(fit, 2, ddp_plan(**words), Tied, data, process_group=False)
    for seen, want in zip(ours, torchs, strict=True):
        assert torch.equal(seen.final["layers.2.weight"], seen.initial["layers.2.weight"])
        assert not torch.equal(seen.final["layers.0.weight"], seen.initial["layers.0.weight"])
        for name, value in want.final.items():
            torch.testing.assert_close(seen.final[name], value, rtol=1e-12, atol=1e-14)


class Normed(Mlp):
    """Running statistics that differ by rank until they are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def buffers_after(plan: Any, data: Any) -> torch.Tensor:
    module = Normed()
    fit(plan, lambda: module, data)
    return module.norm.running_mean.clone()


def test_overlap_copies_buffers_from_the_first_replica(pool) -> None:
    first, second = pool.run(buffers_after, 2, ddp_plan(reduction="overlap"), DATA, process_group=False)
    assert torch.equal(first, second)
    first, second = pool.run(
        buffers_after, 2, ddp_plan(reduction="overlap", broadcast_buffers=False), DATA, process_group=False
    )
    assert not torch.equal(first, second)


# -- from which start ------------------------------------------------------------------------------------------------
class Own(Mlp):
    """Each rank draws weights and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__(seed=100 + dist.get_rank())
        self.register_buffer("offset", torch.full((4,), float(dist.get_rank())))
        self.register_buffer("flag", torch.tensor(dist.get_rank() > 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.offset


def start_of(plan: Any, data: Any) -> tuple[Any, torch.Tensor, bool]:
    kept = []

    def module() -> Own:
        kept.append(Own())
        return kept[0]

    seen = fit(plan, module, data)
    return seen, kept[0].offset.clone(), bool(kept[0].flag)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, {}),
        (2, {"reduction": "overlap"}),
        (4, {"pp": "gpipe", "microbatches": 2, "micro_batch_size": 2}),
        (2, {"strategy": "fsdp"}),
    ],
    ids=["ddp", "overlap", "ddp x pp", "fsdp"],
)
def test_all_ranks_start_from_the_weights_of_rank_0(pool, ranks, words) -> None:
    first = Mlp(seed=100).state_dict()
    for seen, offset, flag in pool.run(start_of, ranks, ddp_plan(ranks, **words), DATA):
        assert {name: value for name, value in seen.initial.items() if not torch.equal(value, first[name])} == {}
        assert seen.initial.keys() == first.keys()
        assert torch.equal(offset, torch.zeros(4))
        assert not flag


class Different(Mlp):
    """Rank 1 has one more layer."""

    def __init__(self) -> None:
        super().__init__()
        if dist.get_rank():
            self.more = nn.Linear(2, 2)


def test_another_module_on_a_rank_is_named(pool) -> None:
    with pytest.raises(RanksError, match=r"Rank 1 built another module than rank 0: they differ in more\.bias"):
        pool.run(fit, 2, ddp_plan(), Different, DATA)


# -- copies that drift apart -------------------------------------------------------------------------------------
class Forgets(Mlp):
    """Rank 1 forgets zero_grad from step 2 on."""

    def optimizer_zero_grad(self, *args: Any) -> None:
        if not (self.global_rank == 1 and self.trainer.global_step >= 2):
            super().optimizer_zero_grad(*args)


class Nudge(Callback):
    """Changes one weight of one rank after the second step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == trainer.world_size - 1:
            with torch.no_grad():
                last = list(pl_module.parameters())[-1]
                (last.to_local() if hasattr(last, "to_local") else last).view(-1)[0] += 1e-6


class OtherRate(Mlp):
    """The learning rate of the last rank is another one."""

    def configure_optimizers(self) -> Any:
        rate = 0.2 if self.trainer.global_rank == self.trainer.world_size - 1 else 0.1
        return torch.optim.SGD(self.parameters(), lr=rate)


LAYOUTS = {
    "ddp": (2, {}),
    "overlap": (2, {"reduction": "overlap"}),
    "ddp x pp": (4, {"pp": "1f1b", "microbatches": 2, "micro_batch_size": 2}),
    "hybrid": (4, {"strategy": "fsdp", "replicas": 2, "micro_batch_size": 2}),
}


def drifting(pool: Any, layout: str, module: Any, every: int = 1, **more: Any) -> str:
    ranks, words = LAYOUTS[layout]
    plan = ddp_plan(ranks, replica_check=every, **words)
    if layout == "hybrid":
        plan = plan.with_(mesh=type(plan.mesh)(dp_replicate=2, dp_shard=2))
    with pytest.raises(RanksError) as caught:
        pool.run(fit, ranks, plan, module, DATA, process_group=False, timeout=60, tensors=False, **more)
    return str(caught.value)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_gradient_left_from_the_step_before_is_named(pool, layout) -> None:
    said = drifting(pool, layout, Forgets)
    assert "layers." in said
    assert "at the start of step 2 rank 1 still held the gradient of the step before" in said


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_weight_that_differs_is_named(pool, layout) -> None:
    ranks, _ = LAYOUTS[layout]
    said = drifting(pool, layout, Mlp, callbacks=[Nudge()])
    assert "layers.1.0.bias: the weight on rank" in said
    assert f"{ranks - 1} differs from that of its copies before step 2, since step 1" in said


@pytest.mark.parametrize("layout", ["ddp", "hybrid"])
def test_an_optimizer_setting_that_differs_is_named_with_its_values(pool, layout) -> None:
    said = drifting(pool, layout, OtherRate, every=2)
    assert "before step 2, since step 0. lr (group 0) of the optimizer: 0.1 on rank" in said
    assert "0.2 on rank" in said


def test_equal_copies_pass(pool) -> None:
    plan = ddp_plan(replica_check=2)
    assert len(pool.run(fit, 2, plan, partial(Mlp, momentum=0.9), DATA, process_group=False)[0].losses) == 4


# -- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mesh", "settings", "words"),
    [
        ({"tp": 2}, {"hook": "powersgd"}, "doesn't work with tp. Type strategy.hook=bf16."),
        ({}, {"hook": "powersgd", "reduction": "overlap"}, "Type strategy.reduction=bucketed or strategy.hook=bf16."),
        ({"pp": 2}, {"static_graph": True}, "only torch's DDP wrapper has it, and that doesn't work with pp"),
        ({}, {"reduction": "overlap", "gradient_as_bucket_view": False}, "Type strategy.gradient_as_bucket_view=true."),
        ({}, {"powersgd_rank": 2}, "only strategy.hook=powersgd reads it"),
        ({"dp_replicate": 1}, {"replica_check": 1}, "there is one copy"),
    ],
)
def test_settings_that_cannot_be_had_are_refused_with_words(mesh, settings, words) -> None:
    from framework.plan import MeshSpec
    from framework_plugins.strategy.ddp import DDP

    plan = make_plan(2, strategy="ddp").with_(mesh=MeshSpec(**{"dp_replicate": 2, **mesh}))
    (problem,) = DDP(**settings).check_plan(plan=plan)
    assert words in str(problem)
    assert DDP().check_plan(plan=plan) == []
