"""F42 to F48 of docs/found_cases.md where ranks have to meet: streams, evaluation, batches that say no size."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from lightning.pytorch.utilities import CombinedLoader
from plans import make_plan, option
from reading import (
    Halved,
    Ids,
    Part,
    Restless,
    Several,
    SideBySide,
    Stream,
    Uneven,
    Unseeded,
    rows,
    train,
    validate,
    validate_several,
)
from torch.utils.data import DataLoader

from framework.testing import RanksError


def plan(world: int = 1, drop_last: bool | None = None, **settings: Any) -> Any:
    components = {
        "sampler": option("sampler", "consistent", drop_last=drop_last),
        "checkpoint": option("checkpoint", "dcp"),
    }
    return make_plan(world, strategy="ddp" if world > 1 else None, components=components, **settings)


def loaders(kind: str, *sizes: int) -> Any:
    """Several validation loaders, called a and b."""
    named = {name: DataLoader(Ids(size)) for name, size in zip("ab", sizes, strict=True)}
    if kind == "side by side":
        return CombinedLoader(named, "max_size_cycle")
    return named if kind == "dict" else list(named.values())


def test_f42_the_end_of_a_stream_is_the_same_on_any_number_of_ranks(pool: Any, tmp_path: Any) -> None:
    make, where = partial(DataLoader, Stream(9)), str(tmp_path / "saved")
    (alone,) = pool.run(train, 1, plan(micro_batch_size=4), make, process_group=False)
    assert alone.steps == pytest.approx([1.5, 5.5, 8.0])
    settings = plan(4)
    whole = pool.run(train, 4, settings, make, save_at=2, save_to=where, process_group=False)
    rest = pool.run(train, 4, settings, make, ckpt_path=where, process_group=False)
    for notes, after in zip(whole, rest, strict=True):
        assert notes.steps == pytest.approx(alone.steps)
        assert after.steps == pytest.approx([8.0]), "three ranks have had no batch yet that could be their filler"
        assert notes.done == after.done == 3
    dropped = pool.run(train, 2, plan(2, drop_last=True, accumulation=2), make, process_group=False)
    assert [notes.steps for notes in dropped] == [pytest.approx([1.5, 5.5])] * 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(DataLoader, Halved(8)), "The stream begins with another sample on rank 1 than on rank 0"),
        (partial(DataLoader, Uneven(8)), "data of rank 1 has 9 samples, and 8 samples on rank 0"),
        (partial(DataLoader, Ids(8), sampler=Unseeded()), "data of rank 1 has another order"),
        (partial(DataLoader, Part(8)), "Sample 0 of Part is another on rank 1 than on rank 0"),
        (partial(DataLoader, Part(8), num_workers=1), "Sample 0 of Part is another on rank 1 than on rank 0"),
    ],
    ids=["a stream cut by rank", "another size", "another order", "cut by rank", "cut by rank, read by workers"],
)
def test_f44_data_that_differ_between_ranks_are_refused(pool: Any, make: Any, words: str) -> None:
    with pytest.raises(RanksError, match=words):
        pool.run(train, 2, plan(2), make, process_group=False, timeout=60)


def test_f44_samples_that_are_never_twice_the_same_are_no_others_on_other_ranks(pool: Any) -> None:
    for notes in pool.run(train, 2, plan(2), partial(DataLoader, Restless(8)), process_group=False):
        assert notes.done == 4


@pytest.mark.parametrize("kind", ["dict", "list"])
@pytest.mark.parametrize("world", [1, 2])
def test_f47_each_validation_loader_has_a_name_of_its_own(pool: Any, kind: str, world: int) -> None:
    fitted = partial(DataLoader, Ids(2))
    make = partial(loaders, kind, 3, 9)
    for found in pool.run(validate_several, world, plan(world), make, Several, first=fitted, process_group=False):
        assert found["mean/dataloader_idx_0"] == pytest.approx(1.0)
        assert found["mean/dataloader_idx_1"] == pytest.approx(4.0)


def test_f47_loaders_that_are_read_side_by_side(pool: Any) -> None:
    make = partial(loaders, "side by side", 2, 4)
    (found,) = pool.run(validate_several, 1, plan(), make, SideBySide, process_group=False)
    assert found["mean"] == pytest.approx(1.5)
    with pytest.raises(RanksError, match=r"side by side.*over 2 data ranks"):
        pool.run(validate_several, 2, plan(2), make, SideBySide, process_group=False, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_f48_samples_count_alike_in_batches_of_any_class(pool: Any, stream: bool, world: int) -> None:
    """Three samples in batches of two and one, whose loss would be 1.25 if batches counted alike."""
    make = partial(DataLoader, Stream(3) if stream else Ids(3), collate_fn=rows)
    settings = plan(world, micro_batch_size=2, accumulation=2 // world)
    for notes in pool.run(train, world, settings, make, process_group=False):
        assert notes.steps == pytest.approx([1.0])
    for notes in pool.run(validate, world, settings, make, process_group=False):
        assert notes.accuracy == pytest.approx(1 / 3)
