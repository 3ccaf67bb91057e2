"""Objects by `_target_`: import the class, hold the arguments against its signature, build it.

For the slots `model`, `data`, `logger` and `callbacks`, which take any class of the user's, nested to any depth.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from framework.errors import Problem, UsageError

HYDRA_KEYS = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
"""Keys that Hydra's `instantiate` reads itself."""

_SIMPLE: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}
"""Annotations that are checked, with the values they take."""


def locate(target: str) -> Any:
    """Import the class or function with the dotted path `target`.

    Raises:
        UsageError: with the cause: what an import inside the module failed with, or the nearest name that is there.
    """
    import importlib

    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise UsageError(f"{target!r} isn't a dotted path package.module.Class")
    module, position = importlib.import_module, len(parts) - 1
    found: Any = None
    while position:
        name = ".".join(parts[:position])
        try:
            found = module(name)
            break
        except ModuleNotFoundError as error:
            # Only when the path itself isn't a module may a shorter one be; a failing import inside it is the cause.
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise UsageError(f"importing {name} failed: {type(error).__name__}: {error}") from error
            if position == 1:
                raise UsageError(f"there is no module {name!r} to import (is its folder on PYTHONPATH?)") from error
        except Exception as error:  # a user's module may raise anything
            raise UsageError(f"importing {name} failed: {type(error).__name__}: {error}") from error
        position -= 1
    for index in range(position, len(parts)):
        if not hasattr(found, parts[index]):
            owner = ".".join(parts[:index])
            near = get_close_matches(parts[index], dir(found), n=1)
            raise UsageError(f"{owner} has no {parts[index]!r}" + (f", but {near[0]!r}" if near else ""))
        found = getattr(found, parts[index])
    if not callable(found):
        raise UsageError(f"{target} is a {type(found).__name__}, neither a class nor a function")
    return found


def check(key: str, spec: Any) -> Iterator[Problem]:
    """Yield all complaints about an object description and those nested in it.

    Args:
        key: full key of the description (`model`), for messages.
        spec: plain containers; a mapping with `_target_` describes an object.
    """
    if isinstance(spec, Mapping):
        for name, value in spec.items():
            yield from check(f"{key}.{name}", value)
        if "_target_" in spec:
            yield from _check_call(key, spec)
    elif isinstance(spec, (list, tuple)):
        for index, value in enumerate(spec):
            yield from check(f"{key}[{index}]", value)


def _check_call(key: str, spec: Mapping[str, Any]) -> Iterator[Problem]:
    target = spec["_target_"]
    if not isinstance(target, str):
        yield Problem(f"{key}._target_={target}", "it must be a dotted path package.module.Class")
        return
    try:
        function = locate(target)
        parameters = inspect.signature(function).parameters
    except UsageError as error:
        yield Problem(f"{key}._target_={target}", str(error))
        return
    except (ValueError, TypeError):  # a builtin without a signature takes what it takes
        return
    given = {name: value for name, value in spec.items() if name not in HYDRA_KEYS}
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in given:
            if name not in named:
                yield _unknown(key, name, target, list(named))
    positional = len(spec.get("_args_", ()))
    if not spec.get("_partial_", False):
        for name, parameter in list(named.items())[positional:]:
            if parameter.default is parameter.empty and name not in given:
                yield Problem(f"{key}.{name}", f"{target} needs it, and it isn't set", f"{key}.{name}=<value>")
    hints = _hints(function)
    for name, value in given.items():
        if name in named and name in hints and not _fits(value, hints[name]):
            words = getattr(hints[name], "__name__", str(hints[name]))
            yield Problem(f"{key}.{name}={value}", f"{target} wants {words}, and this is {type(value).__name__}")


def _unknown(key: str, name: str, target: str, known: list[str]) -> Problem:
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    takes = ", ".join(known) or "nothing"
    reason = f"{target} has no argument {name!r}" + ("" if close else f"; it takes {takes}")
    return Problem(f"{key}.{name}", reason, f"{key}.{close[0]}" if close else "")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return annotations of the arguments, those that can be evaluated; many a user's can't at run time."""
    source = function.__init__ if inspect.isclass(function) else function
    try:
        return typing.get_type_hints(source)
    except Exception:  # an annotation may name what is imported for type checkers only
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a plain value can be meant for `hint`; True for whatever isn't a plain type."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if hint is type(None):
        return value is None
    if hint not in _SIMPLE or isinstance(value, (Mapping, list, tuple)):
        return True
    if isinstance(value, bool) and hint is not bool:
        return False
    return isinstance(value, _SIMPLE[hint])


def build(spec: Mapping[str, Any]) -> Any:
    """Build the object that `spec` describes, nested ones first.

    Raises:
        UsageError: the class can't be imported or raises; the cause is shown.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    plain = {name: value for name, value in spec.items() if name != "option"}
    try:
        return instantiate(plain, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        raise UsageError(f"{spec.get('_target_')} can't be built: {type(cause).__name__}: {cause}") from cause
