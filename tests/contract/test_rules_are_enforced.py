"""AGENTS.md names a test or tool for each rule, and it exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "AGENTS.md").read_text()
RULES = [" ".join(rule.split()) for rule in re.split(r"^- ", TEXT, flags=re.MULTILINE)[1:]]
TOOLS = {"make check", "pytest"}


def test_every_rule_names_what_enforces_it() -> None:
    assert len(RULES) > 15
    silent = [rule for rule in RULES if not re.search(r"\[`[^\]]+\](?!\()", rule)]
    assert not silent


def test_what_enforces_is_there() -> None:
    named = {
        name
        for rule in RULES
        for part in re.findall(r"\[(`[^\]]+)\](?!\()", rule)
        for name in re.findall(r"`([^`]+)`", part)
    }
    missing = [name for name in named - TOOLS if not (ROOT / name).exists()]
    assert not missing
    assert len(named) > 8
