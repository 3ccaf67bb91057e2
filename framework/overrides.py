"""The command line, token by token, before Hydra composes: both spellings of a group, and every mistake at once.

`+strategy=fsdp` and `strategy=fsdp` mean the same. Hydra wants one or the other, depending on whether the group is in
the defaults list, so each token gets the prefix that Hydra wants. Single keys (`trainer.max_steps=4`) get `++`, which
Hydra always takes: whether the key exists is checked afterwards (`guard.py`), with all other complaints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException

from framework.catalog import CUSTOM, NONE, catalog
from framework.errors import Problem
from framework.plugin_manager import packages
from framework.schema import LIST_SLOTS

CUSTOM_SLOTS = ("model", "data")


@dataclass
class CommandLine:
    """What the tokens came to.

    Attributes:
        tokens: for Hydra.
        problems: complaints about single tokens.
        chosen: groups of which an option was asked for.
        spoilt: groups whose token was refused; complaints about their keys would only repeat that.
        sweeps: whether a token holds several values.
    """

    tokens: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    chosen: set[str] = field(default_factory=set)
    spoilt: set[str] = field(default_factory=set)
    sweeps: bool = False


def read(
    tokens: Sequence[str], groups: Mapping[str, Sequence[str]], listed: Iterable[str], *, multirun: bool = False
) -> CommandLine:
    """Check and respell `tokens`.

    Args:
        tokens: overrides as typed.
        groups: concern -> options on the search path, those of the user's own folder included.
        listed: groups that have an entry in the defaults list.
        multirun: whether several values a key are jobs of a sweep.
    """
    result = CommandLine()
    parser = OverridesParser.create()
    listed = {*listed, *LIST_SLOTS}
    seen: dict[str, str] = {}
    for token in tokens:
        try:
            override = parser.parse_override(token)
        except HydraException as error:
            result.problems.append(_unreadable(token, error))
            result.spoilt.add(token.lstrip("+~").partition("=")[0].partition(".")[0])
            continue
        name = override.key_or_group
        if name in seen and seen[name] != token.lstrip("+"):
            reason = f"{seen[name]} is there too, and only one can count"
            result.problems.append(Problem(token, reason, f"one of {seen[name]} and {token.lstrip('+')}"))
            result.spoilt.add(name)
            continue
        if name in seen:
            continue
        seen[name] = token.lstrip("+")
        if name.startswith(("hydra.", "hydra/")) or override.package is not None:
            result.tokens.append(token)
            continue
        result.sweeps |= override.is_sweep_override()
        if override.is_sweep_override() and not multirun:
            result.problems.append(_several(token, name, override))
            result.spoilt.add(name.partition(".")[0])
        elif name in groups:
            _group(token, override, groups, listed, result)
        else:
            _key(token, override, result)
    _customise(seen, result)
    return result


def _key(token: str, override: Override, result: CommandLine) -> None:
    """Take a single key; deletion stays what it is."""
    if override.is_delete():
        result.tokens.append(token)
    elif "/" in override.key_or_group:
        group = override.key_or_group.partition("/")[0]
        result.problems.append(
            Problem(token, "a concern has no sub-folders", f"{group}=" + "|".join(catalog().of(group)))
        )
    else:
        result.tokens.append("++" + token.lstrip("+"))


def _group(
    token: str, override: Override, groups: Mapping[str, Sequence[str]], listed: Iterable[str], result: CommandLine
) -> None:
    """Take the choice of an option, with the prefix that Hydra wants."""
    name = override.key_or_group
    right = ("" if name in listed else "+") + token.lstrip("+~")
    problem = None
    if override.is_delete():
        problem = Problem(token, "a concern isn't deleted but switched off", f"{name}={NONE}")
    elif override.is_force_add():
        problem = Problem(token, "++ is for single keys, not for a choice of a whole concern", right)
    else:
        unknown = [option for option in _options(override) if option not in groups[name]]
        if unknown:
            problem = unknown_option(name, unknown[0], groups[name], token)
    if problem is None:
        result.tokens.append(right)
        result.chosen.add(name)
    else:
        result.problems.append(problem)
        result.spoilt.add(name)


def _options(override: Override) -> list[str]:
    """Return every option that the token names, over all jobs of a sweep and all entries of a list."""
    if override.is_sweep_override():
        return [
            text.strip("'\"")
            for value in override.sweep_string_iterator()
            for text in value.strip("[]").split(",")
            if text
        ]
    value = override.value()
    values = value if isinstance(value, list) else [value]
    return ["null" if v is None else v.text if isinstance(v, QuotedString) else str(v) for v in values]


def unknown_option(slot: str, name: str, known: Sequence[str], token: str) -> Problem:
    """Say that a concern has no such option: what there is, and which broken plugin may be the cause.

    Called for a token, and for a recipe that names an option that isn't there.
    """
    causes = [
        package for package in packages().unusable if owns(package.distribution, slot, name)
    ] or packages().unusable
    reason = f"there is no {slot} {name!r}; there is {', '.join(sorted(known))}"
    if causes:
        reason += ". " + " ".join(package.complaint() for package in causes).rstrip(".")
    promised = [warning for warning in catalog().warnings if "isn't in its distribution" in warning]
    if promised:
        reason += ". " + " ".join(promised).rstrip(".")
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    if name == "null":
        close = [NONE]
    return Problem(token, reason, f"{slot}={close[0]}" if close else "")


def owns(distribution: str, slot: str, option: str) -> bool:
    """Return whether an installed distribution lists the file `<slot>/<option>.yaml`, though it can't be loaded."""
    from importlib.metadata import PackageNotFoundError, files

    try:
        listed = files(distribution) if distribution else None
    except PackageNotFoundError:
        return False
    return any(str(path).endswith(f"/{slot}/{option}.yaml") for path in listed or ())


def _several(token: str, name: str, override: Override) -> Problem:
    """Say that several values make a sweep."""
    plain = name.partition(".")[0]
    fix = f"-m {token} for one job a value"
    if plain in LIST_SLOTS:
        fix = f"'{name}=[{','.join(override.sweep_string_iterator())}]' for all of them in one run, or {fix}"
    return Problem(token, "several values are jobs of a sweep", fix)


def _unreadable(token: str, error: HydraException) -> Problem:
    """Say where the grammar broke, and how such a value is quoted."""
    key, separator, value = token.partition("=")
    why = str(error).splitlines()[0]
    if not separator:
        return Problem(token, "it isn't key=value", "python -m framework --help to see what can be set")
    quoted = value.strip("'\"").replace('"', '\\"')
    return Problem(token, f"its value can't be read ({why})", f"'{key}=\"{quoted}\"', with both kinds of quotes")


def _customise(seen: Mapping[str, str], result: CommandLine) -> None:
    """`model._target_=my.Class` without `model=...`: start from nothing, without another model's fields."""
    for slot in CUSTOM_SLOTS:
        if f"{slot}._target_" in seen and slot not in seen:
            result.tokens.insert(0, f"{slot}={CUSTOM}")
            result.chosen.add(slot)
