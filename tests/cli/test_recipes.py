"""Each recipe resolves to what is kept beside this file, so that a drift is a diff that somebody reads.

To accept a change: FRAMEWORK_UPDATE_GOLDEN=1 python -m pytest tests/cli/test_recipes.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from framework import paths
from framework.catalog import recipes
from framework.job import plan_yaml
from framework.testing import plan

GOLDEN = Path(__file__).parent / "golden"
HOST = ("corpus_sha256", "corpus_bytes", "train_tokens", "val_tokens", "train_samples", "val_samples")
"""Facts that depend on the installed Python or packages, so they are left out."""


@pytest.mark.parametrize("name", sorted(recipes()))
def test_recipe_resolves_to_its_golden_plan(name, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = plan("accelerator=cpu" if name != "llama2_7b" else "seed=0", "run_dir=RUN", config_name=name, here=False)
    made = made.with_(run_id="", env={}, facts={key: value for key, value in made.facts.items() if key not in HOST})
    text = plan_yaml(made).replace(str(Path("RUN").resolve()), "RUN")
    file = GOLDEN / f"{name}.yaml"
    if os.environ.get("FRAMEWORK_UPDATE_GOLDEN") == "1":
        file.write_text(text)
    assert yaml.safe_load(text) == yaml.safe_load(file.read_text()), f"{name} resolves to something else than {file}"


def test_there_is_a_golden_plan_for_each_recipe_and_none_too_many():
    assert {file.stem for file in GOLDEN.glob("*.yaml")} == set(recipes())


@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_recipe_says_command_and_hardware(name):
    text = (paths.recipes_dir() / f"{name}.yaml").read_text()
    assert f"-cn {name}" in text
    assert "# Hardware:" in text
    assert "# Expect:" in text


def test_digits_come_out_as_the_recipe_expects(tmp_path):
    header = (paths.recipes_dir() / "digits_ddp.yaml").read_text()
    expected = re.findall(r"(loss_first|val_loss) ([\d.]+) to ([\d.]+)", header)
    run = [sys.executable, "-m", "framework", "-cn", "digits_ddp", f"run_dir={tmp_path}", "accelerator=cpu"]
    subprocess.run(run, check=True, timeout=120, stdout=subprocess.DEVNULL)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert len(expected) == 2
    for name, low, high in expected:
        assert float(low) <= summary[name] <= float(high), name


def test_llama2_7b_has_its_published_size_on_64_gpus():
    made = plan(config_name="llama2_7b", here=False)
    assert made.facts["parameters"] == 6_738_415_616
    assert made.world_size == 64
    assert made.local_world_size == made.mesh.tp == 8, "a layer is split within a host"
