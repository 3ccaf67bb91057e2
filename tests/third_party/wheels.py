"""Wheels of strangers, built and installed into a folder of their own: one good, the others broken in one way each."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

GOOD = Path(__file__).parent / "acme_parallel"

HOOKS = """
from framework import hookimpl
@hookimpl
def config_roots(): return ["pkg://{package}.conf"]
"""

OPTION = """
from dataclasses import dataclass
@dataclass(kw_only=True, eq=False)
class Option:
    size: int | None = None
"""


def project(
    name: str,
    *,
    entry: str = "",
    version: str = "1.0",
    hooks: str = HOOKS,
    option: str = "",
    option_code: str = OPTION,
    packaged: bool = True,
    requires: str = "",
    target: str = "",
) -> dict[str, str]:
    """Return the files of a distribution `name` whose plugin is called `entry` and that has a strategy `option`."""
    package = name.replace("-", "_")
    data = '\n[tool.setuptools.package-data]\n"*" = ["*.yaml", "*/*.yaml"]\n' if packaged else ""
    packages = f'["{package}", "{package}.conf"]' if packaged else f'["{package}"]'
    files = {
        "pyproject.toml": f"""
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "{name}"
version = "{version}"
dependencies = [{f'"{requires}"' if requires else ""}]
[project.entry-points."framework.plugins"]
{entry or package} = "{target or package}"
[tool.setuptools]
packages = {packages}
include-package-data = false
{data}""",
        f"{package}/__init__.py": hooks.format(package=package),
        f"{package}/conf/__init__.py": "",
        f"{package}/option.py": option_code,
    }
    if option:
        files[f"{package}/conf/strategy/{option}.yaml"] = f"# {name}\n_target_: {package}.option.Option\nsize: null\n"
    return files


BROKEN = {
    "bad-path": project("bad-path", target="bad_path.nowhere:plugin"),
    "needs-missing": project("needs-missing", hooks="import notthere\n" + HOOKS, option="brokenone"),
    "needs-option": project("needs-option", option="halfbroken", option_code="import notthere_either\n" + OPTION),
    "from-the-future": project("from-the-future", hooks="REQUIRES_API = 99\n" + HOOKS, option="tomorrow"),
    "needs-newer": project("needs-newer", requires="lightning-framework>=99", option="newer"),
    "no-yaml": project("no-yaml", packaged=False, option="unpackaged"),
    "unknown-hook": project(
        "unknown-hook", hooks=HOOKS + "@hookimpl\ndef config_rots(): return []\n", option="misspelt"
    ),
    "twin-a": project("twin-a", entry="twin", option="twin_of_a"),
    "twin-b": project("twin-b", entry="twin", version="2.0", option="twin_of_b"),
    "shadow": project("shadow", option="fsdp"),
}


def install(target: Path, scratch: Path, projects: Mapping[str, Mapping[str, str]], *, good: bool = True) -> None:
    """Build the projects as wheels and install them into `target`, without dependencies and without the network."""
    folders = []
    for name, files in projects.items():
        folder = scratch / name
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        folders.append(folder)
    if good:
        folders.append(scratch / GOOD.name)
        shutil.copytree(GOOD, folders[-1])
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command += ["--no-deps", "--no-build-isolation", "--target", str(target)]
    done = subprocess.run([*command, *map(str, folders)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
