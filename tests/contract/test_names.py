"""Names and sizes of files: what the house allows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from framework.catalog import catalog
from framework.schema import SLOTS

ROOT = Path(__file__).parents[2]
SOURCES = sorted([
    *(ROOT / "framework").rglob("*.py"), *(ROOT / "plugins").rglob("*.py"), *(ROOT / "tools").rglob("*.py"),
])  # fmt: skip
TESTS = sorted((ROOT / "tests").rglob("*.py"))
FORBIDDEN = {"utils", "helpers", "common", "misc", "util", "helper"}
REQUESTS = {"StopRequested"}
"""Raised to ask for something; nothing is wrong."""
LINES = 500
"""A file that passes 400 lines asks to be split; one that passes this has to be."""


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", [*SOURCES, *TESTS], ids=name)
def test_file(file: Path) -> None:
    assert file.stem not in FORBIDDEN, "a name that says nothing of what is inside"
    lines = len(file.read_text().splitlines())
    assert lines <= LINES, f"{lines} lines: split it"


def names_twice(files: Iterable[Path]) -> list[str]:
    """Return files that share their name, whatever the folder: those that aren't parts of a package."""
    found: dict[str, list[Path]] = {}
    for file in files:
        if not (file.parent / "__init__.py").exists():
            found.setdefault(file.name, []).append(file)
    return [", ".join(sorted(map(name, some))) for some in found.values() if len(some) > 1]


def test_no_two_test_files_of_one_name() -> None:
    """Processes that a test starts import test files by name, and would get the one that comes first."""
    assert not names_twice(TESTS)


def test_two_of_one_name_are_noticed() -> None:
    there = ROOT / "tests" / "third_party" / "acme_parallel" / "acme_parallel"
    assert list(there.glob("*.py")), "a package with files that may be called what they like"
    files = [ROOT / "tests" / "unit" / "a.py", ROOT / "tests" / "cli" / "a.py", there / "a.py", ROOT / "tests" / "b.py"]
    assert names_twice(files) == ["tests/cli/a.py, tests/unit/a.py"]


def test_errors_end_in_error() -> None:
    wrong = []
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                raises = any(base in ("Exception", "BaseException") or base.endswith("Error") for base in bases)
                if (
                    raises
                    and not node.name.startswith("_")
                    and node.name not in REQUESTS
                    and not node.name.endswith("Error")
                ):
                    wrong.append(f"{name(file)}: {node.name}")
    assert not wrong


def test_public_names_have_docstrings() -> None:
    """Modules, public classes, and public functions of more than one line; a hook's specification is its docstring."""
    missing = []
    for file in SOURCES:
        tree = ast.parse(file.read_text())
        if ast.get_docstring(tree) is None and tree.body:
            missing.append(name(file))
        for node in tree.body:
            public = isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")
            if public and not _is_hook(node) and ast.get_docstring(node) is None:
                missing.append(f"{name(file)}:{node.lineno} {node.name}")
    assert not missing


def _is_hook(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        "hookimpl" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def test_one_file_an_option_or_a_shared_class() -> None:
    """The module of an option lies in its concern's folder."""
    wrong = [
        f"{option.words}: {target}"
        for slot, options in catalog().options.items()
        for option in options.values()
        for target in re.findall(r"_target_: (framework_plugins\.\S+)", option.text)
        if not target.startswith(f"framework_plugins.{slot}.")
    ]
    assert not wrong


def test_concern_folders_are_named_as_their_slots() -> None:
    folders = {file.name for file in (ROOT / "plugins" / "framework_plugins").iterdir() if file.is_dir()}
    assert folders - {"__pycache__"} <= set(SLOTS)


@pytest.mark.parametrize("file", SOURCES, ids=name)
def test_no_swallowed_exception(file: Path) -> None:
    """`except ...: pass` hides what went wrong; `contextlib.suppress` of a named exception says what is expected."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: names no exception"
            only = [child for child in node.body if not isinstance(child, ast.Pass)]
            assert only, f"line {node.lineno}: does nothing with the exception"


def test_nothing_of_the_workplace() -> None:
    """Paths of one machine and hosts of registries have no place in the project."""
    word = re.compile(r"/work/|/root/|/tmp/brief|pypi\.org|pythonhosted|files\.python|\bissues (show|list)\b")
    texts = [
        *SOURCES,
        *TESTS,
        *(ROOT / "conf").rglob("*.yaml"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "pyproject.toml",
    ]
    texts += [path for path in (ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md") if path.exists()]
    found = [
        f"{name(file)}: {match[0]}"
        for file in texts
        if file != Path(__file__)
        for match in word.finditer(file.read_text())
    ]
    assert not found
