"""Who may import whom: the contracts of `pyproject.toml`, and a front end without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "lightning", "matplotlib", "numpy")


def test_import_contracts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"],
        cwd=ROOT, check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_broken_contract_is_noticed(tmp_path: Path) -> None:
    """The contracts bite: on a copy in which the core imports a plugin, and one concern another."""
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for source, target in (
        (ROOT / "framework", "framework"),
        (ROOT / "plugins" / "framework_plugins", "framework_plugins"),
    ):
        for file in source.rglob("*.py"):
            copy = tmp_path / target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(file.read_text())
    with (tmp_path / "framework" / "launch.py").open("a") as file:
        file.write("\nimport framework_plugins.comm.environment\n")
    with (tmp_path / "framework_plugins" / "comm" / "environment.py").open("a") as file:
        file.write("\nimport framework_plugins.logs.rank_zero\n")
    with (tmp_path / "framework" / "errors.py").open("a") as file:
        file.write("\nimport torch\nimport framework.cli\n")
    script = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "from importlinter.cli import lint_imports_command as run; run()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), "--no-cache"],
        cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "4 broken" in done.stdout, done.stdout


def imported(statements: str) -> set[str]:
    """Run `statements` in a fresh interpreter and return the heavy packages that it then has imported."""
    code = f"{statements}\nimport json, sys; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("module", ["framework", "framework.cli", "framework.compose", "framework_plugins"])
def test_the_front_end_imports_nothing_heavy(module: str) -> None:
    assert imported(f"import {module}") == set()


def component_modules() -> list[str]:
    """Modules of all component plugins that the catalogue names; models, data, loggers and callbacks are not."""
    from framework.plugin_manager import OBJECT_SLOTS

    return sorted({
        yaml.safe_load(file.read_text())["_target_"].rpartition(".")[0]
        for file in (ROOT / "conf").glob("*/*.yaml")
        if file.parent.name not in OBJECT_SLOTS
    })  # fmt: skip


def test_component_plugins_import_nothing_heavy() -> None:
    """The front end builds each chosen one, to check its settings."""
    modules = component_modules()
    assert len(modules) > 10
    if imported("".join(f"import {module}\n" for module in modules)):
        culprits = {module: heavy for module in modules if (heavy := imported(f"import {module}"))}
        pytest.fail(f"imported at the top of a module: {culprits}")
