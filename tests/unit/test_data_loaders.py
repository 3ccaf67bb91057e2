"""`framework.data`: what becomes of a user's DataLoader."""

from __future__ import annotations

import inspect
import multiprocessing
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fleet import FakeTrainer
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage
from plans import make_plan, option
from reading import Ids, Stream
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data._utils.pin_memory import pin_memory as torch_pin_memory
from torch.utils.data.distributed import DistributedSampler

from framework.data import Loaders
from framework.errors import UsageError
from framework.ledger.numbering import Collate, Numbered
from framework.loaders import Loader
from framework.plan import RunPlan
from framework.plugin_manager import manager_for
from framework.streams import StreamLoader


def process(loader: object, plan: RunPlan, rank: int = 0, trainer: FakeTrainer | None = None) -> Any:
    return Loaders(plan, manager_for(plan), rank).process(loader, trainer or FakeTrainer())  # type: ignore[arg-type]


def ids(loader: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in loader]


def two(**settings: Any) -> RunPlan:
    components = {"sampler": option("sampler", "consistent")}
    return make_plan(2, strategy="ddp", **{"micro_batch_size": 2, "components": components, **settings})


def double(batch: list[Any]) -> Any:
    return {"id": 2 * torch.stack([row["id"] for row in batch])}


def note_worker(worker: int) -> None:
    """Leave a mark in a worker."""
    random.noted = worker  # type: ignore[attr-defined]


SET: dict[str, Any] = {
    "num_workers": 2,
    "collate_fn": double,
    "pin_memory": True,
    "timeout": 9.0,
    "worker_init_fn": note_worker,
    "multiprocessing_context": multiprocessing.get_context("fork"),
    "prefetch_factor": 3,
    "persistent_workers": True,
    "pin_memory_device": "cuda",
}
"""Arguments of a DataLoader that are the user's, with values that aren't torch's own."""

OURS = {
    "dataset": "the same, with numbers of samples around it",
    "batch_size": "follows from global_batch_size",
    "shuffle": "read by make_sampler",
    "sampler": "read by make_sampler",
    "batch_sampler": "refused",
    "drop_last": "said where it isn't what happens",
    "generator": "follows from seed, epoch and data rank",
    "in_order": "refused where it would say which samples make a step",
}
"""Those that say which samples a rank reads, and why each isn't taken over."""


@pytest.mark.parametrize("stage", [RunningStage.TRAINING, RunningStage.VALIDATING])
@pytest.mark.parametrize("dataset", [Ids(8), Stream(8)])
def test_every_argument_of_the_users_loader_is_kept(dataset: Any, stage: RunningStage) -> None:
    """Of the loader that users look at, and of the one behind it that reads."""
    arguments = {name: argument.default for name, argument in inspect.signature(DataLoader).parameters.items()}
    assert set(arguments) == {*SET, *OURS}, "torch has an argument more or less"
    assert not [name for name in SET if SET[name] == arguments[name]]
    ours = process(DataLoader(dataset, **SET), two(), 1, FakeTrainer(stage))
    assert type(ours) in (Loader, StreamLoader)
    for loader in {ours, ours._reader}:
        found = {name: getattr(loader, name) for name in SET}
        found["worker_init_fn"] = found["worker_init_fn"].user
        if isinstance(found["collate_fn"], Collate):
            found["collate_fn"] = found["collate_fn"].user
        assert found == SET
    assert ours.dataset is dataset


class InWorker(Ids):
    """The sample's index, and whether `note_worker` was called before."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"id": torch.tensor(index), "noted": torch.tensor(hasattr(random, "noted"))}


def test_what_the_user_set_acts() -> None:
    user = DataLoader(InWorker(8), num_workers=1, worker_init_fn=note_worker)
    assert [batch["noted"].tolist() for batch in process(user, two())] == [[True, True]] * 2
    ours = process(DataLoader(Ids(8), collate_fn=double), two(), rank=1)
    assert ids(ours) == [[4, 6], [12, 14]]
    assert len(ours) == 2


def test_pinning_leaves_numbers_and_reaches_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's thread does with what our loader reads; there is no device here."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self + 100)
    row: Numbered = (b"12345678", {"id": torch.tensor([1]), "more": [torch.tensor(2)]})
    numbers, batch = torch_pin_memory(row)
    assert (numbers, batch["id"].tolist()) == (b"12345678", [101])
    assert batch["more"][0].item() == 102


class Moved(torch.Tensor):
    """Notes how it is moved."""

    calls: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            cls.calls.append((args[1:], kwargs))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_batches_are_moved_without_waiting() -> None:
    """By Lightning, whom the strategy asks; a copy from pinned memory then goes on beside the step."""
    device = torch.device("meta")
    batch = {"id": torch.zeros(2).as_subclass(Moved)}
    moved = LightningModule()._apply_batch_transfer_handler(batch, device, 0)
    assert moved["id"].device == device
    assert Moved.calls == [((device,), {"non_blocking": True})]


def test_drop_last_that_is_not_read_is_said(caplog: pytest.LogCaptureFixture) -> None:
    process(DataLoader(Ids(8), batch_size=2, drop_last=True), two())
    assert not caplog.records, "four fit twice into eight"
    process(DataLoader(Ids(9), batch_size=2, drop_last=True), two())
    assert "type sampler.drop_last=true" in caplog.text
    caplog.clear()
    dropping = two(components={"sampler": option("sampler", "consistent", drop_last=True)})
    process(DataLoader(Ids(9), batch_size=2, drop_last=True), dropping)
    assert "sampler.drop_last" not in caplog.text


def test_shuffle_is_what_the_loader_asks_for() -> None:
    ranks = [ids(process(DataLoader(Ids(8), shuffle=True), two(), rank)) for rank in range(2)]
    read = [sample for batches in zip(*ranks, strict=True) for batch in batches for sample in batch]
    assert sorted(read) == list(range(8)) != read
    assert ids(process(DataLoader(Ids(8)), two(), 0)) == [[0, 1], [4, 5]]


def test_a_sampler_of_the_users_own_gives_the_order_alike_on_all_ranks() -> None:
    torch.manual_seed(1)

    def read(rank: int, sampler: Any) -> list[list[int]]:
        return ids(process(DataLoader(Ids(8), sampler=sampler), two(), rank))

    one = read(0, SubsetRandomSampler(range(8)))
    torch.manual_seed(2)  # ranks may have drawn different random numbers by now
    other, again = read(1, SubsetRandomSampler(range(8))), read(0, SubsetRandomSampler(range(8)))
    assert one == again
    assert sorted(sample for batch in one + other for sample in batch) == list(range(8))
    weighted = [read(rank, WeightedRandomSampler([1.0, 1, 0, 0, 0, 0, 0, 0], 8)) for rank in range(2)]
    assert {sample for batches in weighted for batch in batches for sample in batch} == {0, 1}


class Turning(SequentialSampler):
    """Begins one sample later in each epoch, which it is told as torch's DistributedSampler is."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(self.epoch + index) % 8 for index in range(8)])


def test_a_sampler_of_the_users_own_is_told_the_epoch() -> None:
    trainer = FakeTrainer()
    loader = process(DataLoader(Ids(8), sampler=Turning(Ids(8))), two(), trainer=trainer)
    assert ids(loader) == [[0, 1], [4, 5]]
    trainer.global_step = 2
    trainer.fit_loop.epoch_progress.current.processed = 3
    assert ids(loader) == [[3, 4], [7, 0]]


def test_epochs_follow_lightnings() -> None:
    trainer = FakeTrainer()
    loader = process(DataLoader(Ids(8), shuffle=True), two(), trainer=trainer)
    first = ids(loader)
    assert ids(loader) == first, "Lightning makes the first iterator twice"
    trainer.global_step = 2
    trainer.fit_loop.epoch_progress.current.processed = 1
    assert ids(loader) != first


def test_state_is_the_same_on_all_ranks_and_counts_steps_not_fetches() -> None:
    states = []
    for rank in range(2):
        trainer = FakeTrainer()
        loader = process(DataLoader(Ids(12), shuffle=True), two(), rank, trainer)
        rows = iter(loader)
        next(rows), next(rows)
        trainer.global_step = 1
        states.append(loader.state_dict())
    assert states[0] == states[1]
    assert (states[0]["epoch"], states[0]["consumed"]) == (0, 4)


def test_a_restored_position_holds_until_a_step_is_made() -> None:
    trainer = FakeTrainer()
    loader = process(DataLoader(Ids(12), shuffle=True), two(), trainer=trainer)
    whole = ids(loader)
    loader.load_state_dict(loader.state_dict() | {"consumed": 4, "batches": 1})
    assert ids(loader) == ids(loader) == whole[1:]
    trainer.global_step = 2
    assert ids(loader) == whole, "an epoch that Lightning begins anew"


@pytest.mark.parametrize(
    ("change", "words"),
    [({"size": 13}, "size 13.*size 12"), ({"seed": 5}, "type seed=5"), ({"order": "in order"}, "sampler.shuffle")],
)
def test_another_order_cannot_be_gone_on_with(change: dict[str, Any], words: str) -> None:
    loader = process(DataLoader(Ids(12), shuffle=True), two())
    iter(loader)
    with pytest.raises(UsageError, match=words):
        loader.load_state_dict(loader.state_dict() | change)


class Noisy(Dataset[Any]):
    """Samples that are augmented with every kind of random number."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, float]:
        return {"torch": torch.rand(()).item(), "numpy": np.random.rand(), "python": random.random()}


def noise(loader: Any) -> list[list[float]]:
    return [[*batch["torch"].tolist(), *batch["numpy"].tolist(), *batch["python"].tolist()] for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_of_samples_follow_from_seed_and_data_rank(workers: int) -> None:
    """Ranks that differ only on tp or pp change a sample alike, whatever else they have drawn."""

    def read(rank: int, seed: int) -> list[list[float]]:
        torch.manual_seed(seed)
        return noise(process(DataLoader(Noisy(), num_workers=workers), two(), rank))

    one, same, other = read(0, 1), read(0, 2), read(1, 1)
    assert one == same
    assert not {value for row in one for value in row} & {value for row in other for value in row}


def test_evaluating_leaves_the_process_random_numbers_alone() -> None:
    """In training every step seeds its own."""
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    noise(process(DataLoader(Noisy()), two(), trainer=FakeTrainer(RunningStage.VALIDATING)))
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


def test_evaluation_gives_fillers_only_where_a_forward_is_collective() -> None:
    lengths = {}
    for words, strategy, buffers in (("ddp", "ddp", 0), ("ddp, buffers", "ddp", 1), ("fsdp", "fsdp", 0)):
        plan = make_plan(2, strategy=strategy)
        trainer = FakeTrainer(RunningStage.VALIDATING, buffers)
        lengths[words] = [len(process(DataLoader(Ids(5)), plan, rank, trainer)) for rank in range(2)]
    assert lengths == {"ddp": [3, 2], "ddp, buffers": [3, 3], "fsdp": [3, 3]}


def test_evaluation_takes_any_batch_size_and_is_never_shuffled() -> None:
    trainer = FakeTrainer(RunningStage.VALIDATING)
    assert ids(process(DataLoader(Ids(8), batch_size=3, shuffle=True), two(), 0, trainer)) == [[0, 1, 2], [6]]


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter([])


REFUSED = [
    (lambda: DataLoader(Ids(8), batch_size=3), r"batch_size=3.*batches of 2.*global_batch_size=6"),
    (lambda: DataLoader(Ids(8), batch_size=None), "batch_size=None"),
    (lambda: DataLoader(Ids(8), batch_sampler=BatchSampler(SequentialSampler(Ids(8)), 2, False)), "batch_sampler"),
    (lambda: DataLoader(Ids(8), sampler=DistributedSampler(Ids(8), 2, 0)), "DistributedSampler"),
    (lambda: OwnLoader(Ids(8)), "OwnLoader, which can't be shared out over 2 data ranks"),
    (lambda: [torch.zeros(2)], "list, which can't be shared out"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_loaders_that_cannot_be_shared_out_are_refused(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        process(make(), two())


def test_several_training_loaders_are_refused_and_a_reloaded_one_is_not() -> None:
    plan = two()
    loaders = Loaders(plan, manager_for(plan), 0)
    trainer: Any = FakeTrainer()
    first: Any = loaders.process(DataLoader(Ids(8)), trainer)
    with pytest.raises(UsageError, match="several training loaders"):
        loaders.process(DataLoader(Ids(8)), trainer)
    iter(first)
    assert isinstance(loaders.process(DataLoader(Ids(8)), trainer), Loader)


def test_without_a_sampler() -> None:
    alone = make_plan(1, micro_batch_size=2, components={"sampler": None})
    user = DataLoader(Ids(8), batch_size=2)
    assert process(user, alone) is user
    with pytest.raises(UsageError, match=r"batch_size is 1, not the 2 samples"):
        process(DataLoader(Ids(8)), alone)
    for dataset in (Ids(8), Stream(8)):
        with pytest.raises(UsageError, match="sampler=consistent"):
            process(DataLoader(dataset, batch_size=2), two(components={"sampler": None}))


def stream(size: int, rank: int, plan: RunPlan) -> StreamLoader:
    trainer: Any = FakeTrainer()
    trainer.strategy = SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision)
    return process(DataLoader(Stream(size)), plan, rank, trainer)  # type: ignore[no-any-return]


def test_a_stream_is_shared_out_sample_by_sample_and_has_no_length() -> None:
    assert [ids(stream(8, rank, two())) for rank in range(2)] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    with pytest.raises(TypeError):
        len(stream(8, 0, two()))


class Shuffled(IterableDataset[dict[str, torch.Tensor]]):
    """A stream with a shuffle buffer, and one that shuffles all as soon as it is asked for an iterator."""

    def __init__(self, buffered: bool) -> None:
        self.buffered = buffered

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if not self.buffered:
            order = list(range(24))
            random.shuffle(order)
            return ({"id": torch.tensor(index)} for index in order)
        return self._through_a_buffer()

    def _through_a_buffer(self) -> Iterator[dict[str, torch.Tensor]]:
        kept = list(range(6))
        for index in range(6, 24):
            at = int(torch.randint(6, ()))
            yield {"id": torch.tensor(kept[at])}
            kept[at] = index
        yield from ({"id": torch.tensor(index)} for index in kept)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("buffered", [False, True])
def test_a_stream_that_shuffles_itself_is_shuffled_alike_on_all_ranks(buffered: bool, workers: int) -> None:
    read = []
    for rank in range(2):
        random.seed(rank), torch.manual_seed(rank)  # whatever the ranks have drawn before
        trainer: Any = FakeTrainer()
        trainer.strategy = SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision)
        read += ids(process(DataLoader(Shuffled(buffered), num_workers=workers), two(), rank, trainer))
    samples = [sample for batch in read for sample in batch]
    assert sorted(samples) == list(range(24))


class Divided(Stream):
    """A stream that divides itself among the workers of a loader, as torch's documentation has it."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = get_worker_info()
        for index in range(self.size) if info is None else range(info.id, self.size, info.num_workers):
            yield {"id": torch.tensor(index)}


@pytest.mark.parametrize("dataset", [Stream(23), Divided(23), Shuffled(True), Shuffled(False)])
@pytest.mark.parametrize("stage", [RunningStage.TRAINING, RunningStage.VALIDATING])
def test_workers_do_not_change_what_a_stream_gives(dataset: Any, stage: RunningStage) -> None:
    def read(workers: int, epochs: int = 2) -> list[list[list[int]]]:
        trainer: Any = FakeTrainer(stage)
        trainer.strategy = SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision)
        user: Any = DataLoader(dataset, num_workers=workers, persistent_workers=workers == 2)
        loader = process(user, two(), 1, trainer)
        found = []
        for epoch in range(epochs):
            trainer.fit_loop.epoch_progress.current.processed = epoch
            iter(loader)  # Lightning makes some iterators twice
            found.append(ids(loader))
        return found

    alone = read(0)
    assert alone == read(1) == read(2)
    assert (alone[0] != alone[1]) == (isinstance(dataset, Shuffled) and stage == RunningStage.TRAINING)


def test_a_stream_goes_on_under_another_mix() -> None:
    before = stream(24, 0, two())
    iter(before)
    before._where.trainer.global_step = 3  # type: ignore[misc]
    state = before.state_dict()
    assert state["consumed"] == 12
    plan = make_plan(1, accumulation=2, micro_batch_size=2)
    after = stream(24, 0, plan)
    after.load_state_dict(state)
    assert ids(after)[0] == [12, 13]
    assert after._where.trainer.fit_loop.epoch_loop.batch_progress.current.ready == 6
