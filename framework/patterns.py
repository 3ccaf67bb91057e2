"""Patterns that name modules, in the plans of tensor and expert parallelism. No torch here."""

from __future__ import annotations

from fnmatch import fnmatchcase


def matches(pattern: str, name: str) -> bool:
    """Tell whether `pattern` names `name`: part by part between the dots, `*` and `?` inside a part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
