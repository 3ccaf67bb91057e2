"""`--help` teaches, and is fast: no torch."""

from __future__ import annotations

import resource
import subprocess
import sys

from framework.catalog import catalog
from framework.guide import defaults, setting_docs

HELP = """
import sys
from framework.cli import main
code = main(["--help"])
print("HEAVY", sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "lightning", "numpy", "matplotlib"}))
sys.exit(code)
"""


def run(*words, **more):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=False, **more)


def test_help_lists_every_concern_option_and_setting_without_torch():
    done = run("-c", HELP)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    for slot, options in catalog().options.items():
        assert f"{slot}=" in done.stdout
        for option in options.values():
            assert option.name in done.stdout
    for words in ("global_batch_size=32", "trainer.max_steps", "-cn gpt_tiny", "+strategy=fsdp +pp=gpipe", "plugins"):
        assert words in done.stdout


def test_help_costs_less_than_1_5_seconds():
    """Processor time, start of Python included: the time on the wall says how busy the machine is."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run("-m", "framework", "--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


def test_where_there_is_no_terminal_there_are_no_control_characters():
    text = run("-m", "framework", "--help").stdout
    assert not [character for character in text if ord(character) < 32 and character != "\n"]


def test_a_setting_is_explained_by_its_comment():
    text = "a: 1   # one thing\nb: null\ntrainer:\n  c: null   # another\nhydra:\n  d: 2   # not ours\n"
    assert setting_docs(text) == {"a=1": "one thing", "trainer.c": "another"}
    assert defaults()["precision"] == "fp32"
    assert defaults()["logger"] == "csv,tensorboard"
