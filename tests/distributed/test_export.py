"""Weights of any mix, whole, for other programs (P45, P20)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import make_plan, option
from safetensors.torch import load_file
from torch import nn
from user_modules import Mlp, loader, regression

from framework import Trainer, cli
from framework import checkpoint_files as files
from framework.errors import EXIT_OK, EXIT_USAGE
from framework.job import plan_yaml
from framework.plan import FILE, RunPlan

DATA = regression(samples=16)


class Tied(Mlp):
    """With a second name for the first layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.copy = nn.Linear(*reversed(self.first_layer().weight.shape))
        self.copy.weight = self.first_layer().weight
        self.copy.bias.requires_grad_(False)

    def first_layer(self) -> Any:
        return next(one for one in self.modules() if isinstance(one, nn.Linear))


def train(plan: RunPlan, module: type = Mlp) -> dict[str, torch.Tensor]:
    """Train one epoch and save; return the weights of one process (others hold pieces)."""
    torch.manual_seed(0)
    net = module()
    Trainer(plan).fit(net, loader(DATA, plan.batch.local_batch_size))
    Path(plan.run_dir, FILE).write_text(plan_yaml(plan))
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()} if plan.world_size == 1 else {}


def mix(world: int, run_dir: Path, **settings: Any) -> RunPlan:
    components = {"checkpoint": option("checkpoint", "dcp")}
    return make_plan(world, run_dir=str(run_dir), components=components, **settings)


@pytest.fixture(scope="module")
def alone(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of one process."""
    plan = mix(1, tmp_path_factory.mktemp("alone"), micro_batch_size=8)
    return pool.run(train, 1, plan, process_group=False)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "settings",
    [{"strategy": "fsdp", "micro_batch_size": 4}, {"pp": "gpipe", "microbatches": 2, "micro_batch_size": 4}],
    ids=["fsdp", "pp"],
)
@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_p45_every_element_of_any_mix_is_there(
    pool: Any, tmp_path: Path, alone: Any, settings: dict[str, Any], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.run(train, 2, mix(2, tmp_path, **settings), process_group=False)
    assert cli.main(["export", str(tmp_path), "--to", form]) == EXIT_OK
    out = tmp_path / f"export-{form}"
    if form == "torch":
        exported = torch.load(out / "model.pt", weights_only=True)
    else:
        exported = load_file(out / "model.safetensors")
    assert {name: tensor.shape for name, tensor in exported.items()} == {n: t.shape for n, t in alone.items()}
    assert all(tensor.numel() for tensor in exported.values())
    for name, tensor in alone.items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-6, atol=1e-7)
    assert f"{sum(tensor.numel() for tensor in alone.values()):,} elements" in capsys.readouterr().out
    assert cli.main(["export", str(tmp_path), "--to", form]) == EXIT_USAGE, "nothing is written over"


def test_tied_weights_are_written_once_and_told(pool: Any, tmp_path: Path) -> None:
    pool.run(train, 1, mix(1, tmp_path, micro_batch_size=8), Tied, process_group=False)
    newest = files.newest_complete(tmp_path)
    assert newest is not None
    for form in ("safetensors", "torch"):
        assert cli.main(["export", newest.path, "--to", form, "--out", str(tmp_path / form)]) == EXIT_OK
    exported, whole = (
        load_file(tmp_path / "safetensors" / "model.safetensors"),
        torch.load(tmp_path / "torch" / "model.pt"),
    )
    assert "copy.weight" not in exported
    assert Tied().load_state_dict(whole)
    shared = [name for name, tensor in whole.items() if tensor.data_ptr() == whole["copy.weight"].data_ptr()]
    assert len(shared) == 2


def test_large_ones_are_several_files(pool: Any, tmp_path: Path, alone: Any, monkeypatch: Any) -> None:
    pool.run(train, 1, mix(1, tmp_path, micro_batch_size=8), process_group=False)
    monkeypatch.setattr("framework.export.SHARD_BYTES", 100)
    assert cli.main(["export", str(tmp_path)]) == EXIT_OK
    out = tmp_path / "export-safetensors"
    where = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(where) == set(alone)
    assert len(set(where.values())) > 1
    for name, file in where.items():
        torch.testing.assert_close(load_file(out / file)[name], alone[name], rtol=1e-6, atol=1e-7)


def test_a_damaged_one_is_not_exported(pool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run(train, 1, mix(1, tmp_path, micro_batch_size=8), process_group=False)
    (shard,) = files.folder_of(tmp_path).glob("step-*/rank-00000.safetensors")
    content = bytearray(shard.read_bytes())
    for at in range(8 + int.from_bytes(content[:8], "little"), len(content), 4):
        content[at] ^= 1
    shard.write_bytes(content)
    assert cli.main(["export", str(tmp_path)]) != EXIT_OK
    assert "aren't those that were written" in capsys.readouterr().err


def save_llama(run_dir: str) -> torch.Tensor:
    """Save a small Llama as `model=hf` would, in a run's folder; return its logits."""
    from framework.checkpoint import save_checkpoint
    from framework.plan import MeshSpec
    from framework.state import module_state
    from framework_plugins.checkpoint.store import ShardedStore
    from framework_plugins.model.hf import CausalLM

    torch.manual_seed(0)
    module = CausalLM(vocab_size=32, context=16)
    path = files.folder_of(run_dir) / files.step_name(1)
    save_checkpoint(
        ShardedStore(), {"global_step": 1, "state_dict": module_state(module).detached()}, str(path), MeshSpec()
    )
    model = option("model", "hf", vocab_size=32, context=16)
    Path(run_dir, FILE).write_text(plan_yaml(RunPlan(run_id="r", run_dir=run_dir, components={"model": model})))
    module.eval()
    return module(torch.arange(12).reshape(1, 12)).detach()  # type: ignore[no-any-return]


def test_transformers_loads_it_and_gives_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    logits = save_llama(str(tmp_path))
    assert cli.main(["export", str(tmp_path), "--to", "hf"]) == EXIT_OK
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export-hf").eval()
    torch.testing.assert_close(theirs(input_ids=torch.arange(12).reshape(1, 12)).logits, logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "said"),
    [(option("model", "gpt"), "model=gpt has no form of Hugging Face"), ({}, "this model has no form")],
)
def test_a_form_that_there_is_not_is_one_sentence(tmp_path: Path, model: Any, said: str, capsys: Any) -> None:
    save_llama(str(tmp_path))
    plan = RunPlan(run_id="r", run_dir=str(tmp_path), components={"model": model})
    (tmp_path / FILE).write_text(plan_yaml(plan))
    assert cli.main(["export", str(tmp_path), "--to", "hf"]) == EXIT_USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("run", "said"), [("nowhere", "no such folder"), (".", "no complete checkpoint")])
def test_a_folder_without_a_checkpoint_is_one_sentence(
    tmp_path: Path, monkeypatch: Any, run: str, said: str, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", run]) == EXIT_USAGE
    assert said in capsys.readouterr().err
