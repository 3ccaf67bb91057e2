"""A schedule in a file: every fault is one sentence with rank, column and action; bubbles and memory are theory's."""

from __future__ import annotations

from pathlib import Path

import pytest

from framework.errors import PlanError
from framework.plan import BatchSpec, MeshSpec, RunPlan
from framework.testing import plan
from framework_plugins.pp import actions
from framework_plugins.pp.csv import Csv
from framework_plugins.pp.schedules import Schedule

ONE_F_ONE_B = "0F0,0F1,,,0B0,0F2,0B1,0F3,0B2,0B3\n,1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"


def parse(text: str):
    return actions.parse([[cell.strip() for cell in line.split(",")] for line in text.strip("\n").split("\n")])


def gpipe(ranks: int, micros: int) -> str:
    rows = []
    for stage in range(ranks):
        rows.append(",".join([f"{stage}F{k}" for k in range(micros)] + [f"{stage}B{k}" for k in range(micros)]))
    return "\n".join(rows)


def one_f_one_b(ranks: int, micros: int) -> str:
    rows = []
    for stage in range(ranks):
        ahead = min(micros, ranks - stage)
        row = [f"{stage}F{k}" for k in range(ahead)]
        for k in range(micros):
            row += [f"{stage}B{k}", *([f"{stage}F{k + ahead}"] if k + ahead < micros else [])]
        rows.append(",".join(row))
    return "\n".join(rows)


@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (4, 8), (4, 16)])
def test_bubble_and_activations_are_those_of_theory(ranks, micros):
    for text, held in ((gpipe(ranks, micros), [micros] * ranks), (one_f_one_b(ranks, micros), range(ranks, 0, -1))):
        table, faults = parse(text)
        assert faults == []
        assert actions.bubble(table) == pytest.approx((ranks - 1) / (micros + ranks - 1))
        assert list(actions.alive(table).values()) == list(held)


def test_a_split_backward_fills_bubbles():
    whole, _ = parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    split, faults = parse("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1I0,1F1,1I1,1W0,1W1")
    assert faults == []
    assert actions.bubble(split) < actions.bubble(whole)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0X0\n1F0,1B0", "rank 0, column 1: 0X0 is no action"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0", "rank 0, column 1: 0SEND_F0 moves data"),
        ("0F0,0B0\n(1F0;1B0)OVERLAP_F_B", "rank 1, column 0: (1F0;1B0)OVERLAP_F_B joins two actions"),
        ("0F0,0B0\n,\n1F0,1B0", "rank 1 has no actions"),
        ("0F0,0B0,0F0\n1F0,1B0", "rank 0, column 2: 0F0 stands at rank 0, column 0 already"),
        ("0F0,0B0,1F0\n1B0", "rank 1, column 0: 1B0 is of stage 1, which rank 0 has"),
        ("0F0,0B0\n2F0,2B0", "stage 1 is on no rank, though there is a stage 2"),
        ("0F0,0B0,0B1\n1F0,1B0,1F1,1B1", "rank 0 never runs 0F1"),
        ("0F0\n1F0,1B0", "rank 0 never runs 0B0"),
        ("0F0,0I0\n1F0,1B0", "rank 0 never runs 0W0"),
        ("0F0,0B0,0W0\n1F0,1B0", "rank 0, column 2: 0W0 repeats a part of 0B0"),
        ("0F0,0B0\n1B0,1F0", "rank 1, column 0: 1B0 comes before 1F0 (column 1)"),
        ("0F0,0W0,0I0\n1F0,1B0", "rank 0, column 1: 0W0 comes before 0I0 (column 2)"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            "the ranks wait for one another for ever (rank 0, column 1: 0B0 waits for 1B0; "
            "rank 1, column 1: 1F1 waits for 0F1)",
        ),
    ],
)
def test_each_fault_names_rank_column_and_action(text, words):
    _, faults = parse(text)
    assert len(faults) == 1, faults
    assert faults[0].startswith(words)


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "schedule.csv"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        ("0F0,0X0\n1F0,1B0", {}, "rank 0, column 1: 0X0"),
        (ONE_F_ONE_B, {"size": 4}, "it has 2 rows, and pp.size=4"),
        (ONE_F_ONE_B, {"microbatches": 8}, "it has 4 micro-batches, and pp.microbatches=8"),
        ("0F0,1F0,1B0,0B0\n2F0,2B0", {}, "rank 0 has 2 of 3 stages"),
        ("0F0,1F0,1B0,0B0", {}, "at least 2 ranks"),
        ("\n\n", {}, "it has no actions"),
        ('0F0,"0B0', {}, "it is no CSV file"),
    ],
)
def test_a_file_that_cannot_run_is_refused(file, text, more, words):
    option = Csv(file=file(text), **more)
    problems = option.check_plan(RunPlan(run_id="", run_dir=""))
    assert words in str(problems[0])
    assert option.plan_notes(RunPlan(run_id="", run_dir="")) == [] or "2 ranks" in words


def test_no_file_a_missing_one_and_a_wrong_one_are_refused_in_the_plan(file):
    for path, words in (
        ("null", "needs a file"),
        ("nowhere.csv", "No such file"),
        (file("0F0,0X0"), "0X0 is no action"),
    ):
        with pytest.raises(PlanError) as refused:
            plan("pp=csv", f"pp.file={path}", model=False)
        assert words in str(refused.value)


def test_the_plan_takes_ranks_and_micro_batches_from_the_file(file):
    made = plan("pp=csv", f"pp.file={file(ONE_F_ONE_B)}", "global_batch_size=16", model=False)
    assert (made.mesh.pp, made.batch.microbatches) == (2, 4)


@pytest.mark.parametrize("option", ["gpipe", "looped_bfs", "zbv", "1f1b"])
def test_fewer_micro_batches_than_ranks_are_refused_with_their_bubble(option):
    schedule = Schedule(schedule=option, size=4, stages_per_rank={"gpipe": 1, "1f1b": 1}.get(option, 2))
    made = RunPlan(run_id="", run_dir="", mesh=MeshSpec(pp=4), batch=BatchSpec(microbatches=2))
    (problem,) = schedule.check_plan(made)
    assert "with 2 they would wait 60% of the time" in problem.reason
    assert problem.fix == "pp.microbatches=4"
    assert schedule.check_plan(made.with_(batch=BatchSpec(microbatches=4))) == []
