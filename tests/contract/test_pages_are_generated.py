"""Pages that tell what was measured are those of the figures in the repository."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.mark.parametrize("name", ["mix_docs", "model_docs"])
def test_the_page_is_that_of_the_figures(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.PAGE.read_text() == tool.page(), f"type: python tools/{name}.py"


def test_each_case_that_was_found_is_a_test() -> None:
    page = (TOOLS.parent / "docs" / "found_cases.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) >= 8
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (TOOLS.parent / path).read_text()]
    assert missing == []
