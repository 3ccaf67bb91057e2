"""The wheel: what it puts on the import path, that every YAML is inside, and that it works away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("framework", "plugins", "conf", "recipes", "pyproject.toml", "setup.py", "README.md")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy, so that nothing of an earlier build is in it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(path, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(out), str(source)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


def names(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


def test_only_our_two_names_come_to_the_import_path(wheel):
    top = {name.partition("/")[0] for name in names(wheel)}
    assert {name for name in top if not name.endswith(".dist-info")} == {"framework", "framework_plugins"}
    assert len(top) == 3


@pytest.mark.parametrize(
    ("folder", "inside"), [("conf", "framework/conf"), ("recipes", "framework/recipes"), ("framework", "framework"),
                           ("plugins/framework_plugins", "framework_plugins")],
)  # fmt: skip
def test_every_file_of_ours_is_inside(wheel, folder, inside):
    kinds = (".yaml", ".py", "py.typed")
    files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.name.endswith(kinds)]
    expected = {f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" for path in files}
    assert expected
    assert not expected - set(names(wheel))


def test_no_test_and_no_tool_is_inside(wheel):
    assert not [name for name in names(wheel) if "/tests/" in name or "test_" in name or name.startswith("tools")]


def test_it_works_away_from_the_checkout(wheel, tmp_path):
    """Installed into a folder of its own, and run from another: options, recipes and entry points are found there."""
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    done = subprocess.run(
        [*command, "--no-deps", "--target", str(site), str(wheel)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    env = os.environ | {"PYTHONPATH": str(site), "COLUMNS": "160", "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=work, env=env, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = "import framework, framework.paths as p, framework_plugins; print(framework.__file__, p.conf_dir(),"
    places = run("-c", f"{where} p.recipes_dir(), framework_plugins.__file__)").split()
    assert all(place.startswith(str(site)) for place in places), places
    assert "fsdp" in run("-m", "framework", "--help")
    assert "loaded" in run("-m", "framework", "plugins")
    plan = run("-m", "framework", "plan", "-cn", "gpt_fsdp_gpipe")
    assert "pp 2 x dp_shard 2" in plan
    assert not list(work.iterdir())
