"""Cases F40 to F53 of docs/found_cases.md as far as one process shows them: data that were silently wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fleet import FakeTrainer, Fleet
from lightning.pytorch.trainer.states import RunningStage
from plans import make_plan, option
from reading import Ids, Stream
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler, WeightedRandomSampler

from framework.checkpoint_files import commit, step_name
from framework.data import Loaders
from framework.errors import UsageError
from framework.failures import failure_of
from framework.ledger.history import check, history, read
from framework.ledger.numbering import checksum
from framework.plan import RunPlan
from framework.plugin_manager import manager_for
from framework.summary import brief


def plan(ranks: int = 1, size: int = 4, accumulation: int = 1, global_batch: int = 0, **sampler: Any) -> RunPlan:
    """A plan of `global_batch` samples a step, or of `size` a micro-batch."""
    size = global_batch // (ranks * accumulation) or size
    return make_plan(
        ranks,
        strategy="ddp" if ranks > 1 else None,
        micro_batch_size=size,
        accumulation=accumulation,
        components={"sampler": option("sampler", "consistent", **sampler)},
    )


def process(loader: object, plan: RunPlan, rank: int = 0, stage: RunningStage = RunningStage.TRAINING) -> Any:
    trainer: Any = FakeTrainer(stage)
    trainer.strategy = SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision)
    return Loaders(plan, manager_for(plan), rank).process(loader, trainer)


def ids(loader: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in loader]


class Noisy(Dataset[dict[str, Any]]):
    """Samples that are augmented with every kind of random number."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = [torch.rand(()).item(), np.random.rand(), random.random()]
        return {"id": index, "noise": torch.tensor(noise, dtype=torch.float64)}


STAGES = [RunningStage.TRAINING, RunningStage.VALIDATING]


@pytest.mark.parametrize("stage", STAGES)
def test_f40_a_sample_is_augmented_alike_under_every_mix_and_after_a_restart(stage: RunningStage) -> None:
    def noise(ranks: int, accumulation: int, workers: int, consumed: int = 0) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for rank in range(ranks):
            torch.manual_seed(rank), random.seed(rank)  # whatever the ranks have drawn before
            user = DataLoader(Noisy(), shuffle=True, num_workers=workers)
            loader = process(user, plan(ranks, accumulation=accumulation, global_batch=8), rank, stage)
            if consumed:
                loader.load_state_dict(process_state | {"consumed": consumed})
            for batch in loader:
                found |= dict(zip(batch["id"].tolist(), batch["noise"].tolist(), strict=True))
        return found

    whole = process(DataLoader(Noisy(), shuffle=True), plan(global_batch=8), 0, stage)
    iter(whole)
    process_state = whole.state_dict()
    alone = noise(1, 1, 0)
    assert sorted(alone) == list(range(16))
    assert len({value for row in alone.values() for value in row}) == 48
    for ranks, accumulation, workers in ((2, 1, 0), (4, 1, 0), (1, 4, 0), (1, 1, 2), (2, 2, 1)):
        assert noise(ranks, accumulation, workers) == alone
    if stage == RunningStage.TRAINING:
        rest = noise(2, 1, 2, consumed=8)
        assert len(rest) == 8
        assert rest == {index: alone[index] for index in rest}


def test_f40_draws_of_a_sample_that_comes_twice_differ() -> None:
    loader = process(DataLoader(Noisy(), sampler=WeightedRandomSampler([1.0, *[0.0] * 15], 8)), plan())
    assert len({row[0] for batch in loader for row in batch["noise"].tolist()}) == 8


@pytest.mark.parametrize(("before", "now"), [(4, 8), (8, 4), (4, 12)])
@pytest.mark.parametrize("workers", [0, 2])
def test_f41_a_stream_goes_on_under_another_global_batch(before: int, now: int, workers: int) -> None:
    first = process(DataLoader(Stream(48), num_workers=workers), plan(global_batch=before))
    iter(first)
    first._where.trainer.global_step = 3
    state = first.state_dict()
    ranks = []
    for rank in range(2):
        loader = process(DataLoader(Stream(48), num_workers=workers), plan(2, global_batch=now), rank)
        loader.load_state_dict(state)
        ranks.append(ids(loader))
    assert sorted(index for batches in ranks for batch in batches for index in batch) == list(range(3 * before, 48))


class Batches(IterableDataset[dict[str, torch.Tensor]]):
    """A stream of whole batches."""

    def __init__(self, size: int = 2) -> None:
        self.size = size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return ({"id": torch.arange(first, first + self.size)} for first in range(0, 12 * self.size, self.size))


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_f43_a_stream_of_batches_comes_once_with_any_number_of_workers(workers: int, stage: RunningStage) -> None:
    user: Any = DataLoader(Batches(), batch_size=None, num_workers=workers)
    assert ids(process(user, plan(size=2), 0, stage)) == [[at, at + 1] for at in range(0, 24, 2)]


def test_f43_a_stream_of_batches_goes_on_under_other_ranks() -> None:
    before: Any = process(DataLoader(Batches(), batch_size=None), plan(2, size=2))  # type: ignore[arg-type]
    iter(before)
    before._where.trainer.global_step = 2
    after: Any = process(DataLoader(Batches(), batch_size=None, num_workers=1), plan(1, size=2))  # type: ignore[arg-type]
    after.load_state_dict(before.state_dict())
    assert ids(after)[0] == [8, 9], "two ranks have read two batches each"


def test_f43_batches_of_another_size_are_refused() -> None:
    user: Any = DataLoader(Batches(3), batch_size=None)
    with pytest.raises(UsageError, match=r"batches of 3 samples.*makes them 2: type global_batch_size=6"):
        next(iter(process(user, plan(2, size=2))))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_f42_whole_steps_of_a_stream(accumulation: int) -> None:
    settings = plan(accumulation=accumulation, global_batch=4, drop_last=True)
    assert [index for batch in ids(process(DataLoader(Stream(11)), settings)) for index in batch] == list(range(8))


def test_f42_an_empty_stream_is_refused() -> None:
    with pytest.raises(UsageError, match="too few samples"):
        list(process(DataLoader(Stream(0)), plan()))


def weighted(*weights: float) -> Any:
    return DataLoader(Ids(8), sampler=WeightedRandomSampler([*weights, *[1.0] * (8 - len(weights))], 8))


def test_f45_another_sampler_is_refused_in_the_middle_of_its_epoch() -> None:
    before = process(weighted(9.0), plan())
    iter(before)
    before._where.trainer.global_step = 1
    state = before.state_dict()
    process(weighted(9.0), plan()).load_state_dict(state)
    with pytest.raises(UsageError, match="another order for epoch 0"):
        process(weighted(1.0, 9.0), plan()).load_state_dict(state)


class Growing(SequentialSampler):
    """Longer in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(4 + self.epoch))


def test_f45_an_epoch_of_another_length_is_refused() -> None:
    loader = process(DataLoader(Ids(8), sampler=Growing(Ids(8))), plan())
    assert ids(loader) == [[0, 1, 2, 3]]
    loader._where.trainer.global_step = loader._where.trainer.fit_loop.epoch_progress.current.processed = 1
    with pytest.raises(UsageError, match="5 samples in epoch 1 and 4 in epoch 0"):
        ids(loader)


class Keys(Sampler[Any]):
    """Tells samples apart by names."""

    def __iter__(self) -> Iterator[Any]:
        return iter(["a", "b"])


def test_f45_what_is_no_number_is_refused() -> None:
    with pytest.raises(UsageError, match="gives 'a', but samples are told apart by their numbers"):
        process(DataLoader(Ids(8), sampler=Keys()), plan())


def test_f46_batches_out_of_order_are_refused() -> None:
    user = DataLoader(Ids(8), num_workers=2, in_order=False)
    with pytest.raises(UsageError, match="leave in_order out"):
        process(user, plan())
    assert process(user, plan(), 0, RunningStage.VALIDATING).in_order is False, "alone it changes no result"
    with pytest.raises(UsageError, match="validation loader has in_order=False"):
        process(user, plan(2), 0, RunningStage.VALIDATING)


class Own(DataLoader[Any]):
    """Yields the loader's batches in a way of its own."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter([])


def test_f49_a_loader_of_the_users_own_on_one_rank() -> None:
    with pytest.raises(UsageError, match=r"is a Own.*batch_size is 8, not the 4.*type global_batch_size=8"):
        process(Own(Ids(8), batch_size=8), plan())
    user = Own(Ids(8), batch_size=4)
    assert process(user, plan()) is user
    trainer: Any = FakeTrainer()
    trainer.ckpt_path = "some/checkpoint"
    trainer.fit_loop.epoch_loop.batch_progress.current.ready = 1
    settings = plan()
    with pytest.raises(UsageError, match="can't go on in the middle of an epoch"):
        Loaders(settings, manager_for(settings), 0).process(user, trainer)
    user.state_dict = user.load_state_dict = dict  # type: ignore[attr-defined]
    assert Loaders(settings, manager_for(settings), 0).process(user, trainer) is user


def test_f50_torchdatas_loader_is_shared_out_as_torchs() -> None:
    """As if torchdata were installed: what matters is where its classes say they come from."""
    home = "torchdata.stateful_dataloader"

    def rows(self: Any) -> Any:
        raise AssertionError("its own position isn't used")

    rows.__module__ = f"{home}.stateful_dataloader"
    stateful = type("StatefulDataLoader", (DataLoader,), {"__iter__": rows, "__module__": rows.__module__})
    random_sampler = type("RandomSampler", (Growing,), {"__module__": f"{home}.sampler"})
    sampler = random_sampler(Ids(8))
    sampler.replacement, sampler.num_samples = False, 8
    read = [ids(process(stateful(Ids(8), sampler=sampler), plan(2, size=2), rank)) for rank in range(2)]
    assert sorted(index for batches in read for batch in batches for index in batch) == list(range(8))
    assert process(stateful(Ids(8), sampler=sampler), plan()).order()["order"] == "shuffled"


class Torn(Ids):
    """One of its files is broken."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 5:
            raise KeyError("no picture")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_f51_a_sample_that_cannot_be_read_is_named(workers: int, stage: RunningStage) -> None:
    with pytest.raises(KeyError) as raised:
        list(process(DataLoader(Torn(8), num_workers=workers), plan(), 0, stage))
    told = brief(failure_of(0, raised.value).message)
    assert told.endswith("KeyError: 'no picture' Sample 5 of Torn was being read.")
    assert brief("ValueError: a\nb") == "ValueError: a"


@pytest.mark.parametrize(("setting", "typed"), [({"shuffle": True}, "shuffle=true"), ({"seed": 3}, "seed=3")])
def test_f52_a_setting_that_a_sampler_of_ones_own_overrules_is_refused(setting: dict[str, Any], typed: str) -> None:
    with pytest.raises(UsageError, match=rf"sampler.{typed}, but the training loader has a sampler of its own"):
        process(weighted(), plan(**setting))
    process(weighted(), plan(**setting), 0, RunningStage.VALIDATING)
    with pytest.raises(UsageError, match=rf"sampler.{typed}, but the training data is a stream"):
        process(DataLoader(Stream(8)), plan(**setting))
    process(DataLoader(Stream(8)), plan(**setting), 0, RunningStage.VALIDATING)


def lines(path: Path, keep: slice) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[keep]))


def without(path: Path, key: str) -> None:
    head, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps({name: value for name, value in json.loads(head).items() if name != key}) + "\n" + rest)


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.write_text(""), "no file in .* has a whole line"),
    (lambda path: path.write_text('{"format": 1'), "no file in .* has a whole line"),
    (lambda path: path.with_name("run-0-00000 (copy).jsonl").write_text(""), r"\(copy\).jsonl is no <run>-<attempt>"),
    (lambda path: path.with_name("notes.jsonl").write_text("hi"), "notes.jsonl is no <run>-<attempt>"),
    (lambda path: without(path, "size"), r"Line 1 of .* can't be read: KeyError\('size'\)"),
    (
        lambda path: path.write_text(path.read_text() + path.read_text().splitlines()[-1] + "\n"),
        "step 4 is there twice",
    ),
]


@pytest.mark.parametrize(("edit", "words"), BROKEN)
def test_f53_a_ledger_that_cannot_be_read_is_one_sentence(edit: Any, words: str, tmp_path: Path) -> None:
    ledger_of_four_steps(tmp_path)
    edit(tmp_path / "ledger" / "run-0-00000.jsonl")
    with pytest.raises(UsageError, match=words):
        read(tmp_path)


def ledger_of_four_steps(run_dir: Path) -> None:
    fleet = Fleet(run_dir, lambda: DataLoader(Ids(48)), 1)
    for _ in range(4):
        fleet.step()
        fleet.settle()
    fleet.kill()


def test_f53_a_ledger_that_ends_before_the_newest_checkpoint_proves_nothing(tmp_path: Path) -> None:
    ledger_of_four_steps(tmp_path)
    temporary, final = tmp_path / "t", tmp_path / "checkpoints" / step_name(4)
    temporary.mkdir()
    final.parent.mkdir()
    commit(temporary, final, 4, 1)

    def findings() -> list[str]:
        story, found = history(tmp_path, read(tmp_path))
        return [finding.text for finding in (*found, *check(story))]

    assert findings() == []
    lines(tmp_path / "ledger" / "run-0-00000.jsonl", slice(-1))
    (said,) = findings()
    assert "ends at step 3" in said
    assert "saved at step 4" in said


def test_checksums_tell_samples_apart() -> None:
    samples: list[Any] = [
        torch.tensor(1), torch.tensor(2), torch.tensor([1.0], dtype=torch.bfloat16), np.arange(3), "a", b"a", 1, 1.5,
        {"x": (torch.ones(2), ["b"])}, {"x": (torch.ones(2), ["c"])},
    ]  # fmt: skip
    assert len({checksum(sample) for sample in samples}) == len(samples)
    assert checksum(samples[-1]) == checksum({"x": (torch.ones(2), ["c"])})
