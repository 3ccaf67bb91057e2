"""P45: a save on rank 0 alone ends in seconds and says what it is; ranks that come late to one are waited for."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Launched
from plans import make_plan, option
from saving_alone import Validated, gather_and_call, train

from framework.checkpoint_files import is_complete, write_json
from framework.plan import RunPlan
from framework.testing import RanksError, WorkerPool

ENTRY = "saving_alone:train"
WITHIN_S = 15.0
LATE_S = 12.0


def plan_for(
    folder: Path, moment: str, ranks: tuple[int, ...], late: Any = (), what: str = "save", **mix: Any
) -> RunPlan:
    components = {
        "launcher": option("launcher", "local"),
        "checkpoint": option("checkpoint", "dcp", save_top_k=0),
        **mix.pop("components", {}),
    }
    plan = make_plan(2, run_dir=str(folder), trainer={"max_epochs": 2}, components=components, **mix)
    write_json(folder / "probe.json", {"moment": moment, "ranks": ranks, "late": late, "what": what})
    return plan


MIXES = {
    "ddp": {"strategy": "ddp", "micro_batch_size": 2},
    "fsdp": {"strategy": "fsdp", "micro_batch_size": 2},
    "gpipe": {"pp": "gpipe", "microbatches": 2, "micro_batch_size": 2},
}
TOLD = r"trainer\.save_checkpoint was called on rank 0, but rank 1 has .* It is collective: call it on all ranks"


@pytest.mark.parametrize("moment", ["on_train_batch_end", "on_fit_end"])
def test_a_run_with_a_save_on_one_rank_alone_ends_in_seconds(tmp_path: Path, moment: str) -> None:
    with Launched(plan_for(tmp_path, moment, (0,), **MIXES["ddp"]), ENTRY) as run:
        code = run.wait()
        ended = time.time()
        assert code != 0
        assert ended - float((tmp_path / "at-0").read_text()) < WITHIN_S
        assert re.search(TOLD, run.output())
        run.no_leftovers()
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("mix", "moment"),
    [
        ("ddp", "on_train_batch_start"),
        ("ddp", "on_train_epoch_end"),
        ("fsdp", "on_train_batch_end"),
        ("fsdp", "on_validation_batch_end"),
        ("gpipe", "on_train_batch_end"),
    ],
)
def test_wherever_it_is_called(pool: WorkerPool, tmp_path: Path, mix: str, moment: str) -> None:
    with pytest.raises(RanksError, match=TOLD):
        pool.run(train, 2, plan_for(tmp_path, moment, (0,), **MIXES[mix]), process_group=False)
    assert time.time() - float((tmp_path / "at-0").read_text()) < WITHIN_S
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("mix", ["ddp", "fsdp", "gpipe"])
def test_so_is_a_gathering_of_the_whole_module(pool: WorkerPool, tmp_path: Path, mix: str) -> None:
    plan = plan_for(tmp_path, "on_train_batch_end", (0,), what="full_state_dict", **MIXES[mix])
    with pytest.raises(RanksError, match=TOLD.replace(r"trainer\.save_checkpoint", "full_state_dict")):
        pool.run(train, 2, plan, process_group=False)
    assert time.time() - float((tmp_path / "at-0").read_text()) < WITHIN_S


def test_a_gathering_on_all_ranks_is_whole(pool: WorkerPool, tmp_path: Path) -> None:
    plan = plan_for(tmp_path, "on_train_batch_end", (0, 1), [(1, 3.0)], what="full_state_dict", **MIXES["fsdp"])
    assert pool.run(train, 2, plan, process_group=False) == ["done", "done"]
    whole = torch.load(tmp_path / "whole-0", weights_only=True)
    assert {name: tuple(tensor.shape) for name, tensor in whole.items()} == {
        name: tuple(tensor.shape) for name, tensor in Validated().state_dict().items()
    }


@pytest.mark.parametrize("mix", ["ddp", "fsdp", "gpipe"])
def test_what_a_rank_holds_may_be_asked_on_one_rank(pool: WorkerPool, tmp_path: Path, mix: str) -> None:
    """Neither `trainer.strategy.lightning_module_state_dict` nor a module's `state_dict` waits for others."""
    plan = plan_for(tmp_path, "on_train_batch_end", (0,), what="held", **MIXES[mix])
    assert pool.run(train, 2, plan, process_group=False) == ["done", "done"]
    assert (tmp_path / "held-0").read_text()


def test_a_rank_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, "on_train_batch_end", (0, 1), [(1, LATE_S)], **MIXES["fsdp"])
    with Launched(plan, ENTRY) as run:
        assert run.wait() == 0, run.output()
        text = run.output()
    assert is_complete(tmp_path / "saved")
    assert "trainer.save_checkpoint is collective; rank 0 waits in it for rank 1." in text


def test_a_stage_that_comes_late_is_waited_for(pool: WorkerPool, tmp_path: Path) -> None:
    """Stages have begun messages of different number by then."""
    plan = plan_for(tmp_path, "on_train_epoch_end", (0, 1), [(1, LATE_S)], **MIXES["gpipe"])
    assert pool.run(train, 2, plan, process_group=False) == ["done", "done"]
    assert is_complete(tmp_path / "saved")


def test_messages_of_some_ranks_count_for_nothing(pool: WorkerPool) -> None:
    """Of a gathering: rank 1 has sent what rank 2 has not, and comes late to the call after it."""
    assert pool.run(gather_and_call, 3, LATE_S) == [None, None, None]
