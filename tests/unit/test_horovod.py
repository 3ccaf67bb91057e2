"""`strategy=horovod` without Horovod: its settings, what it tells Horovod, what can't be and how that is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plans import make_plan

from framework.compose import compose
from framework.errors import PlanError
from framework.failures import by_cause, doubt, failure_of
from framework_plugins.strategy import horovod
from framework_plugins.strategy.horovod import Horovod, lacking


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Horovod were there: the launcher only looks whether it is."""
    monkeypatch.setattr(horovod, "lacking", lambda: None)


def refusals(*words: str) -> str:
    """What is said of a mix before a process starts."""
    with pytest.raises(PlanError) as caught:
        compose(["strategy=horovod", "devices=2", *words], model=False)
    return str(caught.value)


def find(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """Have Python find a package horovod in `folder`, or none."""

    class Spec:
        submodule_search_locations = (str(folder),)

    monkeypatch.setattr(horovod, "find_spec", lambda name: folder and Spec())


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, None)
    assert refusals().splitlines()[0] == (
        "strategy=horovod: the package horovod isn't installed. Type make horovod, which builds it in an environment "
        "of its own, or strategy=ddp."
    )


def test_a_package_without_operations_for_torch_is_one_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find(monkeypatch, tmp_path)
    assert "was built without its operations for PyTorch. Type make horovod" in refusals()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "mpi_lib_v2.cpython-311-x86_64-linux-gnu.so").touch()
    assert lacking() is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tp=dtensor", "it can't be combined with tp=dtensor: Horovod adds up the gradients of all ranks, and these "),
        ("tp=dtensor", "would hold different pieces; type strategy=ddp."),
        ("pp=gpipe", "it can't be combined with pp=gpipe"),
        ("cp=ring", "it can't be combined with cp=ring"),
        ("model=moe ep=alltoall", "would hold different pieces; type strategy=fsdp."),
        ("sampler=none", "ranks would train on the same samples"),
    ],
)
def test_what_cannot_be_is_said_before_a_process_starts(installed: None, words: str, said: str) -> None:
    assert said in refusals(*words.split())


def test_gpus_are_refused(installed: None) -> None:
    (problem,) = Horovod().check_plan(make_plan(2, strategy="ddp").with_(accelerator="cuda"))
    assert str(problem).startswith("accelerator=cuda: strategy=horovod is proven with Horovod's operations for CPUs")
    assert problem.fix == "strategy=ddp or accelerator=cpu"


def test_what_can_be(installed: None) -> None:
    plan = compose(["strategy=horovod", "devices=2", "activation=full", "precision=bf16-mixed"], model=False)
    assert plan.mesh.dp_replicate == 2
    assert plan.env["HOROVOD_CONTROLLER"] == "gloo"


def test_processes_of_horovodrun_are_told_from_ours(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    said = refusals()
    assert "horovodrun has started 4 processes already, and each of them would start the 2 ranks of the plan." in said
    assert "Type the same command without horovodrun, or `unset HOROVOD_RANK`" in said


def test_another_controller_that_is_exported_is_named(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CONTROLLER", "mpi")
    assert "HOROVOD_CONTROLLER=mpi (exported in your shell)" in refusals()
    monkeypatch.setenv("HOROVOD_CONTROLLER", "Gloo")
    assert compose(["strategy=horovod", "devices=2"], model=False).world_size == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": 0}, "strategy.size=0 must be at least 1"),
        ({"compression": "bf16"}, "strategy.compression=bf16 is unknown; choose none or fp16"),
        ({"fusion_threshold_mb": -1.0}, "strategy.fusion_threshold_mb=-1 must be at least 0"),
        ({"fusion_threshold_mb": float("nan")}, "strategy.fusion_threshold_mb=nan must be"),
        ({"cycle_time_ms": 0.0}, "strategy.cycle_time_ms=0 must be positive"),
        ({"cycle_time_ms": float("inf")}, "strategy.cycle_time_ms=inf must be positive"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Horovod(**settings)


def test_settings_become_what_horovod_reads(tmp_path: Path) -> None:
    plan = make_plan(2, strategy="ddp", run_dir=str(tmp_path))
    said = Horovod(fusion_threshold_mb=0.5, cycle_time_ms=2.5, timeline=True).process_env(plan)
    assert said["HOROVOD_FUSION_THRESHOLD"] == str(2**19)
    assert said["HOROVOD_CYCLE_TIME"] == "2.5"
    assert said["HOROVOD_TIMELINE"] == str(tmp_path / "horovod_timeline.json")
    assert {name for name in Horovod().process_env(plan) if name not in said} == set()
    assert "HOROVOD_TIMELINE" not in Horovod().process_env(plan), "null and false leave Horovod alone"


@pytest.mark.parametrize(("limit", "ended"), [(1800.0, 1800), (60.5, 61), (0.5, 1)])
def test_the_time_limit_of_the_run_is_horovods_too(limit: float, ended: int) -> None:
    said = Horovod().process_env(make_plan(2, strategy="ddp").with_(timeout_s=limit))
    assert said["HOROVOD_GLOO_TIMEOUT_SECONDS"] == str(ended)


def test_what_horovod_says_of_a_lost_rank_is_no_cause() -> None:
    lost = failure_of(0, RuntimeError("Horovod has been shut down. This was caused by an exception on one of the"), 1.0)
    cause = failure_of(1, ValueError("boom7"), 2.0)
    assert (doubt(lost), doubt(cause)) == (2, 0)
    assert by_cause([lost, cause])[0] is cause
