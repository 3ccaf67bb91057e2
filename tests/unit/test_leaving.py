"""`framework.leaving`: what Python promises at the end of a process still happens; taking it apart doesn't."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import atexit, sys, threading, time
from framework.leaving import leave

class Last:
    def __del__(self):
        print("taken apart")

def late():
    time.sleep(0.2)
    print("thread")

last = Last()
atexit.register(print, "atexit")
threading.Thread(target=late).start()
print("printed", end=" ")
leave(3)
"""


def test_threads_atexit_and_prints_are_done_and_objects_left_alone() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (3, ["printed", "thread", "atexit"], "")


def test_a_closed_pipe_is_told_by_the_exit_code() -> None:
    script = "import sys; from framework.leaving import leave; input(); print('printed'); leave(0)"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.communicate(b"\n", 60)
    assert process.returncode == 120
