"""P08, P11 to P14 and P26 on the side of the data: who reads which samples, and how often they count."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import chain
from typing import Any

import pytest
from plans import make_plan, option
from reading import Ids, Notes, Planner, SplitReader, Stream, train, validate
from torch.utils.data import DataLoader, Dataset

from framework.testing import RanksError


def loader(dataset: Dataset[Any], **options: Any) -> partial[DataLoader[Any]]:
    return partial(DataLoader, dataset, **options)


def plan(world: int = 1, shuffle: bool | None = None, drop_last: bool | None = None, **settings: Any) -> Any:
    components = {
        "sampler": option("sampler", "consistent", shuffle=shuffle, drop_last=drop_last),
        "checkpoint": option("checkpoint", "dcp"),
    }
    return make_plan(world, components=components, **settings)


def steps_read(ranks: list[Notes], accumulation: int = 1) -> list[list[int]]:
    """Ids of each optimizer step over all ranks."""
    count = max(len(notes.read) for notes in ranks)
    batches = [[i for notes in ranks if at < len(notes.read) for i in notes.read[at]] for at in range(count)]
    return [flat(batches[at : at + accumulation]) for at in range(0, count, accumulation)]


def flat(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


@pytest.mark.parametrize(("strategy", "world"), [(None, 1), ("ddp", 2), ("fsdp", 2)])
@pytest.mark.parametrize(("size", "steps"), [(6, 2), (3, 1)])
def test_p08_a_partial_window_is_divided_by_its_true_size(
    pool: Any, strategy: str | None, world: int, size: int, steps: int
) -> None:
    settings = plan(world, strategy=strategy, accumulation=4 // world)
    for notes in pool.run(train, world, settings, loader(Ids(size)), process_group=False):
        windows = [list(range(size))[at : at + 4] for at in range(0, size, 4)]
        assert notes.done == steps
        assert notes.steps == pytest.approx([sum(window) / len(window) for window in windows])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_p11_validation_counts_each_sample_once(pool: Any, strategy: str) -> None:
    ranks = pool.run(validate, 2, plan(2, strategy=strategy), loader(Ids(5)), process_group=False)
    assert [notes.accuracy for notes in ranks] == [0.2, 0.2]  # padded with duplicates: 0.333
    ids = Counter(sample for notes in ranks for batch in notes.checked for sample in batch)
    if strategy == "ddp":
        assert ids == Counter(range(5))
    else:  # a forward gathers weights from all ranks: one filler keeps them company
        assert set(ids) == set(range(5))
        assert ids.total() == 6


def test_p11_the_same_in_one_process(pool: Any) -> None:
    (notes,) = pool.run(validate, 1, plan(), loader(Ids(5)), process_group=False)
    assert notes.accuracy == 0.2
    assert flat(notes.checked) == list(range(5))


@pytest.mark.parametrize(("size", "drop_last"), [(1, True), (0, None)])
def test_p12_no_step_at_all_is_refused(pool: Any, size: int, drop_last: bool | None) -> None:
    settings = plan(2, strategy="ddp", drop_last=drop_last)
    with pytest.raises(RanksError, match=rf"{size} samples.*2 ranks"):
        pool.run(train, 2, settings, loader(Ids(size)), process_group=False, timeout=40)


def test_p12_fewer_samples_than_ranks(pool: Any) -> None:
    ranks = pool.run(train, 4, plan(4, strategy="ddp"), loader(Ids(3)), process_group=False)
    assert [notes.done for notes in ranks] == [1] * 4
    for notes in ranks:
        assert notes.steps == pytest.approx([1.0])  # (0 + 1 + 2) / 3: the fourth rank's filler doesn't count


@pytest.mark.parametrize("workers", [0, 2])
def test_p12_an_uneven_stream_ends_on_all_ranks_together(pool: Any, workers: int) -> None:
    """A rank that has run out takes part with a filler, so nothing of the stream is left out."""
    settings = plan(2, strategy="ddp")
    ranks = pool.run(train, 2, settings, loader(Stream(5), num_workers=workers), process_group=False)
    assert steps_read(ranks) == [[0, 1], [2, 3], [4]]
    for notes in ranks:
        assert notes.steps == pytest.approx([0.5, 2.5, 4.0])
        assert notes.done == 3


def test_p12_an_uneven_stream_is_validated_whole(pool: Any) -> None:
    ranks = pool.run(validate, 2, plan(2, strategy="ddp"), loader(Stream(5)), process_group=False)
    assert [notes.accuracy for notes in ranks] == [0.2, 0.2]


RESUMES = [
    pytest.param((1, 6, 1, 0, 4, 5), id="one rank"),
    pytest.param((1, 6, 1, 2, 4, 5), id="two workers read ahead"),
    pytest.param((2, 12, 1, 0, 4, 5), id="two ranks"),
    pytest.param((1, 12, 2, 0, 8, 9), id="accumulation, end of a window"),
    pytest.param((1, 12, 2, 0, 7, 9), id="accumulation, saved in the middle of a window"),
]


@pytest.mark.parametrize("case", RESUMES)
def test_p13_a_resumed_epoch_reads_each_sample_once(pool: Any, tmp_path: Any, case: tuple[int, ...]) -> None:
    world, size, accumulation, workers, save_at, crash_after = case
    settings = plan(world, strategy="ddp" if world > 1 else None, accumulation=accumulation, seed=7)
    make = loader(Ids(size), shuffle=True, num_workers=workers)
    where = str(tmp_path / "saved")
    whole = pool.run(train, world, settings, make, process_group=False)
    before = pool.run(
        train, world, settings, make, save_at=save_at, save_to=where, crash_after=crash_after, process_group=False
    )
    after = pool.run(train, world, settings, make, ckpt_path=where, process_group=False)
    kept = save_at // accumulation
    joined = steps_read(before, accumulation)[:kept] + steps_read(after, accumulation)
    assert joined == steps_read(whole, accumulation)
    assert sorted(flat(joined)) == list(range(size)) != flat(joined)
    assert {notes.done for notes in after} == {size // (world * accumulation)}
    assert [notes.steps for notes in after] == [notes.steps[kept:] for notes in whole]


def test_p13_data_that_were_set_up_before_the_restore(pool: Any, tmp_path: Any) -> None:
    make, where = loader(Ids(6), shuffle=True), str(tmp_path / "saved")
    options = {"module": Planner, "process_group": False}
    (whole,) = pool.run(train, 1, plan(), make, **options)
    pool.run(train, 1, plan(), make, save_at=4, save_to=where, crash_after=5, **options)
    (after,) = pool.run(train, 1, plan(), make, ckpt_path=where, **options)
    assert after.read == whole.read[4:]
    assert after.done == 6


@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 1)), ((1, 1), (4, 1)), ((4, 1), (2, 2))])
def test_p13_under_another_mix(pool: Any, tmp_path: Any, before: tuple[int, int], after: tuple[int, int]) -> None:
    """Two epochs of 5 steps of 4 samples; saved in the second, after step 7."""
    where = str(tmp_path / "saved")

    def settings(mix: tuple[int, int]) -> Any:
        world, accumulation = mix
        return plan(
            world,
            strategy="fsdp" if world > 1 else None,
            accumulation=accumulation,
            micro_batch_size=4 // (world * accumulation),
            trainer={"max_epochs": 2},
        )

    make = loader(Ids(18), shuffle=True)
    whole = pool.run(train, 1, settings((1, 1)), make, process_group=False)
    # with accumulation (9 batches in epoch 0) in the middle of step 7, which is then made anew
    save_at = 12 if before[1] == 2 else 7
    pool.run(train, before[0], settings(before), make, save_at=save_at, save_to=where, process_group=False)
    resumed = pool.run(train, after[0], settings(after), make, ckpt_path=where, process_group=False)
    for notes in resumed:
        assert notes.done == 10
        assert len(notes.steps) == (4 if before[1] > 1 else 3)
        assert notes.steps == pytest.approx(whole[0].steps[-len(notes.steps) :])


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize(("before", "after", "save_at"), [(4, 8, 1), (4, 8, 3), (4, 8, 5), (8, 4, 1), (4, 12, 4)])
def test_p13_under_another_global_batch(
    pool: Any, tmp_path: Any, before: int, after: int, save_at: int, world: int, accumulation: int
) -> None:
    """The rest of an epoch of 24 samples is read, also where it makes no whole steps; and then a whole epoch."""
    where = str(tmp_path / "saved")

    def settings(batch: int, pieces: int = 1, **trainer: Any) -> Any:
        size = batch // (world * pieces)
        strategy = "ddp" if world > 1 else None
        return plan(world, strategy=strategy, accumulation=pieces, micro_batch_size=size, trainer=trainer)

    make = loader(Ids(24), shuffle=True)
    first = pool.run(train, world, settings(before), make, save_at=save_at, save_to=where, process_group=False)
    run = settings(after, accumulation, max_epochs=2)
    rest = pool.run(train, world, run, make, ckpt_path=where, process_group=False)
    consumed, read = save_at * before, flat(steps_read(rest))
    assert sorted(flat(steps_read(first)[:save_at]) + read[: 24 - consumed]) == list(range(24))
    assert sorted(read[24 - consumed :]) == list(range(24))
    assert {notes.done for notes in rest} == {save_at + -(-(24 - consumed) // after) + 24 // after}


def test_p14_only_data_ranks_share_the_samples(pool: Any) -> None:
    settings = plan(4, strategy="ddp", tp=2, micro_batch_size=2, trainer={"max_epochs": 1})
    assert settings.batch.global_batch_size == 4
    ranks = pool.run(train, 4, settings, loader(Ids(8)), module=SplitReader, process_group=False)
    assert ranks[0].read == ranks[1].read == [[0, 1], [4, 5]]
    assert ranks[2].read == ranks[3].read == [[2, 3], [6, 7]]


def test_p26_a_loader_with_another_batch_size_is_refused_with_both_numbers(pool: Any) -> None:
    settings = plan(micro_batch_size=3)
    with pytest.raises(RanksError, match=r"batch_size=8.*batches of 3.*global_batch_size=8"):
        pool.run(train, 1, settings, loader(Ids(16), batch_size=8), process_group=False)
