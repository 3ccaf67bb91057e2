"""`python -m framework verify`: equal mixes pass, planted faults don't, what was typed wrong is a sentence."""

from __future__ import annotations

import ast
import io
import json
import os
import time
from contextlib import redirect_stdout
from fnmatch import fnmatch
from pathlib import Path

import pytest
from figures import keep

from framework import Problem, cli, hookimpl, plugin_manager
from framework.errors import EXIT_OK, EXIT_RUN_FAILED, EXIT_USAGE
from framework.verify import command, reference
from framework.verify.mixes import every, pairwise, slot_of, thinned
from framework.verify.mutants import MUTANTS

SMALL = [
    "model.layers=2", "model.width=16", "model.heads=2", "model.hidden=32", "model.context=16", "global_batch_size=8",
]  # fmt: skip
FOUR_BLOCKS = [
    "model.layers=4", "model.width=32", "model.heads=4", "model.hidden=32", "model.context=16", "global_batch_size=8",
]  # fmt: skip
OPTIONS = {
    "strategy": {"ddp": (), "fsdp": ("replicas=2",)},
    "tp": {"dtensor": ("loss_parallel=true",)},
    "pp": {"gpipe": (), "zbv": ()},
}


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_campaign_of_all_mixes():
    """Figures with commit go to `tests/campaign/mixes.json`; `tools/mix_docs.py` makes docs/mixes.md of them."""
    began = time.monotonic()
    models = {}
    for model in ("gpt", "moe"):
        with redirect_stdout(io.StringIO()) as printed:  # rows go to stderr meanwhile: pytest -s shows them
            code = cli.main(["verify", "--mixes=all", "--json", f"model={model}"])
        models[model] = json.loads(printed.getvalue())
        keep("mixes", {"seconds": time.monotonic() - began, "cores": os.cpu_count(), "models": models})
        assert code == EXIT_OK, [row for row in models[model]["rows"] if row["verdict"] not in ("equal", "refused")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["gpt", "moe"])
def test_a_cover_of_all_pairs_is_equal(capsys, model):
    """Mixes of up to four ranks in which any two options stand together, of a small model."""
    words = ["--mixes=pairwise", "--ranks", "4", "--steps", "3", "--json", f"model={model}", *FOUR_BLOCKS]
    code = cli.main(["verify", *words])
    result = json.loads(capsys.readouterr().out)
    assert code == EXIT_OK, [row for row in result["rows"] if row["verdict"] not in ("equal", "refused")]
    assert result["verdicts"]["equal"] > 50
    assert len(result["initial_sha256"]) == 1


def test_a_typed_mix_is_held_against_one_process(capsys):
    assert cli.main(["verify", "+strategy=fsdp", "+tp=dtensor", *SMALL, "--steps", "2"]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["equal", "1"], ["equal", "4"]]
    assert lines[-1] == "2 equal; 1 hash of initial weights"


def test_a_mix_without_fp64_is_verified_in_fp32(capsys):
    assert cli.main(["verify", "strategy=deepspeed", "strategy.stage=1", *SMALL, "--steps", "2"]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["equal", "1"], ["equal", "2"]]
    assert lines[1].endswith(f"strategy=deepspeed strategy.stage=1 {' '.join(SMALL)} (in fp32)")
    assert lines[-1] == "2 equal; 1 hash of initial weights"


def test_a_row_says_what_else_was_typed(capsys):
    words = ["+activation=selective", "strategy=ddp", "activation.budget=0.4", *SMALL]
    assert cli.main(["verify", *words, "optimizer=adamw", "--steps", "1"]) == EXIT_OK
    printed = capsys.readouterr()
    one, mix, *_ = [line.partition(" s  ")[2] for line in printed.out.splitlines()]
    typed = " ".join(["+activation=selective", "activation.budget=0.4", *SMALL, "optimizer=adamw"])
    assert (one, mix) == (f"one process {typed}", f"strategy=ddp {typed}")
    assert "optimizer=adamw isn't verified: every mix is trained with SGD and momentum.\n" in printed.err


def test_many_mixes_as_json(capsys):
    """What was typed for all of them is said once."""
    words = ["verify", "--mixes=*pp=gpipe", "--ranks", "2", "--json", "--steps", "2", *SMALL]
    assert cli.main(words) == EXIT_OK
    printed = capsys.readouterr()
    assert printed.err.startswith(f"Every mix with {' '.join(SMALL)}.\n")
    result = json.loads(printed.out)
    assert result["typed"] == SMALL
    assert result["verdicts"] == {"equal": 2}
    assert [row["mix"] for row in result["rows"]] == ["one process", "pp=gpipe"]
    assert len(result["initial_sha256"]) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pattern", ["pp:*", pytest.param("*", marks=pytest.mark.campaign)])
def test_planted_faults_are_caught(capsys, pattern):
    assert cli.main(["verify", f"--mutants={pattern}", "--steps", "3"]) == EXIT_OK
    verdicts = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "ranks" in line]
    assert verdicts.count("caught") == len([mutant for mutant in MUTANTS if fnmatch(mutant.name, pattern)]) > 4


def test_a_fault_that_changes_nothing_is_missed(capsys, monkeypatch):
    from framework.verify import rank

    monkeypatch.setattr(rank, "train", _healthy)
    assert cli.main(["verify", "--mutants=ddp: the sum*", "--steps", "2"]) == EXIT_RUN_FAILED
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["equal", "missed"]
    assert "missed: ddp: the sum instead of the mean (strategy=ddp)" in lines


def _healthy(plan, lr, by_rank, mutant):
    from framework.verify.rank import _train

    return _train(plan, lr)[0]


def test_a_wrong_mix_names_what_differs(capsys, monkeypatch):
    """`rank.train` of the real run has the fault in it."""
    from framework.verify import rank

    monkeypatch.setattr(rank, "train", _with_a_fault)
    assert cli.main(["verify", "+strategy=ddp", *SMALL, "--steps", "2"]) == EXIT_RUN_FAILED
    out = capsys.readouterr().out
    assert "wrong: +strategy=ddp" in out
    assert "first gradient tokens.weight: relative distance 1.0e+00, 2 times the wanted" in out
    assert "(times the size of dp_replicate" in out


def _with_a_fault(plan, lr, by_rank, mutant):
    from framework.verify.mutants import by_name
    from framework.verify.rank import _train

    if plan.world_size == 1:
        return _train(plan, lr)[0]
    with by_name("ddp: the sum instead of the mean"):
        return _train(plan, lr)[0]


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_stages_that_begin_inside_of_a_block_of_experts(capsys, schedule):
    """Two stages a rank of four layers: experts, which no operation without values touches, and a view that is sent."""
    small = [word for word in SMALL if "layers" not in word and "heads" not in word]
    words = ["model=moe", "model.layers=4", "model.heads=2", "model.experts=4", "model.dropout=0.2", *small]
    assert cli.main(["verify", f"+pp={schedule}", "pp.size=4", *words, "--steps", "2"]) == EXIT_OK, capsys.readouterr()


STRANGER = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Stranger(LightningModule):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 6)
        self.frozen.requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 0.0]))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("noise", torch.rand(6), persistent=False)

    def setup(self, stage):
        self.loss = nn.MSELoss()

    def training_step(self, batch):
        x, y = batch.pop("x"), batch.pop("y")
        x = self.frozen(x) + torch.arange(6) / 7 + self.noise
        for layer in self.layers:
            x = layer(x).tanh()
        self.calls += 1
        loss = self.loss(x, y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class Data(LightningDataModule):
    def train_dataloader(self):
        x, y = torch.randn(2, 64, 6, generator=torch.Generator().manual_seed(1))
        return DataLoader([{"x": a[:4], "y": b} for a, b in zip(x, y)])
"""


def test_a_strangers_module_with_everything_that_is_odd(capsys, tmp_path, monkeypatch):
    """Frozen weights, infinite and whole buffers, `setup`, no batch number, a batch taken apart, numbers made anew."""
    (tmp_path / "strangers_module.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(tmp_path)
    mine = ["model._target_=strangers_module.Stranger", "data._target_=strangers_module.Data"]
    assert cli.main(["verify", "+strategy=ddp", *mine, "--steps", "3"]) == EXIT_OK, capsys.readouterr()
    assert cli.main(["verify", "+strategy=fsdp", *mine, "--steps", "3"]) == EXIT_OK, capsys.readouterr()


def test_nothing_but_refusals_is_no_success(capsys):
    assert cli.main(["verify", "--mixes=*dualpipev*tp.size=4*", "--ranks", "2", *SMALL]) == EXIT_USAGE
    assert cli.main(["verify", "--mixes=tp=dtensor tp.size=4", "--steps", "1", *SMALL]) == EXIT_RUN_FAILED
    assert "refused" in capsys.readouterr().out


def test_what_is_refused_fails_when_it_is_forced(capsys):
    words = ["verify", "--mixes=tp=dtensor tp.size=4", "--force", "--steps", "1", *SMALL]
    assert cli.main(words) == EXIT_OK
    out = capsys.readouterr().out
    assert out.startswith("refused   4 ranks")
    assert "1 refused" in out


def test_a_needless_refusal_is_told(capsys, monkeypatch):
    """A mix is equal however often it is refused."""
    from framework_plugins.strategy.ddp import DDP

    monkeypatch.setattr(DDP, "check_plan", hookimpl(lambda self, plan: [Problem("strategy=ddp", "no")]))
    monkeypatch.setattr(plugin_manager._Manager, "_hooks", {})
    assert cli.main(["verify", "--mixes=strategy=ddp", "--ranks", "2", "--force", *SMALL]) == EXIT_RUN_FAILED
    out = capsys.readouterr().out
    assert "needless: strategy=ddp" in out
    assert "Forced, it is equal." in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--force"], "Type --mixes=all too"),
        (["--mixes=all", "strategy=ddp"], "Type one of the two"),
        (["--mixes=nothing"], "matches none of the"),
        (["--mutants", "--mixes=all"], "Leave --mixes=all out"),
        (["seed=3", "--mutants"], "Leave seed=3 out"),
        (["--mutants=none*"], "matches none of"),
        (["--mix=all"], "Type python -m framework verify --help"),
        (["logger=csv"], "verify sets logger itself"),
        (["precision=bf16-mixed"], "verify sets precision itself"),
        (["strategy=fspd"], "fsdp"),
        (["--mixes=pairwise", "--ranks", "0"], "Type --ranks 2"),
        (["--steps", "0"], "Type --steps 1"),
    ],
)
def test_what_was_typed_wrong_is_one_sentence(words, said, capsys):
    assert cli.main(["verify", *words]) == EXIT_USAGE
    assert said in capsys.readouterr().err


def test_mixes_are_products_that_fit_and_pairs_are_covered():
    mixes = list(every(OPTIONS, 8))
    assert len(mixes) == len(set(mixes))
    assert max(mix.ranks for mix in mixes) == 8
    assert [str(mix) for mix in mixes if mix.ranks == 2 and "tp=dtensor" in mix.words] == [
        "tp=dtensor", "tp=dtensor tp.loss_parallel=true",
    ]  # fmt: skip
    three = [mix for mix in mixes if len({word.partition("=")[0].partition(".")[0] for word in mix.words}) == 3]
    assert len(three) == 4
    assert not [mix for mix in three if "tp.loss_parallel=true" in mix.words]
    cover = pairwise(mixes)
    assert len(cover) < len(mixes) / 2
    for one, other in (("strategy=ddp", "pp=zbv"), ("tp.loss_parallel=true", "strategy.replicas=2")):
        together = [mix for mix in mixes if one in mix.words and other in mix.words]
        assert not together or [mix for mix in cover if one in mix.words and other in mix.words]


def test_a_long_run_leaves_out_what_shows_nothing_new():
    """Every option alone and every pair of options stays; of three concerns and of variants each word stays."""
    mixes = list(every(OPTIONS, 8))
    kept = thinned(mixes)
    out = set(mixes) - set(kept)
    assert out
    for mix in out:
        assert len({slot_of(word) for word in mix.words}) == 3 or "." in "".join(mix.words)
    assert {word for mix in kept for word in mix.words} == {word for mix in mixes for word in mix.words}


def test_a_part_of_a_variant_stands_alone_only():
    options = {"tp": {"dtensor": ("a=1", "b=1", "a=1 b=1")}, "pp": {"gpipe": ()}}
    words = {mix.words for mix in every(options, 4) if "tp.a=1" in mix.words and "tp.size=4" not in mix.words}
    both = ("tp=dtensor", "tp.a=1", "tp.b=1")
    assert words == {both[:2], both, (*both, "pp=gpipe")}


def test_the_reference_imports_nothing_of_ours():
    tree = ast.parse(Path(reference.__file__).read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    allowed = {"__future__", "collections", "contextlib", "dataclasses", "math", "typing", "torch"}
    assert {module.partition(".")[0] for module in modules} <= allowed


def test_there_are_enough_mutants_and_each_has_a_name_of_its_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 24
    assert command.GOOD == ("equal", "refused", "caught")
