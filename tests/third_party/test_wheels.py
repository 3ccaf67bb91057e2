"""Cases P46 and P47; a stranger's wheel that adds a strategy, a concern, an option and a command with no edit here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import wheels

PLAN = """
import sys
from framework.compose import compose
from framework.errors import FrameworkError
try:
    plan = compose(sys.argv[1:], model=False)
except FrameworkError as error:
    print(error)
    sys.exit(error.exit_code)
print({slot: spec for slot, spec in plan.components.items()}, plan.mesh)
"""


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """Folder with the good wheel and all broken ones."""
    target = tmp_path_factory.mktemp("site")
    wheels.install(target, tmp_path_factory.mktemp("wheels"), wheels.BROKEN)
    return target


@pytest.fixture(scope="session")
def good(tmp_path_factory) -> Path:
    """Folder with the good wheel only."""
    target = tmp_path_factory.mktemp("good")
    wheels.install(target, tmp_path_factory.mktemp("wheels"), {})
    return target


def run(paths: Path | list[Path], *words: str, **environment: str) -> tuple[int, str]:
    """Run the program; return its exit code and what it said."""
    places = [paths] if isinstance(paths, Path) else paths
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places)), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, env=env | environment, check=False
    )
    return done.returncode, done.stdout + done.stderr


def plan(paths: Path | list[Path], *overrides: str, **environment: str) -> tuple[int, str]:
    return run(paths, "-c", PLAN, *overrides, **environment)


def row(text: str, name: str) -> str:
    """Return the first line of the table that begins with `name`."""
    return next(line for line in text.splitlines() if line.split() and line.split()[0] == name)


def test_a_wheel_adds_a_strategy_a_concern_an_option_and_a_command(good):
    code, text = plan(good, "+strategy=acme_average", "ema=polyak", "ema.decay=0.5", "comm=acme_tree", "devices=2")
    assert code == 0, text
    assert "'_target_': 'acme_parallel.average.Average', 'option': 'acme_average'" in text
    assert "'ema': {'_target_': 'acme_parallel.ema.Polyak', 'option': 'polyak', 'decay': 0.5}" in text
    assert "dp_replicate 2" in text
    code, text = run(good, "-m", "framework", "--help")
    assert code == 0
    for words in ("+ema=", "a running average of the weights", "polyak", "Acme: exponential", "acme_average", "ranks"):
        assert words in text
    code, text = run(good, "-m", "framework", "plugins")
    assert code == 0, text
    assert "acme-parallel 2.5" in text
    assert "concern ema" in text
    assert "loaded" in row(text, "acme")


def test_options_of_a_stranger_are_checked_like_ours(good):
    code, text = plan(good, "+ema=polyak", "ema.decai=0.5", "+strategy=acme_averag")
    assert code == 2
    assert "ema.decay=0.5" in text, "the nearest valid name"
    assert "strategy=acme_average" in text
    code, text = plan(good, "+ema=polyak", "ema.decay=7")
    assert code == 2
    assert "ema.decay=7.0: must be from 0 to 1." in text
    code, text = plan(good, "+strategy=acme_average", "+pp=gpipe", "devices=4")
    assert code == 2
    assert "can't be combined with pp=gpipe" in text
    assert "Nearest mixes that work" in text


def test_a_strangers_strategy_trains_as_ours_does(good, tmp_path):
    """Two ranks: the losses are those of strategy=ddp, the stranger's callback runs, and so does its command."""
    project = Path(__file__).parents[1] / "cli"
    probe = [
        "model._target_=probe_project.Probe", "data._target_=probe_project.Numbers", "optimizer=none", "logger=none",
        "global_batch_size=4", "recovery=none", "devices=2", "trainer.max_steps=4", "threads=1",
        "trainer.log_every_n_steps=1",
    ]  # fmt: skip
    losses = {}
    for strategy, more in (("acme_average", ["ema=polyak"]), ("ddp", [])):
        folder = tmp_path / strategy
        words = ["-m", "framework", *probe, f"strategy={strategy}", *more, f"run_dir={folder}"]
        code, text = run([good, project], *words)
        assert code == 0, text
        summary = json.loads((folder / "summary.json").read_text())
        losses[strategy] = (summary["loss_first"], summary["loss_last"])
        assert ("acme averaged 1 parameters" in text) == (strategy == "acme_average")
    assert losses["acme_average"] == pytest.approx(losses["ddp"], rel=1e-6)
    small, large = 30 / 256, 174 / 256  # means of the squares of 1/8..4/8 and 5/8..8/8, seen in turn
    weight = (1 - 0.2 * small) ** 2 * (1 - 0.2 * large)  # after three steps of SGD on mean((x * weight) ** 2)
    assert losses["ddp"] == pytest.approx((small, weight**2 * large), rel=1e-6)
    code, text = run(
        [good, project], "-m", "framework", "ranks", *probe, "strategy=acme_average", f"run_dir={tmp_path}/x"
    )
    assert code == 0, text
    assert "acme counts 2 ranks" in text


def test_good_plugins_are_listed_beside_every_broken_one(installed):
    code, text = run(installed, "-m", "framework", "plugins", "list")
    assert code == 2, "a conflict is an error of this command"
    assert "loaded" in row(text, "acme")
    assert "loaded" in row(text, "bundled")
    for words in (
        "bad-path 1.0",
        "bad_path.nowhere",
        "No module named 'notthere'",
        "No module named 'notthere_either'",
        "needs hook API 99, and this framework has 1",
        "lightning-framework>=99",
        "pkg://no_yaml.conf, which isn't in its distribution",
        "config_rots",
        "twin-a 1.0 (twin_a) and twin-b 2.0 (twin_b) have the same name",
        "strategy=fsdp, which belongs to plugin 'bundled'",
    ):
        assert words in text, words


def test_order_of_the_path_changes_nothing(tmp_path):
    """Two folders with one name: both orders give the same conflict, and the third plugin loads."""
    folders = [tmp_path / "a", tmp_path / "b"]
    wheels.install(folders[0], tmp_path / "build", {"twin-a": wheels.BROKEN["twin-a"]})
    wheels.install(folders[1], tmp_path / "build", {"twin-b": wheels.BROKEN["twin-b"]}, good=False)
    answers = [run(order, "-m", "framework", "plugins") for order in (folders, folders[::-1])]
    assert answers[0] == answers[1]
    assert "conflict" in row(answers[0][1], "twin")
    assert "loaded" in row(answers[0][1], "acme")
    for option in ("twin_of_a", "twin_of_b"):
        code, text = plan(folders, f"+strategy={option}")
        assert code == 2
        assert "twin-a 1.0" in text
        assert "twin-b 2.0" in text
    code, text = plan(folders, "+strategy=twin_of_b", FRAMEWORK_DISABLE_PLUGINS="twin-a")
    assert code == 0, text


def test_a_run_that_uses_none_of_them_gets_a_warning_each(installed):
    code, text = run(installed, "-m", "framework", "plan", "model=none")
    assert code == 2, "refused for a reason of its own, after the warnings"
    warnings = [line for line in text.splitlines() if line.startswith("warning:")]
    for name in ("bad-path", "needs-missing", "from-the-future", "needs-newer", "no-yaml", "unknown-hook", "shadow"):
        assert sum(f"of {name} 1.0" in line for line in warnings) == 1, name
    code, text = plan(installed, "+strategy=fsdp", "+pp=gpipe", "ema=polyak")
    assert code == 0, text
    assert "framework_plugins.strategy.fsdp.FSDP" in text, "a stranger's fsdp.yaml doesn't shadow ours"


@pytest.mark.parametrize(
    ("option", "cause"),
    [
        ("brokenone", "notthere"),
        ("halfbroken", "notthere_either"),
        ("tomorrow", "needs hook API 99"),
        ("newer", ">=99"),
        ("unpackaged", "pkg://no_yaml.conf"),
        ("misspelt", "config_rots"),
        ("twin_of_a", "have the same name"),
    ],
)
def test_choosing_a_broken_one_stops_with_the_true_cause(installed, option, cause):
    code, text = plan(installed, f"+strategy={option}")
    assert code == 2
    assert cause in text
    assert "Traceback" not in text


def test_disabled_plugins_are_silent(installed):
    names = ",".join(wheels.BROKEN)
    code, text = run(installed, "-m", "framework", "plugins", FRAMEWORK_DISABLE_PLUGINS=names)
    assert code == 0, text
    assert "disabled" in row(text, "twin")
    code, text = run(installed, "-m", "framework", "plan", "model=none", FRAMEWORK_DISABLE_PLUGINS=names)
    assert "warning:" not in text


def test_hooks_can_be_traced(good):
    code, text = plan(good, "+ema=polyak", FRAMEWORK_TRACE_HOOKS="1")
    assert code == 0
    assert "config_roots [hook]" in text
    assert "check_plan" in text
