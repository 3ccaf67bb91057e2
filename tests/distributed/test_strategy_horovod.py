"""`strategy=horovod` equals one process, with the real library: `make horovod` builds it and runs this file."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fitting import fit
from launching import Launched
from mixes import ACC2, ACC4, BOUNDS, CLIP, CLIP_INF, CLIP_VALUE, FP16, Mix
from parity import equal_to_reference, global_batches, initial_of, mean_loss, outcomes_of, plan_of, reference_of
from plans import make_plan, option
from test_resume_matrix import MATRIX
from test_strategy_ddp import Tied, buffers_after, mean_of_rounded, start_of
from test_strategy_ddp import _gradients as gradients_of
from test_strategy_ddp import _model as model_of
from torch import Tensor, nn
from user_modules import Mlp, Scalar, TwoHeads, regression, tokens

from framework import cli, testing
from framework.errors import EXIT_OK
from framework.launch import launch
from framework.testing import RanksError
from framework.verify.reference import Bounds, disagreements

pytestmark = [pytest.mark.horovod, pytest.mark.slow]

HVD = "strategy=horovod"
STEPS_UNUSED = 3
UNUSED = "strategy.find_unused_parameters=true"
MIXES = [
    Mix("2 ranks", 2, HVD),
    Mix("accumulation, clip norm", 2, f"{HVD} {ACC4} {CLIP}"),
    Mix("find_unused_parameters, accumulation, clip value", 2, f"{HVD} {UNUSED} {ACC2} {CLIP_VALUE}"),
    Mix("each gradient alone, slow cycles", 2, f"{HVD} strategy.fusion_threshold_mb=0 strategy.cycle_time_ms=5 {CLIP}"),
    Mix("4 ranks, full AC, accumulation, clip inf", 4, f"{HVD} activation=full {ACC2} {CLIP_INF}"),
    Mix("4 ranks, compiled, find_unused_parameters", 4, f"{HVD} {UNUSED} compile=block compile.backend=aot_eager"),
    Mix("fp32", 2, f"precision=fp32 {HVD} {ACC2} {CLIP}"),
    Mix("bf16-mixed", 2, f"precision=bf16-mixed {HVD} {ACC2}"),
    Mix("bf16-true", 2, f"precision=bf16-true {HVD}"),
    Mix("fp16-mixed, accumulation, clip", 2, f"{FP16} {HVD} {ACC2} {CLIP}"),
]
"""Samples have between 1 and 8 valid tokens: ranks and micro-batches weigh differently."""


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_mix_equals_the_reference(pool: Any, mix: Mix) -> None:
    want, outcomes = equal_to_reference(pool, mix)
    if mix.clip[0] is not None:
        assert outcomes[0].grad_norm == pytest.approx(want.grad_norms[-1], rel=mix.bounds.gradient)


def test_verify_finds_it_equal(capsys: Any) -> None:
    small = ["model.layers=2", "model.width=16", "model.heads=2", "model.hidden=32", "global_batch_size=8"]
    assert cli.main(["verify", HVD, *small, "--steps", "3"]) == EXIT_OK
    assert capsys.readouterr().out.splitlines()[-1] == "2 equal; 1 hash of initial weights"


# -- what travels --------------------------------------------------------------------------------------------------
def test_fp16_travels_as_the_mean_of_each_ranks_rounded_gradient(pool: Any) -> None:
    """To the last bit but for values on the edge between two roundings, and so within 5e-4 of the exact mean."""
    start = initial_of(pool, "fp64")
    batch = global_batches(2)[0]
    weights = [mean_loss(model_of(start), piece)[1] for piece in batch]
    scales = [weight / (sum(weights) / 2) for weight in weights]
    each = [gradients_of(start, piece, scale) for piece, scale in zip(batch, scales, strict=True)]
    for outcome in outcomes_of(pool, Mix("", 2, f"{HVD} strategy.compression=fp16")):
        for name, gradient in outcome.result.first_gradients.items():
            want = mean_of_rounded([one[name] for one in each], torch.float16)
            exact = sum(one[name] for one in each) / 2
            assert ((gradient - want).abs() > 1e-12).double().mean() < 0.01, name
            largest = max(float(one[name].abs().max()) for one in each)
            assert (gradient - exact).abs().max() <= 2 * 2**-11 * largest, name
            assert not torch.equal(gradient, exact) or not exact.any(), name


def test_a_run_with_fp16_stays_near_one_process(pool: Any) -> None:
    mix = Mix("", 2, f"{HVD} strategy.compression=fp16 {ACC2} {CLIP}")
    rounded = Bounds(loss=1e-4, gradient=2e-3, update=2e-3, floor=0.1)
    (got, *_) = outcomes_of(pool, mix)
    assert disagreements(got.result, reference_of(pool, mix), rounded) == []
    assert disagreements(got.result, reference_of(pool, mix), BOUNDS["fp64"]) != []


@pytest.mark.parametrize(
    ("compression", "xs", "want"),
    [
        ("none", (1 + 2**-11, 1.0), 1 + 2**-12),
        ("fp16", (1 + 2**-9, 1.0), 1 + 2**-10),  # 11 bits keep it
        ("fp16", (1 + 2**-11, 1.0), 1.0),
        ("fp16", (1.0e5, 1.0e4), 55000.0),  # divided before it is rounded: the largest fp16 is 65504
        ("fp16", (1.0e6, 1.0), float("inf")),
    ],
)
def test_the_wire_has_the_dtype_that_was_asked_for(pool: Any, compression: str, xs: Any, want: float) -> None:
    plan = by_hand(compression=compression)
    for seen in pool.run(fit, 2, plan, Scalar, tokens([xs[0]], [xs[1]]), process_group=False):
        assert seen.gradients[0]["w"].item() == pytest.approx(want, rel=1e-3 if want == 55000.0 else 0)


def by_hand(ranks: int = 2, **fields: Any) -> Any:
    """A plan of batches of 1 sample a rank."""
    own = {key: fields.pop(key) for key in [k for k in fields if k in option("strategy", "horovod")]}
    component = option("strategy", "horovod", **own)
    return make_plan(ranks, strategy="ddp", components={"strategy": component}, **fields)


def test_uneven_tokens_and_a_micro_batch_without_any(pool: Any) -> None:
    """P07 by hand: micro-batches of 1, 2, 0 and 3 tokens; the gradient is the mean of all 6, 6.5, and lr is 0.1."""
    data = tokens([2.0], [4.0, 6.0], [], [5.0, 8.0, 14.0])
    for seen in pool.run(fit, 2, by_hand(accumulation=2), Scalar, data, process_group=False):
        assert seen.gradients[0]["w"].item() == pytest.approx(6.5)
        assert seen.final["w"].item() == pytest.approx(-0.65)


def test_a_step_whose_loss_is_not_finite_is_left_out(pool: Any) -> None:
    """Step 2 of 3 is skipped on all ranks, with the gradients of its good micro-batches."""
    good, bad = [1.0], [float("inf")]
    data = tokens(good, good, good, good, good, good, good, bad, good, good, good, good)
    plan = by_hand(accumulation=2, on_nonfinite="skip")
    for seen in pool.run(fit, 2, plan, Scalar, data, process_group=False):
        assert seen.skipped == 1
        assert seen.final["w"].item() == pytest.approx(-0.2)


class Counted(Mlp):
    """One of its parameters has no dim, one no element, two are one, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0))
        self.layers[0][0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor + self.empty.sum()


@pytest.mark.parametrize("module", [Tied, Counted])
def test_parameters_of_any_kind_are_reduced_as_by_ddp(pool: Any, module: Any) -> None:
    data = regression(32, dtype=torch.float64)
    words = {"precision": "fp64", "accumulation": 2, "micro_batch_size": 2}
    ours = pool.run(fit, 2, by_hand(**words), module, data, process_group=False)
    overlap = option("strategy", "ddp", reduction="overlap")
    plan = make_plan(2, strategy="ddp", components={"strategy": overlap}, **words)
    for seen, want in zip(ours, pool.run(fit, 2, plan, module, data, process_group=False), strict=True):
        assert seen.final.keys() == want.final.keys()
        for name, value in want.final.items():
            torch.testing.assert_close(seen.final[name], value, rtol=1e-12, atol=1e-14)


def fit_twice(plan: Any, data: Any) -> list[Tensor]:
    """Two trainings in one process: Horovod starts and ends with each."""
    return [fit(plan, Scalar, data).final["w"] for _ in range(2)]


def test_a_process_can_train_more_than_once(pool: Any) -> None:
    for first, second in pool.run(fit_twice, 2, by_hand(), tokens([2.0], [4.0]), process_group=False):
        assert torch.equal(first, second)


def test_the_timeline_lies_in_the_folder_of_the_run(pool: Any) -> None:
    plan = plan_of(Mix("", 2, f"{HVD} strategy.timeline=true"))
    pool.run(fit, 2, plan, Scalar, tokens(*[[2.0]] * 16), process_group=False)
    assert "allreduce.w" in (Path(plan.run_dir) / "horovod_timeline.json").read_text()


# -- unused parameters ---------------------------------------------------------------------------------------------
def unused(pool: Any, ranks: tuple[int, ...], find: bool, optimizer: str = "sgd") -> Any:
    plan = by_hand(micro_batch_size=4, find_unused_parameters=find, trainer={"max_steps": STEPS_UNUSED})
    module = partial(TwoHeads, ranks, optimizer)
    return pool.run(fit, 2, plan, module, regression(24), process_group=False, timeout=60)


@pytest.mark.parametrize("ranks", [(), (0,), (1,)], ids=["nowhere", "on rank 0", "on rank 1"])
def test_what_is_not_used_is_named_with_the_setting(pool: Any, ranks: tuple[int, ...]) -> None:
    with pytest.raises(RanksError, match=r"head_b\.weight, head_b\.bias got no gradient") as caught:
        unused(pool, ranks, find=False)
    assert UNUSED in str(caught.value)


def test_what_is_used_nowhere_stays_as_it_was_also_with_weight_decay(pool: Any) -> None:
    for seen in unused(pool, (), find=True, optimizer="adamw"):
        assert torch.equal(seen.final["head_b.weight"], seen.initial["head_b.weight"])
        assert not torch.equal(seen.final["layers.0.0.weight"], seen.initial["layers.0.0.weight"])


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_used_on_one_rank_is_averaged_over_both(pool: Any, rank: int) -> None:
    """The bias's gradient is 4, its batch, on one rank and nothing on the other: 2 on both."""
    for seen in unused(pool, (rank,), find=True):
        torch.testing.assert_close(seen.gradients[0]["head_b.bias"], torch.full((4,), 2.0))
        moved = seen.initial["head_b.bias"] - seen.final["head_b.bias"]
        torch.testing.assert_close(moved, torch.full((4,), 2.0 * 0.01 * STEPS_UNUSED))


def test_a_sparse_gradient_is_named_with_the_strategy_that_takes_it(pool: Any) -> None:
    with pytest.raises(RanksError, match=r"gradient of table\.weight is sparse.*or type strategy=ddp"):
        pool.run(fit, 2, by_hand(), Sparse, tokens([1.0], [2.0]), process_group=False)


class Sparse(Scalar):
    """Its gradient lists only the rows that were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 1, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table(x.long()).squeeze(-1)


# -- the start, and buffers ----------------------------------------------------------------------------------------
def test_all_ranks_start_from_the_weights_of_rank_0(pool: Any) -> None:
    first = Mlp(seed=100).state_dict()
    for seen, offset, flag in pool.run(start_of, 2, by_hand(micro_batch_size=4), regression(32)):
        assert {name for name, value in seen.initial.items() if not torch.equal(value, first[name])} == set()
        assert seen.initial.keys() == first.keys()
        assert torch.equal(offset, torch.zeros(4))
        assert not flag


@pytest.mark.parametrize("copied", [True, False])
def test_buffers_are_copied_from_rank_0_if_asked(pool: Any, copied: bool) -> None:
    plan = by_hand(micro_batch_size=4, broadcast_buffers=copied)
    first, second = pool.run(buffers_after, 2, plan, regression(32), process_group=False)
    assert torch.equal(first, second) is copied


# -- checkpoints ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("before", "after"), [(HVD, "strategy=ddp"), ("strategy=fsdp", HVD)])
def test_a_run_goes_on_under_another_mix(pool: Any, tmp_path: Path, before: str, after: str) -> None:
    """Weights, momentum, schedule and data position, to the last digits."""
    whole, losses, *_ = MATRIX.run(pool, Mix("", 1), MATRIX.steps, tmp_path)
    saved = tmp_path / "step-3"
    MATRIX.run(pool, Mix("", 2, before), MATRIX.stop, tmp_path, save=saved)
    weights, later, _, steps = MATRIX.run(pool, Mix("", 2, after), MATRIX.steps, tmp_path, start=saved)
    assert steps == MATRIX.steps
    assert later == pytest.approx(losses[MATRIX.stop :], rel=1e-9)
    for name, tensor in whole.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


# -- launchers and failures ----------------------------------------------------------------------------------------
def training(folder: Path, *words: str, trouble: dict[str, Any] | None = None) -> Any:
    """A plan of 6 steps with a real launcher."""
    plan = testing.plan(
        HVD, "devices=2", "global_batch_size=2", "threads=1", "timeout_s=60", "logger=[]", "trainer.max_epochs=1",
        "trainer.enable_progress_bar=false", "checkpoint.every_n_steps=2", "checkpoint.save_top_k=-1",
        "model._target_=failing_runs.Tiny", f'model.folder="{folder}"', "data._target_=failing_runs.NumberedData",
        f"run_dir={folder}", *words,
    )  # fmt: skip
    callbacks = {} if trouble is None else {"trouble": {"_target_": "failing_runs.Trouble", **trouble}}
    return plan.with_(components={**plan.components, "callbacks": callbacks})


@pytest.mark.parametrize("launcher", ["local", "spawn"])
def test_our_launchers_start_it(tmp_path: Path, launcher: str) -> None:
    result = launch(training(tmp_path, f"launcher={launcher}"))
    assert result.status == "finished", result.describe()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["raise", "SIGKILL"])
def test_a_rank_that_dies_ends_the_run_with_its_own_error(tmp_path: Path, what: str, rank: int) -> None:
    trouble = {"rank": rank, "where": "train", "step": 2, "what": what}
    plan = training(tmp_path, "recovery=none", trouble=trouble)
    with Launched(plan, "framework.worker:train") as launched:
        assert launched.wait(120) == 1, launched.output()
        said = "failed: ValueError: boom7" if what == "raise" else "was killed by signal 9 (SIGKILL)"
        assert f"Rank {rank} {said}" in launched.output()
        launched.no_leftovers()


class DiesInBackward(Mlp):
    """Rank 1 raises after the first gradient of its second step was sent: the other one waits in Horovod."""

    def on_train_start(self) -> None:
        if self.global_rank == 1:
            self.layers[0][0].weight.register_hook(self._boom)

    def _boom(self, gradient: Tensor) -> None:
        if self.trainer.global_step == 1:
            raise ValueError("boom7")


def test_a_rank_that_dies_in_its_backward_is_the_cause(pool: Any) -> None:
    with pytest.raises(RanksError, match="Rank 1: ValueError: boom7"):
        pool.run(fit, 2, by_hand(micro_batch_size=4), DiesInBackward, regression(32), process_group=False)


class HangsInBackward(Mlp):
    """Rank 1 sleeps in its backward."""

    def on_train_start(self) -> None:
        if self.global_rank == 1:
            self.layers[0][0].weight.register_hook(lambda gradient: time.sleep(60))


def test_a_rank_that_hangs_ends_the_run_at_the_time_limit(pool: Any) -> None:
    """Horovod itself would wait for ever."""
    plan = by_hand(micro_batch_size=4).with_(timeout_s=4.0)
    began = time.monotonic()
    with pytest.raises(RanksError, match=r"Rank 0 has waited 4 s for the gradient of layers\.0\.0\.weight"):
        pool.run(fit, 2, plan, HangsInBackward, regression(32), process_group=False)
    assert time.monotonic() - began < 40


def worlds(pool: Any, ranks: int) -> list[Any]:
    return pool.run(fit, ranks, by_hand(ranks), Scalar, tokens(*[[2.0]] * 4), process_group=False)


def test_processes_of_a_pool_serve_worlds_of_different_sizes(pool: Any) -> None:
    """Horovod would crash in a process that it has been in with other ranks: the pool starts others."""
    for ranks in (2, 4, 2):
        assert len(worlds(pool, ranks)) == ranks
        assert pool.pids == []


def start_as_another_world(plan: Any) -> None:
    """Called on both ranks, which once were three."""
    from framework_plugins.strategy import horovod_world

    horovod_world._size = 3
    horovod_world.start(plan, {})


def test_another_number_of_ranks_in_one_process_is_a_sentence(pool: Any) -> None:
    with pytest.raises(RanksError, match="had 3 ranks before and has 2 now; start another process"):
        pool.run(start_as_another_world, 2, by_hand())


def test_a_failed_run_leaves_processes_that_train_again(tmp_path: Path) -> None:
    result = launch(training(tmp_path, trouble={"rank": 1, "where": "train", "step": 3}))
    assert (result.status, result.restarts) == ("finished", 1)
    assert result.resumed_from == str(tmp_path / "checkpoints" / "step-000002")


@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_of_torchrun_meet_in_horovod(tmp_path: Path, hosts: int) -> None:
    """Two agents stand for two hosts: ranks 2 and 3 are on the second, neighbours of 0 and 1 across."""
    plan = make_plan(4, strategy="ddp", run_dir=str(tmp_path), num_nodes=hosts)
    plan = plan.with_(components={**plan.components, "launcher": option("launcher", "torchrun")})
    lines: list[dict[str, Any]] = []
    port = _free_port()
    starts = [
        Launched(
            plan.with_(run_dir=str(tmp_path / str(host))),
            "horovod_entries:meet",
            prefix=[
                *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}", f"--node-rank={host}"),
                *(f"--nproc-per-node={4 // hosts}", "--master-addr=127.0.0.1", f"--master-port={port}"),
            ],
        )
        for host in range(hosts)
    ]
    for launched in starts:
        with launched:
            assert launched.wait(120) == 0, launched.output()
            lines += [json.loads(line) for line in launched.output().splitlines() if line.startswith("{")]
    told = {int(rank): value for line in lines for rank, value in line["results"].items()}
    assert sorted(told) == [0, 1, 2, 3]
    local = 4 // hosts
    for rank, seen in told.items():
        assert seen == {
            "rank": rank, "size": 4, "local_rank": rank % local, "local_size": local, "cross_rank": rank // local,
            "cross_size": hosts, "sum": 10.0,
        }  # fmt: skip


def _free_port() -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return int(store.port)
