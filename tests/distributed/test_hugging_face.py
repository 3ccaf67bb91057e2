"""`model=hf`: models of transformers, unedited, equal one process under ddp, fsdp, tensor parallelism and pipelines."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from figures import keep
from safetensors.torch import save_file

from framework.errors import PlanError
from framework.testing import WorkerPool
from framework.verify.command import flags_of
from framework.verify.mixes import Mix
from framework.verify.oracle import Composer, Oracle, Row
from framework_plugins.model.hf import CAUSAL, CausalLM, describe

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
ROWS = {
    "llama": "strategy=fsdp tp=dtensor",
    "qwen2": "tp=megatron",
    "mistral": "pp=gpipe",
    "gpt2": "strategy=fsdp pp=1f1b",
}
MIXES = (
    *("strategy=ddp", "strategy=fsdp", "tp=dtensor", "tp=megatron", "pp=gpipe", "strategy=fsdp tp=dtensor"),
    *("strategy=fsdp pp=1f1b", "tp=megatron pp=gpipe", "strategy=fsdp tp=megatron pp=1f1b"),
)
WORDS = ["model=hf", "model.config={hidden_size: 32, num_hidden_layers: 2}", "model.context=16", "global_batch_size=8"]


def composer(folder: Path, *words: str) -> Composer:
    flags: argparse.Namespace = flags_of(["--steps", "3"])[0]
    return Composer(flags, [*WORDS, *words], str(folder))


@pytest.mark.parametrize("model_type", ROWS)
def test_it_equals_one_process(pool: WorkerPool, model_type: str, tmp_path: Path) -> None:
    found = judged(Oracle(pool, composer(tmp_path, f"model.model_type={model_type}"), steps=3), ROWS[model_type])
    assert (found.verdict, found.lines) == ("equal", [])


@pytest.mark.campaign
def test_campaign_of_all_mixes(pool: WorkerPool, tmp_path: Path) -> None:
    """Writes `tests/campaign/hugging_face.json`, of which docs/models.md is made."""
    rows = []
    for model_type in ROWS:
        oracle = Oracle(pool, composer(tmp_path, f"model.model_type={model_type}"), steps=3)
        rows += [asdict(judged(oracle, mix)) | {"model_type": model_type} for mix in MIXES]
    keep("hugging_face", {"rows": rows})
    assert {row["verdict"] for row in rows} <= {"equal", "refused"}, rows
    for model_type in ROWS:
        assert (
            sum(row["verdict"] == "equal" for row in rows if row["model_type"] == model_type) >= 4
        )  # GPT-2 has no plan for tp


def judged(oracle: Oracle, words: str) -> Row:
    """Hold a mix against one process."""
    mix = tuple(words.split())
    try:
        plan = oracle.composer(mix)
    except PlanError as error:
        return Row(words, 0, "refused", lines=str(error).splitlines())
    return oracle.judge(Mix(mix, plan.world_size), plan)


def test_weights_of_a_folder_are_read_and_another_models_are_not(tmp_path: Path) -> None:
    torch.manual_seed(3)
    one = CausalLM(config=SMALL, context=16)
    one.lm.config.to_json_file(tmp_path / "config.json")
    save_file(dict(one.lm.named_parameters()), str(tmp_path / "model.safetensors"))
    with torch.device("meta"):
        other = CausalLM(path=str(tmp_path))
    other.to_empty(device="cpu")
    with torch.no_grad():
        other.init_weights()
    for (name, want), (_, got) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(got, want), name
    save_file({"lm_head.weight": torch.ones(256, 32)}, str(tmp_path / "model.safetensors"))
    with torch.no_grad(), pytest.raises(ValueError, match="has model"):
        other.init_weights()


def test_what_transformers_does_not_know_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model type 'lama'; near are llama"):
        describe("lama", {}, {})
    with pytest.raises(ValueError, match="no field 'hiden_size'; near is 'hidden_size'"):
        describe("llama", {}, {"hiden_size": 3})
    with pytest.raises(PlanError, match=r"tp\.plan"):  # GPT-2 comes without one, and its layers are no Linear
        composer(tmp_path, "model.model_type=gpt2")(["tp=dtensor"])


def test_a_sliding_window_shorter_than_the_context_keeps_its_masks() -> None:
    window = {"sliding_window": 8, "hidden_size": 32, "num_hidden_layers": 2}
    for context, kind in ((8, CAUSAL), (9, "sdpa")):
        assert CausalLM(model_type="mistral", config=window, context=context).lm.config._attn_implementation == kind
    with pytest.raises(ValueError, match="9 tokens is longer than context=8"):
        CausalLM(model_type="mistral", config=window, context=8)(torch.zeros(1, 9, dtype=torch.int64))


def read_plan(model_type: str) -> Any:
    with torch.device("meta"):
        return CausalLM(model_type=model_type).tp_plan


def test_the_plan_is_the_models_own() -> None:
    found = read_plan("llama")
    assert found["lm.model.embed_tokens"] == "embedding"
    assert found["lm.model.layers.*.self_attn.o_proj"] == "rowwise"
    assert found["lm.lm_head"] == "head"
    assert read_plan("gpt2") is None
