"""`sampler=consistent` as arithmetic: which samples each rank reads, without any process."""

from __future__ import annotations

import random
from typing import Any

import pytest

from framework.counter import derive, permutation
from framework.errors import UsageError
from framework_plugins.sampler.batches import ConsistentBatches, split
from framework_plugins.sampler.consistent import Consistent


def ranks(size: int, *, step: int, batch: int, ranks: int, **more: Any) -> list[ConsistentBatches]:
    """All data ranks' batches of a set that is read in the order 100, 101, ..."""
    return [
        ConsistentBatches(
            order=lambda epoch: range(100, 100 + size),
            how="in order",
            seed=0,
            size=size,
            step=step,
            batch_size=batch,
            data_ranks=ranks,
            data_rank=rank,
            **more,
        )
        for rank in range(ranks)
    ]


def real_indices(plan: ConsistentBatches) -> list[list[int]]:
    """The batches of an iteration without fillers' samples."""
    first = plan.first()
    return [list(rows)[: plan.real(first + at)] for at, rows in enumerate(plan)]


def steps_of(plans: list[ConsistentBatches], accumulation: int) -> list[list[int]]:
    """Samples of each optimizer step over all ranks, in the order of the epoch."""
    batches = [real_indices(plan) for plan in plans]
    count = {len(one) for one in batches}
    assert len(count) == 1, f"ranks have {count} batches: the longer ones would wait for ever"
    (length,) = count
    steps = []
    for start in range(0, length, accumulation):
        window = range(start, min(start + accumulation, length))
        steps.append([sample for at in window for one in batches for sample in one[at]])
    return steps


def test_every_mix_makes_the_same_steps_without_overlap_or_gap() -> None:
    rng = random.Random(4)
    for _ in range(400):
        world, accumulation, batch = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 2, 3]), rng.choice([1, 2, 5])
        step = world * accumulation * batch
        size = rng.randrange(1, 4 * step + 2)
        alone = [list(range(100 + at, 100 + min(at + step, size))) for at in range(0, size, step)]
        assert steps_of(ranks(size, step=step, batch=batch, ranks=world), accumulation) == alone
        full = [one for one in alone if len(one) == step]
        assert steps_of(ranks(size, step=step, batch=batch, ranks=world, drop_last=True), accumulation) == full


def test_a_full_step_is_cut_into_equal_pieces_and_a_smaller_one_evenly() -> None:
    rng = random.Random(5)
    for _ in range(300):
        batch, world, accumulation = rng.randrange(1, 6), rng.randrange(1, 6), rng.randrange(1, 4)
        full = batch * world * accumulation
        samples = rng.randrange(1, full + 1)
        pieces = split(samples, batch, world)
        sizes = [stop - start for start, stop in pieces]
        assert len(pieces) % world == 0
        assert len(pieces) <= world * accumulation
        assert sum(sizes) == samples
        assert [start for start, _ in pieces[1:]] == [stop for _, stop in pieces[:-1]]
        assert max(sizes) <= batch
        assert max(sizes) - min(sizes) <= 1
        assert samples != full or set(sizes) == {batch}


def test_a_run_resumed_anywhere_under_any_mix_reads_the_rest() -> None:
    rng = random.Random(6)
    for _ in range(300):
        world, accumulation, batch = rng.choice([1, 2, 4]), rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
        step = world * accumulation * batch
        size = rng.randrange(1, 60)
        consumed = rng.randrange(0, size)
        plans = ranks(size, step=step, batch=batch, ranks=world)
        whole = len(plans[0])
        for plan in plans:
            plan.position = (0, consumed)
        steps = steps_of(plans, accumulation)
        assert [sample - 100 for one in steps for sample in one] == list(range(consumed, size))
        assert plans[0].first() % accumulation == 0
        assert plans[0].consumed(1) == min(consumed + step, size)
        assert plans[0].consumed(len(steps)) == size
        assert len(plans[0]) <= whole, "Lightning would end the epoch before its last batches"


@pytest.mark.parametrize("balanced", [True, False])
def test_evaluation_counts_each_sample_once(balanced: bool) -> None:
    rng = random.Random(7)
    for _ in range(300):
        batch, world, size = rng.randrange(1, 4), rng.randrange(1, 6), rng.randrange(1, 40)
        plans = ranks(size, step=batch * world, batch=batch, ranks=world, balanced=balanced)
        seen = [sample - 100 for plan in plans for rows in real_indices(plan) for sample in rows]
        assert sorted(seen) == list(range(size))
        lengths = {len(plan) for plan in plans}
        assert min(lengths) > 0
        assert len(lengths) == 1 or not balanced
        fillers = sum(plan.real(at) == 0 for plan in plans for at in range(len(plan)))
        assert balanced or fillers == max(0, world - size), "a filler only where a rank has nothing at all"


def test_p11_ten_samples_on_four_ranks_no_id_twice() -> None:
    plans = ranks(10, step=4, batch=1, ranks=4, balanced=False)
    assert sorted(sample for plan in plans for rows in plan for sample in rows) == list(range(100, 110))


def make(plan: Any, size: int, rank: int = 0, shuffle: bool = True, train: bool = True, **fields: Any) -> Any:
    return Consistent(**fields).make_sampler(
        dataset=range(size),
        plan=plan,
        data_rank=rank,
        shuffle=shuffle,
        train=train,
        batch_size=plan.batch.local_batch_size,
        balanced=True,
        order=None,
    )


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    from plans import make_plan

    plan = make_plan(2, strategy="ddp", micro_batch_size=2)
    one, other = make(plan, 50, 0), make(plan, 50, 1)
    reads = [[one.order(epoch), other.order(epoch)] for epoch in range(3)]
    assert all(list(a) == list(b) for a, b in reads)
    assert len({tuple(a) for a, _ in reads}) == 3, "each epoch has an order of its own"
    assert list(one.order(1)) == permutation(derive("order", plan.seed, 1), 50).tolist(), "as documented"
    assert list(make(plan, 50, seed=1).order(0)) != list(one.order(0))
    assert list(make(plan, 50, shuffle=False).order(1)) == list(range(50))
    assert list(make(plan, 50, train=False).order(1)) == list(range(50)), "evaluation is never shuffled"


@pytest.mark.parametrize(("size", "drop_last"), [(1, True), (0, None), (0, True)])
def test_p12_a_training_set_without_a_step_is_refused_with_its_numbers(size: int, drop_last: bool | None) -> None:
    from plans import make_plan

    plan = make_plan(2, strategy="ddp")
    with pytest.raises(UsageError, match=rf"{size} samples.*2 ranks.*global_batch_size=2"):
        make(plan, size, drop_last=drop_last)


def test_p12_fewer_samples_than_ranks_train_with_fillers() -> None:
    from plans import make_plan

    plan = make_plan(4, strategy="ddp")
    plans = [make(plan, 3, rank, shuffle=False) for rank in range(4)]
    assert [[list(rows) for rows in plan] for plan in plans] == [[[0]], [[1]], [[2]], [[0]]]
    assert [plan.real(0) for plan in plans] == [1, 1, 1, 0]


def test_a_pipeline_drops_the_partial_step_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    from plans import make_plan

    plan = make_plan(2, pp="gpipe", microbatches=2)
    with caplog.at_level("INFO"):
        assert make(plan, 7).usable == 6
    assert "last 1 of 7" in caplog.text
    assert make(make_plan(2, strategy="ddp"), 7).usable == 7
    problems = Consistent(drop_last=False).check_plan(plan)
    assert [problem.setting for problem in problems] == ["sampler.drop_last=false"]
    assert not Consistent(drop_last=False).check_plan(make_plan(2, strategy="ddp"))
