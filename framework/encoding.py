"""Plain encoding of everything in a checkpoint that is not model or optimizer: JSON and named tensors, never pickle.

`encode` turns nested Python values into what JSON holds and sets tensors aside under names; `decode` is the inverse.
Types that JSON doesn't have are written as `{"$": tag, "value": ...}`. Only the types listed here pass, so
reading a checkpoint runs no code of whoever wrote it.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from omegaconf import Container, OmegaConf
from torch import Tensor
from torch.distributed.tensor import DTensor

from framework.checkpoint_files import CheckpointError

TAG = "$"
PREFIX = "meta"
"""Tensors found in the state are stored under `meta.<path of keys>`."""


def encode(value: Any, tensors: dict[str, Tensor], where: str = PREFIX) -> Any:
    """Return `value` as JSON holds it; puts the tensors found into `tensors` under `<where>.<keys>`.

    OmegaConf containers become plain ones, with interpolations resolved. Subclasses of str, int, dict, tuple become
    their base; an Enum its value.

    Raises:
        CheckpointError: a value's type is unknown; names its keys and type.
    """
    if value is None or isinstance(value, (bool, str, int, float)):
        return _number(value)
    if isinstance(value, Tensor):
        name = _free(where, tensors)
        _check_whole(value, where)
        tensors[name] = value.detach().clone()  # ModelCheckpoint keeps one score under several keys
        return _tagged("tensor", [name, str(value.dtype).removeprefix("torch."), list(value.shape)])
    if isinstance(value, Container):
        return encode(OmegaConf.to_container(value, resolve=True, enum_to_str=True), tensors, where)
    if isinstance(value, Enum):
        return encode(value.value, tensors, where)
    if isinstance(value, Counter):
        return _tagged("counter", _pairs(value, tensors, where))
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and TAG not in value:
            return {key: encode(item, tensors, f"{where}.{key}") for key, item in value.items()}
        return _tagged("dict", _pairs(value, tensors, where))
    if isinstance(value, list):
        return _items(value, tensors, where)
    for kind, tag in _SEQUENCES.items():
        if isinstance(value, kind):
            return _tagged(tag, _items(value, tensors, where))
    for kind, (tag, write, _) in _SCALARS.items():
        if isinstance(value, kind):
            return _tagged(tag, write(value))
    raise CheckpointError(
        f"The checkpoint can't hold {_said(where)}: {_type_name(value)} is not plain data."
        f" Leave it out (a hyper-parameter: self.save_hyperparameters(ignore=[...])), or store numbers, text, tensors,"
        f" lists and dicts instead"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `encode`; `tensors` holds at least those that `tensor_entries` lists."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    tag, content = value[TAG], value["value"]
    if tag == "tensor":
        return tensors[content[0]]
    if tag == "counter":
        return Counter({decode(key, tensors): decode(item, tensors) for key, item in content})
    if tag == "dict":
        return {decode(key, tensors): decode(item, tensors) for key, item in content}
    for kind, name in _SEQUENCES.items():
        if tag == name:
            return kind(decode(item, tensors) for item in content)
    for name, _, read in _SCALARS.values():
        if tag == name:
            return read(content)
    if tag == "float":
        return float(content)
    raise CheckpointError(f"The checkpoint holds a value of unknown kind '{tag}': it was written by a newer version")


def tensor_entries(value: Any) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name -> (dtype, shape) of the tensors that an encoded value refers to."""
    if isinstance(value, list):
        return {name: entry for item in value for name, entry in tensor_entries(item).items()}
    if not isinstance(value, dict):
        return {}
    if value.get(TAG) == "tensor":
        name, dtype, shape = value["value"]
        return {name: (dtype_of(dtype), tuple(shape))}
    return {name: entry for item in value.values() for name, entry in tensor_entries(item).items()}


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that is called `name` (`float32`)."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"The checkpoint holds a tensor of unknown dtype '{name}': it was written by a newer version"
        )
    return dtype


def tensor_paths(value: Any, where: str = PREFIX) -> set[str]:
    """Paths of the tensors that `encode` would set aside; copies nothing."""
    if isinstance(value, Tensor):
        return {where}
    if isinstance(value, Mapping):
        return {path for key, item in value.items() for path in tensor_paths(item, f"{where}.{key}")}
    if isinstance(value, (list, tuple, deque)):
        return {path for number, item in enumerate(value) for path in tensor_paths(item, f"{where}.{number}")}
    return set()


def check_pieces(everyone: Sequence[set[str]]) -> None:
    """Refuse tensors that other ranks keep and rank 0, whose state a checkpoint takes, does not (stages of a pipeline).

    Args:
        everyone: `tensor_paths` of each rank.
    """
    for rank, paths in enumerate(everyone):
        lost = sorted(paths - everyone[0])
        if lost:
            raise CheckpointError(
                f"The checkpoint would lose {_said(lost[0])} and {len(lost) - 1} more of rank {rank}: such state is"
                f" taken from rank 0, which has no tensor of that name. {_INSTEAD}"
            )


def _check_whole(value: Tensor, where: str) -> None:
    if isinstance(value, DTensor):
        raise CheckpointError(
            f"The checkpoint can't hold {_said(where)}: it is a piece of a sharded tensor, and such state is taken from"
            f" rank 0 alone. {_INSTEAD}"
        )
    if value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta:
        kind = "meta" if value.is_meta else "nested" if value.is_nested else "quantized" if value.is_quantized else None
        kind = kind or str(value.layout).removeprefix("torch.")
        raise CheckpointError(
            f"The checkpoint can't hold {_said(where)}: it is a {kind} tensor;"
            " store its parts as plain tensors (indices and values) instead."
        )


_INSTEAD = (
    'Put pieces into checkpoint["rank_state"], take .full_tensor() on all ranks, or for an average of weights use'
    " Lightning's EMAWeightAveraging."
)


def _said(where: str) -> str:
    return where.removeprefix(f"{PREFIX}.")


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {TAG: tag, "value": value}


def _number(value: Any) -> Any:
    if isinstance(value, Enum):
        return _number(value.value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _tagged("float", repr(float(value)))
    return int(value) if isinstance(value, int) else str(value)


def _items(value: Any, tensors: dict[str, Tensor], where: str) -> list[Any]:
    return [encode(item, tensors, f"{where}.{number}") for number, item in enumerate(value)]


def _pairs(value: Mapping[Any, Any], tensors: dict[str, Tensor], where: str) -> list[Any]:
    return [
        [encode(key, tensors, f"{where}.key"), encode(item, tensors, f"{where}.{key}")] for key, item in value.items()
    ]


def _free(where: str, tensors: Mapping[str, Tensor]) -> str:
    """Two values may have the same path (keys 1 and "1"): number the second."""
    name, count = where, 1
    while name in tensors:
        count += 1
        name = f"{where}~{count}"
    return name


def _type_name(value: Any) -> str:
    kind = value if isinstance(value, type) else type(value)
    text = f"{kind.__module__}.{kind.__qualname__}"
    return f"the class {text}" if isinstance(value, type) else f"an object of type {text}"


def _write_array(value: np.ndarray[Any, Any]) -> list[Any]:
    if value.dtype.hasobject:
        raise CheckpointError("The checkpoint can't hold a numpy array of Python objects: store numbers instead")
    if value.dtype.names is not None:
        raise CheckpointError("The checkpoint can't hold a numpy array with named fields: store each field by itself")
    return [value.dtype.str, list(value.shape), base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()]


def _read_array(value: list[Any]) -> np.ndarray[Any, Any]:
    dtype, shape, data = value
    return np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).reshape(shape).copy()


_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}

_SCALARS: dict[type, tuple[str, Any, Any]] = {
    bytes: ("bytes", lambda value: base64.b64encode(value).decode(), base64.b64decode),
    complex: ("complex", lambda value: [value.real, value.imag], lambda value: complex(*value)),
    np.ndarray: ("array", _write_array, _read_array),
    np.generic: ("scalar", lambda value: _write_array(np.asarray(value)), lambda value: _read_array(value)[()]),
    torch.dtype: ("dtype", lambda value: str(value).removeprefix("torch."), dtype_of),
    torch.device: ("device", str, torch.device),
    # A timedelta's parts are ints: exact.
    timedelta: ("timedelta", lambda v: [v.days, v.seconds, v.microseconds], lambda v: timedelta(*v)),
    datetime: ("datetime", datetime.isoformat, datetime.fromisoformat),
    date: ("date", date.isoformat, date.fromisoformat),  # after `datetime`, which is one
    # Pure, so that a path of another operating system reads too; a str would be as good for our own use.
    PurePath: ("path", str, str),
}
"""Type -> (tag, how it is written, how it is read). A path is read as text."""
