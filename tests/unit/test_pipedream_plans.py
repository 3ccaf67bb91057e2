"""What an asynchronous pipeline can't do is refused before a process starts, with what does it."""

from __future__ import annotations

import pytest

from framework.errors import PlanError
from framework.plan import BatchSpec, MeshSpec, RunPlan
from framework.testing import plan
from framework_plugins.pp.pipedream import PipeDream, PipeDream2BW


def made(**fields) -> RunPlan:
    return RunPlan(run_id="", run_dir="", mesh=MeshSpec(pp=4), **fields)


@pytest.mark.parametrize(
    ("option", "asked", "words"),
    [
        (PipeDream(), made(batch=BatchSpec(accumulation=2)), "pp=pipedream_2bw, whose micro-batches are accumulated"),
        (PipeDream(), made(on_nonfinite="skip"), "on_nonfinite=raise or pp=1f1b"),
        (PipeDream2BW(), made(batch=BatchSpec(microbatches=2)), "pp.microbatches=4"),
        (
            PipeDream(sync_every=4),
            made(components={"logger": {"csv": {}}}, trainer={"log_every_n_steps": 10}),
            "pp.sync_every=2",
        ),
    ],
)
def test_settings_without_meaning_are_refused(option, asked, words):
    (problem,) = option.check_plan(asked)
    assert problem.fix.startswith(words) or words in problem.fix


def test_settings_with_meaning_are_not():
    asked = made(
        batch=BatchSpec(microbatches=4),
        components={"logger": {"csv": {}}},
        trainer={"log_every_n_steps": 10, "gradient_clip_val": 1.0},
    )
    for option in (PipeDream(), PipeDream2BW(), PipeDream(vertical_sync=True, sync_every=5)):
        assert option.check_plan(asked) == []
        assert "all stages wait" in option.plan_notes(asked)[1]
    assert "stage 0 4, stage 1 3, stage 2 2, stage 3 1" in PipeDream().plan_notes(asked)[0]


def test_other_axes_are_refused_with_the_schedule_that_runs_with_them():
    with pytest.raises(PlanError) as refused:
        plan("pp=pipedream", "strategy=ddp", "tp=dtensor", "precision=fp16-mixed", model=False)
    text = str(refused.value)
    for other in ("strategy=ddp", "tp=dtensor", "precision=fp16-mixed"):
        assert f"pp=pipedream: it can't be combined with {other}" in text
    assert "pp=1f1b runs with it" in text
    assert "Nearest mixes that work" in text


def test_a_tied_model_is_refused():
    with pytest.raises(PlanError) as refused:
        plan("pp=pipedream_2bw", "model.tied=true")
    assert "tied" in str(refused.value)
