"""Checks of a composed tree, all at once: unknown keys, missing values, broken interpolations, wrong types.

Hydra takes any key that is added, so a typo would silently do nothing; and it evaluates a value when it is touched, so
a broken one would be met deep in the run. Here everything is touched once, before anything starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from framework.catalog import catalog
from framework.errors import Problem
from framework.schema import RunConfig, TrainerSettings

TRAINER = {field.name for field in fields(TrainerSettings)}


def settings() -> list[str]:
    """Return the names of the root that aren't concerns."""
    return [field.name for field in fields(RunConfig) if field.name not in catalog().slots]


def check_keys(config: DictConfig) -> Iterator[Problem]:
    """Yield a complaint for every key at the root and in `trainer` that nobody reads."""
    known = {*settings(), *catalog().slots}
    plain: Any = OmegaConf.to_container(config, resolve=False)
    for key, value in plain.items():
        if key not in known:
            yield unknown_key(str(key), value, "", known)
    if isinstance(plain.get("trainer"), dict):
        for key, value in plain["trainer"].items():
            if key not in TRAINER:
                yield unknown_key(f"trainer.{key}", value, "trainer", TRAINER)


def unknown_key(full_key: str, value: Any, section: str, known: Iterable[str]) -> Problem:
    """Name the nearest valid setting: one with the same last word elsewhere first, then one spelled alike.

    Args:
        full_key: as typed.
        value: as typed.
        section: the concern (or `trainer`) that the key was looked for in; empty at the root.
        known: names that the section has.
    """
    leaf = full_key.rpartition(".")[2]
    known = sorted(str(name) for name in known)
    everything = all_settings()
    elsewhere = [path for path in everything if path.rpartition(".")[2] == leaf and path != full_key]
    close = get_close_matches(leaf, known, n=1, cutoff=0.6)
    part = [name for name in known if leaf in name.split("_") or name.endswith(f"_{leaf}")]
    prefix = f"{section}." if section else ""
    owner = f"{section} has" if section else "there is"
    if elsewhere:
        meant = elsewhere[0]
    elif close or part:
        meant = prefix + (close or part)[0]
    else:
        far = get_close_matches(leaf, [path.rpartition(".")[2] for path in everything], n=1, cutoff=0.7)
        meant = next((path for path in everything if far and path.rpartition(".")[2] == far[0]), "")
    asked = full_key if isinstance(value, (dict, list)) else f"{full_key}={as_typed(value)}"
    if meant:
        return Problem(asked, f"{owner} no setting {leaf!r}", typeable(meant, value))
    if section:
        return Problem(asked, f"{section} has no setting {leaf!r}; there is {', '.join(known)}")
    return Problem(asked, f"there is no setting {leaf!r}", "python -m framework --help to see all of them")


def typeable(key: str, value: Any = None) -> str:
    """Return `key=value` as it would be typed; with `<value>` where none is known."""
    return f"{key}=<value>" if value is None or isinstance(value, (dict, list)) else f"{key}={as_typed(value)}"


def as_typed(value: Any) -> str:
    """Return a plain value as YAML and Hydra spell it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def all_settings() -> list[str]:
    """Return the full key of everything that could be set: root, trainer, then every option's own fields."""
    paths = [*settings(), *catalog().slots, *(f"trainer.{name}" for name in sorted(TRAINER))]
    for slot, options in catalog().options.items():
        for option in options.values():
            paths += [f"{slot}.{name}" for name in option.values if not str(name).startswith("_")]
    return list(dict.fromkeys(paths))


def check_values(config: DictConfig) -> Iterator[Problem]:
    """Yield a complaint for every `???` and every interpolation that can't be resolved, with its full key."""
    for key, text, error in _faults(config, ""):
        if error is None:
            yield Problem(f"{key}=???", f"the setting {key} must have a value and has none", typeable(key))
            continue
        if isinstance(error, InterpolationToMissingValueError):
            continue  # the key it points to is named itself
        why = re.sub(r"\s+(full_key|object_type|reference_type)[:=].*", "", " ".join(str(error).split()))
        known = list(_keys(config, ""))
        wanted = [name for name in re.findall(r"\$\{\.*([A-Za-z_][\w.]*)\}", text) if name not in known]
        close = [near for name in wanted for near in get_close_matches(name, known, n=1, cutoff=0.7)]
        yield Problem(f"{key}={text}", why, f"'{key}=${{{close[0]}}}'" if close else "")


def _faults(node: DictConfig | ListConfig, prefix: str) -> Iterator[tuple[str, str, Exception | None]]:
    """Yield (full key, raw text, error) of every value below `node` that is missing (error None) or doesn't resolve."""
    raw: Any = OmegaConf.to_container(node, resolve=False)
    for name in range(len(node)) if isinstance(node, ListConfig) else list(node):
        key = f"{prefix}[{name}]" if isinstance(node, ListConfig) else f"{prefix}.{name}".lstrip(".")
        if OmegaConf.is_missing(node, name):
            yield key, "???", None
            continue
        try:
            value = node[name]
        except (OmegaConfBaseException, ValueError, KeyError) as error:
            yield key, str(raw[name]), error
            continue
        if isinstance(value, (DictConfig, ListConfig)) and not OmegaConf.is_interpolation(node, name):
            yield from _faults(value, key)


def _keys(node: DictConfig, prefix: str) -> Iterator[str]:
    """Yield the full key of every node below `node`."""
    for name in map(str, node):
        key = f"{prefix}.{name}".lstrip(".")
        yield key
        if not OmegaConf.is_interpolation(node, name) and not OmegaConf.is_missing(node, name):
            value = node[name]
            if isinstance(value, DictConfig):
                yield from _keys(value, key)


def typed(schema: type, values: Mapping[str, Any], prefix: str = "") -> tuple[DictConfig, list[Problem]]:
    """Convert plain `values` to the types of a dataclass, one by one, so that every complaint is heard.

    Args:
        schema: the dataclass.
        values: name -> value; names that the dataclass doesn't have must be gone.
        prefix: section of the names, for messages.
    """
    config = OmegaConf.structured(schema)
    problems = []
    for name, value in values.items():
        try:
            # a mapping can't be merged into a None (`tp.plan`)
            OmegaConf.update(config, name, value, merge=OmegaConf.select(config, name) is not None)
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            why = str(error).splitlines()[0]
            problems.append(Problem(f"{prefix}{name}={as_typed(value)}", why))
    return config, problems


def check_ranges(root: DictConfig) -> Iterator[Problem]:
    """Yield complaints about settings of the root and of `trainer` whose type is right and whose value can't be."""
    at_least = {
        "seed": 0, "num_nodes": 1, "global_batch_size": 1, "micro_batch_size": 1, "threads": 1, "trainer.max_steps": -1,
        "trainer.max_epochs": -1, "trainer.accumulate_grad_batches": 1, "trainer.gradient_clip_val": 0,
        "trainer.num_sanity_val_steps": -1, "trainer.log_every_n_steps": 0, "trainer.check_val_every_n_epoch": 1,
    }  # fmt: skip
    one_of = {
        "accelerator": ("auto", "cpu", "cuda"),
        "on_nonfinite": ("raise", "skip"),
        "trainer.gradient_clip_algorithm": ("norm", "inf_norm", "value"),
    }
    for key, least in at_least.items():
        value = OmegaConf.select(root, key)
        if value is not None and value < least:
            yield Problem(f"{key}={value}", f"the smallest is {least}", f"{key}={least}")
    for key, words in one_of.items():
        value = OmegaConf.select(root, key)
        if value not in words:
            close = get_close_matches(str(value), words, n=1, cutoff=0.5)
            yield Problem(
                f"{key}={value}", f"it is one of {', '.join(words)}", f"{key}={close[0] if close else words[0]}"
            )
    if root.seed >= 2**32:
        yield Problem(f"seed={root.seed}", "the largest is 4294967295 (32 bits)")
    if not root.timeout_s > 0:
        yield Problem(f"timeout_s={root.timeout_s}", "a time limit is more than 0 seconds", "timeout_s=1800")
    if not re.fullmatch(r"[A-Za-z0-9._-]+", root.name):
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", root.name).strip("-") or "framework"
        yield Problem(f"name={root.name}", "it names files: letters, digits, dot, dash and underscore", f"name={plain}")
