"""`framework.ledger`: numbers travel with samples; what records prove over restarts, resizes and planted faults."""

from __future__ import annotations

import functools
import json
import os
import random
import tempfile
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fleet import Fleet, State
from reading import Ids, Stream
from torch.utils.data import ConcatDataset, DataLoader, Subset, WeightedRandomSampler

from framework import cli
from framework.data import Loaders
from framework.errors import EXIT_OK, EXIT_RUN_FAILED, EXIT_USAGE, UsageError
from framework.ledger.chain import Stretch
from framework.ledger.history import _samples, check, first_difference, history, read
from framework.ledger.writer import narrowed
from framework_plugins.data.mixture import Draws, Mix
from framework_plugins.data.packed import Packs
from framework_plugins.data.shards import Shards, find
from framework_plugins.data.windows import Windows, as_it_is


def packed() -> DataLoader[Any]:
    """39 windows of 6 tokens, of documents of 1 to 9 tokens."""
    ends = np.cumsum([1 + size * 5 % 9 for size in range(48)])
    return DataLoader(Packs(np.arange(ends[-1]), 6, ends, True), shuffle=True, collate_fn=as_it_is)


def mixture() -> DataLoader[Any]:
    """Epochs of 29 draws, in which the smaller source starts over every two or three steps."""
    mix = Mix({"a": Ids(7), "b": Ids(23)}, {"a": 2, "b": 3}, seed=1, samples=29)
    return DataLoader(mix, sampler=Draws(29))


def shards() -> DataLoader[Any]:
    """47 windows of 4 tokens in files of 1 to 40 tokens."""
    return DataLoader(Windows(Shards(shard_folder(), find(shard_folder())), 4, 4), shuffle=True, collate_fn=as_it_is)


@functools.cache
def shard_folder() -> Path:
    folder = Path(tempfile.mkdtemp())
    for number, tokens in enumerate(np.split(np.arange(190), [40, 41, 60, 100, 130])):
        np.save(folder / f"{number}.npy", tokens)
    return folder


SOURCES: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(Ids(50), shuffle=True),
    "in order": lambda: DataLoader(Ids(43)),
    "two workers": lambda: DataLoader(Ids(24), shuffle=True, num_workers=2),
    "stream": lambda: DataLoader(Stream(48)),
    "shards": lambda: DataLoader(ConcatDataset([Ids(20), Ids(5), Ids(19)]), shuffle=True),
    "read together": lambda: DataLoader(Subset(Ids(60), range(7, 49)), shuffle=True),
    "packed": packed,
    "mixture": mixture,
    "shard files": shards,
    "weighted": lambda: DataLoader(Ids(40), sampler=WeightedRandomSampler([1.0 + i % 3 for i in range(40)], 40)),
}
FAST = [name for name in SOURCES if name != "two workers"]
SCHEDULES = 200


def train(folder: Path, source: str, steps: int, **how: Any) -> Fleet:
    """Make `steps` optimizer steps without a disturbance."""
    fleet = Fleet(folder, SOURCES[source], **{"ranks": 2, **how})
    while steps:
        steps -= fleet.step()
    fleet.settle(), fleet.kill()
    return fleet


def findings(*runs: Path) -> list[str]:
    """Return what is wrong with the last run's history, which may have begun in the others."""
    segments = [segment for run in runs for segment in read(run)]
    story, found = history(runs[-1], segments)
    return [f"step {one.step}: {one.text}" for one in (*found, *check(story))]


def schedule(folder: Path, source: str, chance: random.Random, steps: int) -> None:
    """Make `steps` steps with kills, resizes and restarts from checkpoints of a while ago."""
    state: State | None = None
    launch, step = 0, 0
    while step < steps:
        ranks = chance.choice([1, 2, 4])
        fleet = Fleet(folder, SOURCES[source], ranks, chance.choice([1, 2]), state=state, run_id=f"launch{launch}")
        step, launch = 0 if state is None else state.step, launch + 1
        until = step + chance.randint(0, 9)
        while step < steps and step < until:
            step += fleet.step()
            if chance.random() < 0.3:
                state = fleet.save()
        if chance.random() < 0.5:
            fleet.settle()
        if step >= steps:
            fleet.settle()
        fleet.kill()


@pytest.mark.parametrize("source", SOURCES)
def test_each_source_leaves_a_whole_history(tmp_path: Path, source: str) -> None:
    train(tmp_path, source, 14)
    assert findings(tmp_path) == []
    story, _ = history(tmp_path, read(tmp_path))
    assert [step for _, step in story.steps] == [*range(1, 15)]


@pytest.mark.parametrize("source", FAST)
def test_the_chain_is_the_same_under_any_cut(tmp_path: Path, source: str) -> None:
    links = set()
    for number, (ranks, accumulation) in enumerate([(1, 1), (2, 1), (4, 1), (1, 4), (2, 2)]):
        fleet = train(tmp_path / str(number), source, 13, ranks=ranks, accumulation=accumulation)
        links |= {rank.ledger.chain for rank in fleet.ranks}
    assert len(links) == 1


@pytest.mark.parametrize("source", ["shuffled", "stream", "packed", "mixture", "shard files"])
def test_a_run_goes_on_with_other_workers_in_the_middle_of_an_epoch(tmp_path: Path, source: str) -> None:
    def with_workers(number: int) -> DataLoader[Any]:
        user = SOURCES[source]()
        sampler = {} if source == "stream" else {"sampler": user.sampler}
        return DataLoader(user.dataset, collate_fn=user.collate_fn, num_workers=number, **sampler)

    state, ran = None, tmp_path / "disturbed"
    for attempt, (ranks, accumulation, workers) in enumerate([(2, 1, 2), (1, 2, 0), (4, 2, 1), (2, 2, 2)]):
        fleet = Fleet(ran, lambda n=workers: with_workers(n), ranks, accumulation, state=state, run_id=f"{attempt}")  # type: ignore[misc]
        for _ in range(2):
            while not fleet.step():
                pass
        state = fleet.save()
        while not fleet.step():  # which the kill takes
            pass
        fleet.kill()
    assert findings(ran) == []
    train(tmp_path / "whole", source, 8)
    stories = [history(folder, read(folder))[0] for folder in (ran, tmp_path / "whole")]
    assert len(stories[0].steps) == len(stories[1].steps) == 8
    assert first_difference(*stories) is None


def test_the_draws_of_a_mixture_are_trained_one_after_the_other_over_all_epochs(tmp_path: Path) -> None:
    """What a sampler of one's own gives can't be computed again by the ledger: here it is known."""
    train(tmp_path, "mixture", 14)
    story, _ = history(tmp_path, read(tmp_path))
    trained = [number for segment, step in story.steps for number in _samples(segment, step)]
    assert trained == list(range(len(trained)))
    assert len(trained) > 3 * 29


def test_random_schedules_of_kills_and_resizes(tmp_path: Path) -> None:
    for seed in range(SCHEDULES):
        one_schedule(tmp_path / str(seed), seed)


@pytest.mark.campaign
def test_a_thousand_schedules(tmp_path: Path) -> None:
    for seed in range(SCHEDULES, 1000):
        one_schedule(tmp_path / str(seed), seed)


def one_schedule(folder: Path, seed: int) -> None:
    """Hold a disturbed run against an undisturbed one."""
    chance = random.Random(seed)
    source = chance.choice(FAST)
    steps = chance.randint(5, 24)
    schedule(folder / "disturbed", source, chance, steps)
    assert findings(folder / "disturbed") == [], (seed, source)
    train(folder / "whole", source, steps)
    stories = [history(folder / name, read(folder / name))[0] for name in ("disturbed", "whole")]
    assert len(stories[0].steps) == len(stories[1].steps) == steps
    assert first_difference(*stories) is None, (seed, source)


# -- planted faults ----------------------------------------------------------------------------------------------


def meddled(folder: Path, source: str, meddle: Callable[[Fleet, int, list[Any]], list[Any]]) -> list[str]:
    """Make ten steps, `meddle(fleet, step, rows)` standing between loader and training; return the findings."""
    fleet = Fleet(folder, SOURCES[source], 2)
    for step in range(1, 11):
        fleet.step(lambda rows, step=step: meddle(fleet, step, rows))  # type: ignore[misc]
    fleet.settle(), fleet.kill()
    return findings(folder)


def test_a_dropped_batch_is_found(tmp_path: Path) -> None:
    def drop(fleet: Fleet, step: int, rows: list[Any]) -> list[Any]:
        return [rank.fetch() for rank in fleet.ranks] if step == 3 else rows

    (first, *_) = meddled(tmp_path, "in order", drop)
    assert first == "step 3: data rank 0 trained sample 24 where it was the turn of sample 16 (place 16 of epoch 0)"


def test_a_repeated_batch_is_found(tmp_path: Path) -> None:
    kept: list[Any] = []

    def repeat(fleet: Fleet, step: int, rows: list[Any]) -> list[Any]:
        kept[:] = kept if step == 4 else rows
        return kept

    found = meddled(tmp_path, "in order", repeat)
    assert found[0].startswith("step 4: data rank 0 trained sample 16 where it was the turn of sample 24")
    assert found[1] == "step 4: sample 16 was trained before in epoch 0"


def test_two_swapped_ranks_are_found(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, SOURCES["shuffled"], 2)
    fleet.step()
    one, other = fleet.ranks
    one.rows, other.rows, one.ahead, other.ahead = other.rows, one.rows, other.ahead, one.ahead
    one.loaders.tray, other.loaders.tray = other.loaders.tray, one.loaders.tray
    fleet.step()
    fleet.settle(), fleet.kill()
    (found,) = findings(tmp_path)
    assert found.startswith("step 2: data rank 0 trained sample ")


def test_a_restart_from_the_wrong_position_is_found(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, SOURCES["shuffled"], 2)
    fleet.step(), fleet.step()
    state = fleet.save()
    fleet.settle(), fleet.kill()
    state.loader["consumed"] -= 8
    again = Fleet(tmp_path, SOURCES["shuffled"], 2, state=state, run_id="again")
    again.step()
    again.settle(), again.kill()
    found = findings(tmp_path)
    assert "step 3: it begins at sample 8 of epoch 0, but the step before ended at sample 16 of epoch 0" in found
    assert any("was trained before in epoch 0" in line for line in found)


def rewrite(path: Path, edit: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the objects of a ledger's file; the first one is its head."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    edit(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def by_steps(rows: list[dict[str, Any]], typecode: str = "i") -> None:
    """Make of each stretch a line for each step, as it was before format 3; before format 2 numbers were int64."""
    head, *stretches = rows
    rows[:] = [{**head, "format": 2 if typecode == "i" else 1}]
    for row in stretches:
        numbers = array("i", b64decode(row["samples"]))
        size = len(numbers) // len(row["at"])
        for number, (at, link) in enumerate(zip(row["at"], row["chain"], strict=True)):
            own = array(typecode, numbers[size * number : size * (number + 1)])
            samples = b64encode(own.tobytes()).decode()
            rows.append({**row, "step": row["step"] + number, "at": at, "chain": link, "samples": samples})


def edited(folder: Path, edit: Callable[[list[dict[str, Any]]], None]) -> list[str]:
    """Make five steps, have rank 1 write a line for each, change them, return the findings."""
    train(folder, "shuffled", 5)
    (path,) = (folder / "ledger").glob("*-00001.jsonl")
    rewrite(path, by_steps)
    rewrite(path, edit)
    return findings(folder)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda rows: rows[2].update(samples=rows[3]["samples"]), "step 2: the chain is broken"),
        (lambda rows: rows[2].update(chain="ab"), "step 2: the chain is broken"),
        (lambda rows: rows.pop(2), "step 2: data rank 1 wrote nothing about this step"),
        (lambda rows: rows[3].update(at=0), ""),  # the first rank's counts
        (lambda rows: rows[3].update(places=[[0, 4, 1]]), "step 3: place 0 was filled twice"),
        (lambda rows: rows[3].update(places=[[5, 4, 1]]), "step 3: place 4 of the step is empty"),
    ],
)
def test_what_was_edited_is_found(tmp_path: Path, edit: Any, said: str) -> None:
    found = edited(tmp_path, edit)
    assert any(line.startswith(said) for line in found) if said else not found


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda row: row["chain"].reverse(), "step 1: the chain is broken"),
        (lambda row: row.update(places=[[0, 4, 1]]), "step 1: place 0 was filled twice"),
        (lambda row: row.update(step=2), "step 1: data rank 1 wrote nothing about this step"),
        (lambda row: row["at"].pop(), "Line 2 of .* can't be read: ValueError"),
        (lambda row: row["chain"].pop(), "Line 2 of .* can't be read: ValueError"),
        (lambda row: row.update(places=[]), "Line 2 of .* can't be read: ValueError"),
    ],
)
def test_what_was_edited_in_a_stretch_is_found(tmp_path: Path, edit: Any, said: str) -> None:
    train(tmp_path, "shuffled", 5)
    (path,) = (tmp_path / "ledger").glob("*-00001.jsonl")
    rewrite(path, lambda rows: edit(rows[1]))
    if said.startswith("Line"):
        with pytest.raises(UsageError, match=said):
            read(tmp_path)
    else:
        assert findings(tmp_path)[0].startswith(said)


@pytest.mark.parametrize(("largest", "width"), [(2**31 - 1, 4), (2**31, 8)])
def test_numbers_take_four_bytes_where_all_fit(largest: int, width: int) -> None:
    """Both ways of writing give the numbers back; a stream of tokens may be longer than 2^31."""
    numbers = array("q", [0, 7, largest])
    found = narrowed(numbers.tobytes())
    assert (len(found), array({4: "i", 8: "q"}[width], found)) == (3 * width, numbers)


@pytest.mark.parametrize("typecode", ["q", "i"])
def test_a_ledger_of_formats_1_and_2_is_read(tmp_path: Path, typecode: str) -> None:
    train(tmp_path, "shuffled", 14)
    records = records_of(tmp_path)
    for path in (tmp_path / "ledger").glob("*.jsonl"):
        rewrite(path, lambda rows: by_steps(rows, typecode))
    assert findings(tmp_path) == []
    assert records_of(tmp_path) == records


def records_of(folder: Path) -> dict[int, Any]:
    (segment,) = read(folder)
    return segment.records


# -- stretches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("source", [*FAST, "of batches"])
def test_a_stretch_says_what_its_steps_would_say_one_by_one(
    tmp_path: Path, source: str, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, "of batches", lambda: DataLoader(Batches(20, 4 // accumulation), batch_size=None))
    lines = []
    for name in ("stretches", "steps"):
        train(tmp_path / name, source, 14, accumulation=accumulation)
        lines.append(len((tmp_path / name / "ledger" / "run-0-00000.jsonl").read_text().splitlines()))
        monkeypatch.setattr(Loaders, "_whole", lambda *_: 0)
    assert records_of(tmp_path / "stretches") == records_of(tmp_path / "steps")
    assert lines[1] == 1 + 14
    assert lines[0] <= 1 + 2 * 5, "of each epoch that was begun whole steps and the rest"


class Batches(Stream):
    """A stream of `size` batches of so many samples."""

    def __init__(self, size: int, samples: int) -> None:
        super().__init__(size)
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return ({"id": torch.full((self.samples,), number)} for number in range(self.size))


def test_a_stretch_ends_where_a_step_is_not_as_others(tmp_path: Path) -> None:
    """A batch that was left out, steps that trained nothing, and numbers of steps that jump."""
    fleet = Fleet(tmp_path, lambda: DataLoader(Ids(800)), 1)
    (rank,) = fleet.ranks
    for step in range(1, 21):
        if step == 6:
            next(rank.numbers), rank.fetch()
        if step == 15:
            rank.trainer.global_step += 1
            rank.ledger.batch_end(16)
            rank.trainer.global_step += 3
        fleet.step()
    fleet.settle(), fleet.kill()
    (records,) = records_of(tmp_path).values()
    assert list(records) == [*range(1, 15), 16, *range(19, 25)]
    trained = [array("q", record.samples).tolist() for record in records.values()]
    batches = [list(range(8 * n, 8 * n + 8)) for n in (*range(5), *range(6, 21))]
    assert trained == [*batches[:14], [], *batches[14:]]
    assert all(len(record.samples) == 8 * sum(map(len, record.places)) for record in records.values())


def test_places_are_those_of_the_batches_that_came(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, SOURCES["in order"], 1, accumulation=2)
    numbers = [array("q", range(4 * n, 4 * n + 4)).tobytes() for n in range(4)]
    steps = [[(numbers[0], 0), (numbers[1], 1)], [(numbers[3], 3), (numbers[2], 2)]]
    first, second = (range(4), range(4, 8))
    assert fleet.ranks[0].loaders.placed(steps) == [
        Stretch(1, (first, second), numbers[0] + numbers[1]),
        Stretch(1, (second, first), numbers[3] + numbers[2]),
    ]
    fleet.kill()


def test_a_line_that_was_not_finished_is_of_steps_that_were_not_made(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, SOURCES["shuffled"], 2)
    for lines in (3, 2):
        for _ in range(lines):
            fleet.step()
        fleet.settle()
    fleet.kill()
    (path,) = (tmp_path / "ledger").glob("*-00001.jsonl")
    path.write_bytes(path.read_bytes()[:-9])
    assert findings(tmp_path) == []
    assert len(history(tmp_path, read(tmp_path))[0].steps) == 3


def test_a_full_disk_ends_the_ledger_and_not_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(tmp_path, SOURCES["shuffled"], 2)
    fleet.step()
    for rank in fleet.ranks:
        os.dup2(os.open("/dev/full", os.O_WRONLY), rank.ledger._file)
    fleet.settle()
    fleet.step(), fleet.settle(), fleet.kill()
    assert "The ledger can't be written from step 1 on" in caplog.text
    assert len({rank.ledger.chain for rank in fleet.ranks}) == 1, "the chain goes on, for the next attempt"


def test_a_second_fit_of_one_attempt_has_a_file_of_its_own(tmp_path: Path) -> None:
    state = train(tmp_path, "shuffled", 3).save()
    again = Fleet(tmp_path, SOURCES["shuffled"], 2, state=state)
    again.step(), again.settle(), again.kill()
    assert findings(tmp_path) == []
    assert len(history(tmp_path, read(tmp_path))[0].steps) == 4


def test_one_buffer_for_all_batches_takes_the_numbers_in_order(tmp_path: Path) -> None:
    buffer = {"id": torch.zeros(4, dtype=torch.int64)}

    def collate(rows: list[Any]) -> Any:
        buffer["id"] = torch.stack([row["id"] for row in rows])
        return buffer

    fleet = Fleet(tmp_path, lambda: DataLoader(Ids(50), collate_fn=collate), 2)
    for _ in range(4):
        fleet.step()
    fleet.settle(), fleet.kill()
    assert findings(tmp_path) == []


# -- the command -------------------------------------------------------------------------------------------------


def test_a_run_that_went_on_from_another_is_one_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, other = tmp_path / "one", tmp_path / "two", tmp_path / "other"
    fleet = train(one, "shuffled", 5)
    state = fleet.save()
    more = Fleet(two, SOURCES["shuffled"], 4, state=state, run_id="more")
    more.step(), more.step()
    more.settle(), more.kill()
    train(other, "shuffled", 9)
    assert cli.main(["ledger", str(two)]) == EXIT_RUN_FAILED
    assert "name the run that it belongs to as well" in capsys.readouterr().out
    assert cli.main(["ledger", str(one), str(two), str(other)]) == EXIT_OK
    said = capsys.readouterr().out
    assert "7 steps, 50 samples of 1 epoch; 2 attempts, data ranks 2 -> 4; chain" in said
    assert "The same samples in the same order as the first run, as far as both go." in said
    assert cli.main(["ledger", str(one), str(two), "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["histories"][0]["steps"] == 7


def test_runs_of_different_order_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "one", "shuffled", 3)
    train(tmp_path / "two", "in order", 3)
    assert cli.main(["ledger", str(tmp_path / "one"), str(tmp_path / "two")]) == EXIT_RUN_FAILED
    assert "First difference, at step 1: place 0 of the step is sample" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"), [(["nowhere"], "there is no such folder"), (["."], "has no ledger: there is no file in")]
)
def test_what_has_no_ledger_is_one_sentence(words: list[str], said: str, tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["ledger", *words]) == EXIT_USAGE
    assert said in capsys.readouterr().err
