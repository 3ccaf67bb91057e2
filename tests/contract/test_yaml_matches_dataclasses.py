"""A YAML option and its dataclass are one thing written twice: the same fields, and the same defaults."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.objects import locate
from framework.plugin_manager import OBJECT_SLOTS
from framework.schema import DEFAULT_SLOTS, LIST_SLOTS, SLOTS, RunConfig, TrainerSettings

CONF = Path(__file__).parents[2] / "conf"
COMPONENTS = sorted(file for file in CONF.glob("*/*.yaml") if file.parent.name not in OBJECT_SLOTS)


def name(file: Path) -> str:
    return f"{file.parent.name}={file.stem}"


def read(file: Path) -> tuple[type, dict[str, Any]]:
    values = yaml.safe_load(file.read_text())
    return locate(values.pop("_target_")), values


def default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


@pytest.mark.parametrize("file", COMPONENTS, ids=name)
def test_every_field_and_no_other(file: Path) -> None:
    cls, values = read(file)
    assert is_dataclass(cls)
    assert set(values) == {field.name for field in fields(cls) if field.init}


def test_defaults_are_those_of_the_class() -> None:
    """Where one YAML is the class's only one; several YAMLs of a class differ in what they are for."""
    by_class = defaultdict(list)
    for file in COMPONENTS:
        by_class[read(file)[0]].append(file)
    only = {cls: files[0] for cls, files in by_class.items() if len(files) == 1}
    assert only
    differing = {
        f"{name(file)}.{field.name}": (values[field.name], default(field))
        for cls, file in only.items()
        for values in [read(file)[1]]
        for field in fields(cls)
        if field.init and default(field) is not MISSING and values.get(field.name) != default(field)
    }
    assert not differing


def test_train_yaml_lists_every_setting() -> None:
    train = yaml.safe_load((CONF / "train.yaml").read_text())
    named = {field.name for field in fields(RunConfig)} - set(SLOTS)
    assert set(train) - {"defaults", "hydra"} == named
    assert set(train["trainer"]) == {field.name for field in fields(TrainerSettings)}


def test_train_yaml_chooses_for_every_concern_that_always_has_a_choice() -> None:
    train = yaml.safe_load((CONF / "train.yaml").read_text())
    chosen = {key: value for entry in train["defaults"] if isinstance(entry, dict) for key, value in entry.items()}
    assert {slot for slot in chosen if not slot.startswith("override ")} == {*DEFAULT_SLOTS, *LIST_SLOTS}


def test_train_yaml_has_the_defaults_of_the_schema() -> None:
    train = yaml.safe_load((CONF / "train.yaml").read_text())
    schema = {field.name: default(field) for field in fields(RunConfig)}
    plain = {key: value for key, value in train.items() if key not in ("defaults", "hydra", "trainer", *SLOTS)}
    differing = {key: (value, schema[key]) for key, value in plain.items() if "${" not in str(value)}
    assert {key: pair for key, pair in differing.items() if pair[0] != pair[1]} == {}
    assert train["trainer"] == {field.name: default(field) for field in fields(TrainerSettings)}


def test_every_concern_has_a_folder_of_options_or_none_at_all() -> None:
    assert {folder.name for folder in CONF.iterdir() if folder.is_dir()} <= set(SLOTS)
