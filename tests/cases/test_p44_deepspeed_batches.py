"""P44: batch sizes have one owner, the plan; DeepSpeed's JSON is filled from it, and never says `auto`."""

from __future__ import annotations

import json

import pytest

from framework import cli
from framework.errors import EXIT_OK, EXIT_USAGE

WORDS = ["strategy=deepspeed", "devices=2", "micro_batch_size=2", "trainer.accumulate_grad_batches=4"]


def dry_run(capsys, *words: str) -> tuple[int, str]:
    code = cli.main(["deepspeed_config", *WORDS, "global_batch_size=16", *words])
    out = capsys.readouterr()
    return code, out.out + out.err


def test_the_final_json_has_the_plans_numbers(capsys) -> None:
    code, text = dry_run(capsys, "trainer.gradient_clip_val=0.5", "precision=bf16-mixed")
    assert code == EXIT_OK
    config = json.loads(text)
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 4
    assert config["train_batch_size"] == 16
    assert config["gradient_clipping"] == 0.5
    assert config["torch_autocast"]["enabled"]
    assert not config["bf16"]["enabled"]


def test_a_contradiction_is_refused_with_both_numbers(capsys) -> None:
    code, text = dry_run(capsys, "strategy.config.train_batch_size=32", "strategy.config.gradient_clipping=3.0")
    assert code == EXIT_USAGE
    assert "strategy.config.train_batch_size=32: the plan's global_batch_size is 16." in text
    assert "strategy.config.gradient_clipping=3.0: the plan's trainer.gradient_clip_val is 0.0." in text


def test_no_auto_reaches_the_engine(capsys, tmp_path) -> None:
    file = tmp_path / "ds.json"
    autos = {"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "wall_clock_breakdown": True}
    file.write_text(json.dumps({**autos, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}))
    code, text = dry_run(capsys, f"strategy.config={file}")
    assert code == EXIT_OK
    config = json.loads(text)
    assert '"auto"' not in text
    assert config["zero_optimization"]["stage"] == 3
    assert config["wall_clock_breakdown"], "the rest of the JSON is kept"
    code, text = dry_run(capsys, "strategy.config.zero_optimization.reduce_bucket_size=auto")
    assert code == EXIT_OK
    assert '"auto"' not in text


def test_an_auto_that_nobody_can_fill_is_refused(capsys) -> None:
    code, text = dry_run(capsys, "strategy.config.flops_profiler.profile_step=auto")
    assert code == EXIT_USAGE
    assert "strategy.config.flops_profiler.profile_step=auto: nothing in the plan says it." in text


def test_without_the_package_one_line_names_it_and_the_extra(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "deepspeed" else name)
    code, text = dry_run(capsys)
    assert code == EXIT_USAGE
    assert text.strip().endswith(
        'strategy=deepspeed: the package deepspeed isn\'t installed. Type pip install "lightning-framework[deepspeed]".'
    )
