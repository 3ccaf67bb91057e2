"""`strategy=deepspeed` without processes: its JSON, what contradicts the plan, what can't be, locks of dead builds."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from plans import make_plan

from framework.compose import compose
from framework.errors import PlanError
from framework.verify.command import flags_of
from framework.verify.oracle import Composer
from framework_plugins.strategy.deepspeed import DeepSpeed
from framework_plugins.strategy.deepspeed_checks import stale_locks


def whole(option: DeepSpeed, **plan: Any) -> tuple[dict[str, Any], list[str]]:
    config, problems = option.whole_config(make_plan(2, strategy="fsdp", **plan))
    return config, [str(problem) for problem in problems]


def refusals(*words: str) -> list[str]:
    """What is said of a mix before a process starts."""
    with pytest.raises(PlanError) as caught:
        compose(["strategy=deepspeed", "devices=2", *words], model=False)
    return str(caught.value).splitlines()


def test_the_plan_fills_what_it_owns() -> None:
    config, problems = whole(DeepSpeed(), accumulation=3, micro_batch_size=2, trainer={"gradient_clip_val": 1.5})
    assert problems == []
    owned = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    assert [config[key] for key in owned] == [12, 2, 3, 1.5]
    assert config["zero_allow_untested_optimizer"] is True
    assert config["zero_force_ds_cpu_optimizer"] is False
    assert config["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(
    ("precision", "section"),
    [("fp32", None), ("bf16-mixed", "torch_autocast"), ("bf16-true", "bf16"), ("fp16-mixed", "fp16")],
)
def test_precision_becomes_the_section_that_does_the_same(precision: str, section: str | None) -> None:
    config, problems = whole(DeepSpeed(), precision=precision)
    assert problems == []
    assert {name: config[name]["enabled"] for name in ("fp16", "bf16", "torch_autocast")} == {
        name: name == section for name in ("fp16", "bf16", "torch_autocast")
    }
    if section == "torch_autocast":
        assert config[section]["dtype"] == "bfloat16"
        assert config[section]["lower_precision_safe_modules"] == [], "gradients travel in fp32"


def test_everything_that_contradicts_is_collected() -> None:
    said = {
        "train_batch_size": 7,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    }
    _, problems = whole(DeepSpeed(stage=3, offload_optimizer="none", config=said))
    assert [problem.partition(":")[0] for problem in problems] == [
        "strategy.config.optimizer",
        "strategy.config.train_batch_size=7",
        "strategy.config.gradient_accumulation_steps=5",
        "strategy.config.bf16.enabled=true",
        "strategy.config.zero_optimization.stage=1",
        "strategy.config.zero_optimization.offload_optimizer=cpu",
    ]
    assert "the plan's global_batch_size is 2" in problems[1]
    assert "the option says 3" in problems[4]
    assert said["train_batch_size"] == 7, "the user's own mapping stays as it was"


def test_the_json_may_say_what_the_option_leaves_open(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    section = {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    file.write_text(json.dumps({"zero_optimization": section, "communication_data_type": "fp32"}))
    option = DeepSpeed(config=str(file))
    assert (option.zero_stage, option.offloads("optimizer"), option.offloads("param")) == (3, "cpu", "none")
    assert option.mesh_axes() == {"dp_shard": None}
    config, problems = whole(option)
    assert problems == []
    assert config["zero_optimization"].items() >= section.items()
    assert config["communication_data_type"] == "fp32"
    merged, problems = whole(DeepSpeed(config=str(file), offload_optimizer="cpu"))
    assert problems == []
    assert merged["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": False}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stage": 4}, "strategy.stage=4 is unknown"),
        ({"offload_optimizer": "disk"}, "strategy.offload_optimizer=disk is unknown"),
        ({"reduce_bucket_size": 0}, "must be at least 1"),
        ({"config": "no/such.json"}, "there is no such file"),
        ({"config": [1]}, "must be a file or a mapping"),
        ({"config": {"zero_optimization": True}}, "must be a mapping"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DeepSpeed(**settings)


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text("{'stage': 3}")
    with pytest.raises(ValueError, match="is no JSON"):
        DeepSpeed(config=str(file))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("precision=fp64", "it can't be combined with precision=fp64: DeepSpeed keeps master weights in fp32"),
        ("pp=gpipe", "owns the whole model; strategy=fsdp strategy.sharding=shard_grad_op shards as much"),
        ("tp=dtensor strategy.stage=3", "strategy=fsdp strategy.sharding=full_shard shards as much"),
        ("tp=dtensor strategy.stage=0", "strategy=ddp shards as much"),
        (
            "precision=fp16-mixed",
            "precision=fp16-mixed: DeepSpeed's CPU engine has no fp16. Type precision=bf16-mixed.",
        ),
        ("precision=bf16-true strategy.stage=0", "Type strategy.stage=1 or precision=bf16-mixed."),
        (
            "trainer.gradient_clip_val=1 trainer.gradient_clip_algorithm=value",
            "DeepSpeed clips by the norm only. Type trainer.gradient_clip_algorithm=norm.",
        ),
        ("strategy.offload_parameters=cpu", "strategy.offload_parameters=cpu: stage 2 shards no parameters."),
        (
            "strategy.stage=0 strategy.offload_optimizer=cpu",
            "stage 0 shards no optimizer state. Type strategy.stage=2.",
        ),
        ("strategy.stage=3 strategy.offload_optimizer=nvme", "nvme needs DeepSpeed's operator async_io"),
        ("strategy.stage=3 strategy.offload_optimizer=nvme", "Type strategy.nvme_path=<folder>."),
        ("strategy.offload_optimizer=nvme", "stage 2 offloads to the host only. Type strategy.stage=3."),
    ],
)
def test_what_cannot_be_is_said_before_a_process_starts(words: str, said: str) -> None:
    assert said in "\n".join(refusals(*words.split()))


def test_the_lock_of_a_build_that_was_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "async_io").mkdir()
    assert list(stale_locks()) == []
    lock = tmp_path / "async_io" / "lock"
    lock.touch()
    (problem,) = stale_locks()
    assert problem.fix == f"rm {lock}"
    assert f"{lock} is left of a build that was killed" in "\n".join(refusals("strategy.build_operators=true"))
    assert compose(["strategy=deepspeed", "devices=2"], model=False).world_size == 2, "nothing is built: nobody waits"


def test_each_stage_says_what_it_shards() -> None:
    words = [DeepSpeed(stage=stage).requirements().gives - {"data_parallel"} for stage in range(4)]
    assert [len([word for word in given if word.startswith("shards_")]) for given in words] == [0, 1, 2, 3]
    assert DeepSpeed(stage=0).mesh_axes() == {"dp_replicate": None}
    assert all(field.name in DeepSpeed.__doc__ for field in fields(DeepSpeed))


def test_verify_takes_the_most_exact_precision_that_a_mix_allows(tmp_path: Path) -> None:
    composer = Composer(flags_of([])[0], [], str(tmp_path))
    assert composer.most_exact(["+strategy=deepspeed", "strategy.stage=3"]) == "fp32"
    assert composer.most_exact(["strategy=fsdp", "pp=gpipe"]) == "fp64"
