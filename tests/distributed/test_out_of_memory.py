"""A rank runs out of memory: all go on with smaller micro-batches, and come to the same end."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import kills
import pytest
import torch
from lightning.pytorch import Callback

from framework.checkpoint_files import CheckpointError
from framework.failures import OUT_OF_MEMORY, failure_of, oom_kills
from framework.launch import RunResult, prewarm
from framework.plan import BatchSpec, Failure, MeshSpec, RunPlan
from framework_plugins.recovery.restart import Restart

MIB = 2**20
SAMPLE_MIB = 128


class Hungry(Callback):
    """From the third step on rank 1 needs `SAMPLE_MIB` for each sample of a micro-batch, and may take 600 MiB more."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank != 1 or trainer.global_step < 3:
            return
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 600 * MIB, resource.RLIM_INFINITY))
        try:
            torch.empty(trainer.plan.batch.micro_batch_size * SAMPLE_MIB * MIB, dtype=torch.uint8)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def run(mix: str, folder: Path, hungry: bool, *words: str) -> RunResult:
    plan = kills.plan_of(mix, folder, (), "recovery.max_restarts=0", *words)
    if hungry:
        callbacks = {**plan.components["callbacks"], "hungry": {"_target_": "test_out_of_memory.Hungry"}}
        plan = plan.with_(components={**plan.components, "callbacks": callbacks})
    return kills.run(plan)


@pytest.fixture(autouse=True, scope="module")
def _server() -> None:
    prewarm()


@pytest.fixture(autouse=True)
def _batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are chosen here."""
    monkeypatch.setattr(kills, "SMALL", [word for word in kills.SMALL if not word.startswith("global_batch_size")])


@pytest.mark.parametrize(
    ("mix", "words", "cut"),
    [
        ("ddp 2", ["global_batch_size=16"], "accumulation 2 in the place of 1"),
        ("fsdp 2", ["global_batch_size=16"], "accumulation 2 in the place of 1"),
        ("gpipe 2", ["global_batch_size=32", "pp.microbatches=4"], "microbatches 8 in the place of 4"),
    ],
)
def test_the_global_batch_stays_and_so_does_the_result(
    mix: str, words: list[str], cut: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = run(mix, tmp_path / "hungry", True, *words)
    assert (result.status, result.restarts) == ("finished", 1), result.describe()
    assert f"Rank 1 ran out of memory with 8 samples a micro-batch: from now on 4, and {cut}." in caplog.text
    assert run(mix, tmp_path / "fed", False, *words).status == "finished"
    weights = [kills.final_weights(tmp_path / name) for name in ("hungry", "fed")]
    assert kills.difference(*weights) < 2e-5, "rounding of fp32, summed in another order"
    assert kills.ledger(tmp_path / "hungry") == ([], kills.ledger(tmp_path / "fed")[1])


def test_without_it_the_run_ends(tmp_path: Path) -> None:
    result = run("ddp 2", tmp_path, True, "recovery.on_out_of_memory=fail", "global_batch_size=16")
    assert result.status == "failed"
    assert "can't allocate memory" in result.describe()


# -- what it decides -----------------------------------------------------------------------------------------------


def plan_of(micro: int, accumulation: int = 1, pp: int = 1, microbatches: int = 1) -> RunPlan:
    batch = BatchSpec(2 * micro * accumulation * microbatches, micro, microbatches, accumulation, data_ranks=2)
    return RunPlan(run_id="r", run_dir="unused", mesh=MeshSpec(pp=pp, dp_replicate=2), batch=batch)


STARVED = failure_of(1, RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"))
OTHER = failure_of(0, ValueError("wrong"))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (plan_of(8), (4, 1, 2)),
        (plan_of(6, accumulation=3), (3, 1, 6)),
        (plan_of(9), (3, 1, 3)),
        (plan_of(7), (1, 1, 7)),
        (plan_of(4, pp=2, microbatches=4), (2, 8, 1)),
    ],
)
def test_the_cut(plan: RunPlan, expected: tuple[int, int, int]) -> None:
    adapted = Restart().adapt(plan, [OTHER, STARVED])
    assert adapted is not None
    batch = adapted[0].batch
    assert (batch.micro_batch_size, batch.microbatches, batch.accumulation) == expected
    assert batch.global_batch_size == plan.batch.global_batch_size
    assert batch.global_batch_size == batch.data_ranks * batch.accumulation * batch.local_batch_size


def test_settings_that_count_batches_count_as_many_samples_as_before() -> None:
    plan = plan_of(8).with_(trainer={"limit_train_batches": 4, "val_check_interval": 0.5, "limit_val_batches": 2})
    adapted = Restart().adapt(plan, [STARVED])
    assert adapted is not None
    assert adapted[0].trainer == {"limit_train_batches": 8, "val_check_interval": 0.5, "limit_val_batches": 4}


def test_what_is_not_for_it(monkeypatch: Any) -> None:
    assert Restart().adapt(plan_of(1), [STARVED]) is None, "one sample is the least"
    assert Restart().adapt(plan_of(8), [OTHER]) is None
    assert Restart(on_out_of_memory="fail").adapt(plan_of(8), [STARVED]) is None
    copies = failure_of(0, CheckpointError("no room for a copy: can't allocate memory"))
    assert Restart().adapt(plan_of(8), [copies]) is None, "smaller batches don't help a save"
    with pytest.raises(ValueError, match="it is halve or fail"):
        Restart(on_out_of_memory="double")
    killed = Failure(rank=0, message="killed by signal 9 (SIGKILL)", exit_code=-9, time=0.0)
    assert Restart().adapt(plan_of(8), [killed]) is None, "somebody else's kill"
    policy = Restart()
    monkeypatch.setattr("framework_plugins.recovery.restart.oom_kills", lambda: oom_kills() + 1)
    assert policy.adapt(plan_of(8), [killed]) is not None, "the kernel's, for memory"


@pytest.mark.parametrize(
    "said",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried",
        "MemoryError", "RuntimeError: std::bad_alloc", "OSError: [Errno 12] Cannot allocate memory",
    ],
)  # fmt: skip
def test_how_it_is_told(said: str) -> None:
    assert OUT_OF_MEMORY.search(said)
    assert not OUT_OF_MEMORY.search("ValueError: the module wrote MemoryErrors to a file")
