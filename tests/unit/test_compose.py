"""From words to a plan: what is resolved; everything wrong is said at once, by its full key (cases P03, P06)."""

from __future__ import annotations

import dataclasses
import re

import pytest
import yaml

from framework import paths
from framework.catalog import catalog
from framework.compose import compose
from framework.draft import DEFAULT_STEPS
from framework.errors import PlanError, UsageError
from framework.guide import setting_docs
from framework.objects import locate
from framework.plan import RunPlan
from framework.plugin_manager import OBJECT_SLOTS, manager_for
from framework.schema import LIST_SLOTS, SLOTS, RunConfig, TrainerSettings


def plan(*overrides: str, **more) -> RunPlan:
    return compose(overrides, model=False, **more)


def complaints(*overrides: str, **more) -> list[str]:
    with pytest.raises(PlanError) as caught:
        plan(*overrides, **more)
    return [str(problem) for problem in caught.value.problems]


def test_both_spellings_give_the_same_plan():
    first, second = plan("+strategy=fsdp", "+pp=gpipe", "run_dir=x"), plan("strategy=fsdp", "pp=gpipe", "run_dir=x")
    assert first.with_(run_id="") == second.with_(run_id="")
    assert first.chosen("strategy") == "fsdp"
    assert first.chosen("pp") == "gpipe"
    assert first.mesh.shape == (2, 1, 2, 1, 1)


def test_none_switches_any_concern_off():
    off = plan("strategy=none", "pp=none", "logger=none", "callbacks=none", "recovery=none", "comm=none")
    assert off.chosen("strategy") is off.chosen("recovery") is off.chosen("comm") is None
    assert not off.components.get("logger")
    assert off.timeout_s == 1800.0, "without comm the time limit has its own default"
    assert plan("model=mlp", "model=mlp").chosen("model") == "mlp"


def test_a_plan_is_plain_and_workers_rebuild_the_components():
    made = plan("+strategy=ddp", "strategy.bucket_cap_mb=5", "logger=csv")
    assert RunPlan.from_dict(yaml.safe_load(yaml.safe_dump(made.to_dict()))).components == made.components
    assert manager_for(made).get_plugin("strategy").bucket_cap_mb == 5.0
    assert made.components["strategy"]["_target_"] == "framework_plugins.strategy.ddp.DDP"
    assert list(made.components["logger"]) == ["csv"]


def test_the_folder_is_absolute_before_anything_refers_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = plan("run_dir=mine")
    assert made.run_dir == str(tmp_path / "mine")
    assert made.components["logger"]["csv"]["save_dir"] == made.run_dir
    assert not list(tmp_path.iterdir()), "composing writes nothing"
    default = plan().run_dir
    assert re.fullmatch(r"[A-Za-z0-9._/-]+", default[len(str(tmp_path)) :])


def test_a_path_with_equals_and_blanks_reaches_the_plan_unchanged(tmp_path):
    path = tmp_path / "a b" / "epoch=1-step=2.ckpt"
    path.parent.mkdir()
    path.touch()
    assert plan(f'ckpt_path="{path}"').ckpt_path == str(path)
    (text,) = complaints(f"ckpt_path={path}")
    assert f"'ckpt_path=\"{path}\"'" in text, "unquoted: the right spelling is shown"
    (text,) = complaints(f'ckpt_path="{path}x"')
    assert "no such file" in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=0x10", ["seed=0x10", "Integer"]),
        ("seed=true", ["seed=true"]),
        ("seed=-1", ["seed=-1", "smallest is 0"]),
        ("trainer.max_steps=1.5", ["trainer.max_steps=1.5"]),
        ("trainer.max_stepz=1", ["'max_stepz'", "Type trainer.max_steps=1."]),
        ("+trainer.max_stepz=1", ["Type trainer.max_steps=1."]),
        ("trainer.devices=2", ["Type devices=2."]),
        ("trainer.seed=2", ["Type seed=2."]),
        ("strateg=fsdp", ["'strateg'", "Type strategy=fsdp."]),
        ("batch_size=4", ["Type micro_batch_size=4."]),
        ("globalbatchsize=4", ["Type global_batch_size=4."]),
        ("accelerator=gpu", ["cuda"]),
        ("on_nonfinite=ignore", ["raise, skip"]),
        ("timeout_s=0", ["timeout_s=0", "more than 0"]),
        ("name=a b", ["Type name=a-b."]),
        (
            "strategy.size=2",
            ["no strategy is chosen", "strategy=ddp or strategy=deepspeed or strategy=fsdp or strategy=horovod"],
        ),
        ("pp.size=4", ["no pp is chosen", "pp=gpipe"]),
        ("model.widht=4", ["'widht'", "Type model.width=4."]),
        ("logger.csv.fil=x", ["Type logger.csv.file=x."]),
        ("recovery.max_restart=1", ["Type recovery.max_restarts=1."]),
        ("recovery.max_restarts=often", ["recovery.max_restarts=often"]),
        ("logs.level=loud", ["logs.level=loud"]),
        ("sampler._target_=os.path.join", ["installed plugin", "framework_plugins"]),
        ("recovery._target_=framework_plugins.recovery.restart.Restar", ["no 'Restar'", "'Restart'"]),
        ("model=none", ["without a model", "model=gpt"]),
        ("data.path=???", ["data.path"]),
        ("model.width=${model.hiddne}", ["model.width", "'model.hiddne' not found", "${model.hidden}"]),
    ],
)
def test_one_mistake_is_one_sentence(override, words):
    (text,) = complaints(override)
    for word in words:
        assert word in text
    assert "\n" not in text


def test_a_key_of_a_chosen_option_is_checked():
    (text,) = complaints("+pp=gpipe", "pp.n_microbatches=3")
    assert "Type pp.microbatches=3." in text
    (text,) = complaints("+strategy=fsdp", "strategy.shardin=full_shard")
    assert "Type strategy.sharding=full_shard." in text
    (text,) = complaints("+strategy=fsdp", "strategy.sharding=half")
    assert "full_shard or shard_grad_op" in text


def test_all_complaints_come_together():
    found = complaints(
        "foo=1", "+trainer.max_stepz=1", "+pp=gpip", "pp.n_microbatches=3", "seed=0x10", "name=a b",
        "data.path=???", "model.width=${model.hiddne}", "model.widht=3", "strategy.size=2", "logger.csv.fil=3",
    )  # fmt: skip
    asked = [text.partition(":")[0].lstrip("+").partition("=")[0] for text in found]
    assert sorted(asked) == sorted([
        "foo", "trainer.max_stepz", "pp", "seed", "name", "data.path", "model.width", "model.widht", "strategy.size",
        "logger.csv.fil",
    ]), "each once; what follows from a refused choice isn't repeated"  # fmt: skip


def test_a_run_of_unsaid_length_ends():
    assert plan().trainer["max_steps"] == DEFAULT_STEPS
    assert plan("trainer.max_epochs=2").trainer["max_steps"] == -1
    assert plan("trainer.max_steps=7").trainer["max_steps"] == 7


def test_arithmetic_is_refused_with_its_numbers():
    (text,) = complaints("devices=2")
    assert "+strategy=ddp" in text
    (text,) = complaints("+pp=gpipe", "+tp=dtensor", "devices=2")
    assert "pp 2 x tp 2 = 4" in text
    (text,) = complaints("+pp=gpipe", "pp.microbatches=3", "global_batch_size=8")
    assert "pp.microbatches=3" in text
    assert "8 samples" in text
    (text,) = complaints("+strategy=ddp", "global_batch_size=33")
    assert "33" in text
    assert "2 data ranks" in text


def test_a_failing_import_shows_its_cause(tmp_path, monkeypatch):
    (tmp_path / "user_broken.py").write_text("raise ImportError('libfoo missing')\n")
    (tmp_path / "user_deep.py").write_text("import user_notthere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for target, cause in (
        ("user_broken.Model", "libfoo missing"),
        ("user_deep.Model", "No module named 'user_notthere'"),
        ("user_nowhere.Model", "no module 'user_nowhere'"),
        ("Model", "dotted path"),
    ):
        with pytest.raises(PlanError) as caught:
            compose([f"model._target_={target}"])
        assert cause in str(caught.value)
        assert f"model._target_={target}" in str(caught.value)


USER = """
from lightning.pytorch import LightningModule
class Mine(LightningModule):
    def __init__(self, width: int, scale: float = 1.0, label: str | None = None):
        super().__init__()
    def training_step(self, batch):
        raise NotImplementedError
class Picky(Mine):
    def __init__(self, **anything):
        super().__init__(1)
class NoModule:
    pass
"""


def test_arguments_of_a_users_class_are_held_against_its_signature(tmp_path, monkeypatch):
    (tmp_path / "user_model.py").write_text(USER)
    monkeypatch.syspath_prepend(str(tmp_path))

    def said(*overrides):
        with pytest.raises(PlanError) as caught:
            compose(overrides)
        return str(caught.value)

    text = said("model._target_=user_model.Mine", "model.widht=3", "model.scale=big")
    assert "model.width: user_model.Mine needs it" in text, "missing"
    assert "Type model.width." in text, "nearest"
    assert "model.scale=big" in text, "type"
    assert "is no LightningModule" in said("model._target_=user_model.NoModule")
    made = compose(["model._target_=user_model.Mine", "model.width=3", "model.scale=2"])
    assert made.components["model"] == {
        "_target_": "user_model.Mine", "option": "custom", "width": 3, "scale": 2,
    }, "nothing of model=gpt is left"  # fmt: skip
    assert made.facts["parameters"] == 0
    assert compose(["model._target_=user_model.Picky", "model.whatever=3"]).components["model"]["whatever"] == 3


def test_a_recipe_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(UsageError, match="no such recipe"):
        plan(config_name="gpt_tinny")


# -- the catalogue -----------------------------------------------------------------------------------------------


def test_train_yaml_lists_every_setting_with_its_default_and_a_comment():
    text = (paths.conf_dir() / "train.yaml").read_text()
    tree = yaml.safe_load(text)
    listed = {key: value for key, value in tree.items() if key not in ("defaults", "hydra", "trainer", "run_dir")}
    fields = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    expected = {name: default for name, default in fields.items() if name not in (*SLOTS, "trainer", "run_dir")}
    assert listed | {"timeout_s": expected["timeout_s"]} == expected
    assert str(expected["timeout_s"]) in listed["timeout_s"], "an interpolation with the same default"
    assert tree["trainer"] == dataclasses.asdict(TrainerSettings())
    commented = {name.partition("=")[0].rpartition(".")[2] for name in setting_docs(text)}
    assert commented == {*listed, "run_dir", *tree["trainer"]}


@pytest.mark.parametrize("slot", list(SLOTS))
def test_every_bundled_option_has_a_first_line_and_all_its_fields(slot):
    for option in catalog().options[slot].values():
        if option.package != "bundled":
            continue
        assert option.doc, f"{option.place} must begin with a comment that says what it is"
        entries = option.values if slot in LIST_SLOTS else {option.name: option.values}
        assert list(entries) == [option.name], option.place
        values = entries[option.name]
        names = set(values) - {"_target_"}
        if slot in OBJECT_SLOTS:
            continue  # held against the signature where the class is tested; importing it would import torch
        fields = [field.name for field in dataclasses.fields(locate(values["_target_"])) if field.init]
        assert names == set(fields), option.place
        for line in option.text.splitlines():
            if re.match(r"^[a-z_]+:", line) and not line.startswith("_target_"):
                followed = option.text.split(line, 1)[1].lstrip("\n")
                assert "#" in line or followed.startswith(" "), f"{option.place}: {line!r} has no comment"
