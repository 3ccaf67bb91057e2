"""State that is neither model nor optimizer: plain JSON and tensors, the same when it comes back, never code (P22)."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from datetime import date, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from framework.checkpoint_files import CheckpointError
from framework.encoding import check_pieces, decode, encode, tensor_entries, tensor_paths


class Color(StrEnum):
    RED = "red"


def through_json(value):
    tensors = {}
    plain = json.loads(json.dumps(encode(value, tensors), allow_nan=False))
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == tensor_entries(plain)
    return decode(plain, tensors)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        1 / 3,
        math.inf,
        -math.inf,
        "text",
        b"\x00\xff",
        1 + 2j,
        [1, [2, {"a": None}]],
        (1, (2,)),
        {1, 2},
        frozenset({"a"}),
        deque([1, 2]),
        {"$": "a key of our own", "value": 1},
        {1: "one", "1": "text", (2, 3): "pair", None: 0},
        Counter({10: 1, 20: 2}),
        timedelta(days=1, microseconds=7),
        datetime(2024, 2, 29, 12, 30),
        date(2024, 2, 29),
        torch.bfloat16,
        torch.device("cpu"),
    ],
)
def test_comes_back_equal_and_of_its_type(value):
    back = through_json(value)
    assert back == value
    assert type(back) is type(value)


def test_not_a_number_and_arrays():
    assert math.isnan(through_json(float("nan")))
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)
    back = through_json({"a": array, "s": np.float32(0.1)})
    assert np.array_equal(back["a"], array)
    assert back["a"].dtype == array.dtype
    assert back["s"] == np.float32(0.1)


def test_base_types_stand_for_their_subclasses():
    back = through_json({"e": Color.RED, "o": OrderedDict(a=1), "p": Path("a/b"), "size": torch.Size([2])})
    assert back == {"e": "red", "o": {"a": 1}, "p": "a/b", "size": (2,)}


def test_tensors_go_aside_under_their_keys():
    tensors = {}
    shared = torch.ones(2)
    encode({"a": {"b": shared, 1: torch.tensor(3)}, "c": [shared, torch.zeros(0)]}, tensors)
    assert len(tensors) == 4
    assert torch.equal(tensors["meta.a.b"], torch.ones(2))
    back = through_json({"a": torch.tensor(1.5), "b": {"x": torch.arange(3)}})
    assert back["a"].item() == 1.5
    assert back["b"]["x"].tolist() == [0, 1, 2]


def test_two_keys_that_look_alike_keep_their_tensors():
    back = through_json({"k": {1: torch.tensor(1), "1": torch.tensor(2)}})
    assert (back["k"][1].item(), back["k"]["1"].item()) == (1, 2)


def test_p22_config_objects_become_plain_and_resolved():
    config = OmegaConf.create({"width": 8, "double": "${width}", "names": ["a", "b"], "deep": {"x": "${..double}"}})
    back = through_json({"hyper_parameters": config})["hyper_parameters"]
    assert back == {"width": 8, "double": 8, "names": ["a", "b"], "deep": {"x": 8}}
    assert type(back) is dict
    assert type(back["names"]) is list


@pytest.mark.parametrize("value", [torch.nn.ReLU(), lambda x: x, SimpleNamespace(a=1), torch.optim.AdamW, object()])
def test_what_isnt_data_is_refused_with_keys_and_type(value):
    with pytest.raises(CheckpointError, match=r"hyper_parameters\.act.*(type|class) \S+"):
        encode({"hyper_parameters": {"act": value}}, {})


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.eye(2).to_sparse(), r"x\.y: it is a sparse_coo tensor; store its parts"),
        (torch.empty(2, device="meta"), "it is a meta tensor"),
        (np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]), "named fields: store each field by itself"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(value, told):
    with pytest.raises(CheckpointError, match=told):
        encode({"x": {"y": value}}, {})


def test_tensors_that_only_other_ranks_keep_are_refused():
    kept = [{"a": {0: torch.ones(1)}}, {"a": {0: torch.ones(1)}, "b": [torch.ones(1), torch.ones(1)]}]
    check_pieces([tensor_paths(kept[1]), tensor_paths(kept[0])])
    with pytest.raises(CheckpointError, match=r"would lose b\.0 and 1 more of rank 1.*checkpoint\[\"rank_state\"\]"):
        check_pieces([tensor_paths(one) for one in kept])


def test_unknown_tags_are_refused():
    with pytest.raises(CheckpointError, match="unknown kind 'module'"):
        decode({"$": "module", "value": "os.system"}, {})
    with pytest.raises(CheckpointError, match="unknown dtype"):
        decode({"$": "dtype", "value": "save"}, {})
