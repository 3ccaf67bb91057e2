"""Running the launcher in a process of its own, with a tag by which everything that it leaves behind is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plans import option

from framework.launch import launch
from framework.plan import MeshSpec, RunPlan

HERE = Path(__file__).parent
TAG = "FRAMEWORK_TEST_TAG"


def bare_plan(run_dir: Path, ranks: int = 2, components: Mapping[str, Any] | None = None, **fields: Any) -> RunPlan:
    """Return a plan with a launcher and nothing else."""
    fields.setdefault("timeout_s", 60.0)
    return RunPlan(
        run_id=uuid.uuid4().hex[:8],
        run_dir=str(run_dir),
        mesh=MeshSpec(dp_replicate=ranks),
        components={"launcher": option("launcher", "local"), **(components or {})},
        **fields,
    )


def warm_up(folder: Path) -> None:
    """Have the fork server ready: its imports are no part of what a test measures."""
    assert launch(bare_plan(folder, 1), "rank_entries:meet").status == "finished"


class Launched:
    """A launcher in a process of its own.

    Args:
        plan: to run.
        entry: what the ranks do.
        env: more environment.
        prefix: command before `launch_driver.py` (torchrun); None = this Python.
    """

    def __init__(
        self, plan: RunPlan, entry: str, env: Mapping[str, str] | None = None, prefix: Sequence[str] | None = None
    ) -> None:
        self.tag = uuid.uuid4().hex
        self.run_dir = Path(plan.run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        file = self.run_dir / "plan.json"
        file.write_text(json.dumps(plan.to_dict()))
        with open(self.run_dir / "out.txt", "w") as out:
            self.process = subprocess.Popen(
                [*(prefix or [sys.executable]), str(HERE / "launch_driver.py"), str(file), entry],
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), TAG: self.tag},
            )  # fmt: skip

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.tagged():
            os.kill(pid, 9)
        self.process.wait()

    def tagged(self) -> list[int]:
        """Return the processes alive (not zombies) that were started by this launcher or by its children."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    environ, state = (folder / "environ").read_bytes(), (folder / "stat").read_text()
                except OSError:
                    continue
                if f"{TAG}={self.tag}".encode() in environ and state.rpartition(")")[2].split()[0] != "Z":
                    found.append(int(folder.name))
        return found

    def wait(self, limit: float = 150.0) -> int:
        """Return the exit code; fail if it takes longer than `limit` seconds: starting up, beside other tests, may."""
        return self.process.wait(limit)

    def output(self) -> str:
        """Return stdout and stderr so far."""
        return (self.run_dir / "out.txt").read_text()

    def steps(self, rank: int) -> list[dict[str, Any]]:
        """Return what `rank_entries.steps` noted."""
        path = self.run_dir / f"steps_{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pid(self, rank: int) -> int:
        """Return the process of a rank that has made a step."""
        return int(self.steps(rank)[-1]["pid"])

    def no_leftovers(self) -> None:
        """Fail if 5 s after the launcher's end any process of it is alive."""
        end = time.monotonic() + 5.0
        while left := self.tagged():
            named = [Path(f"/proc/{pid}/cmdline").read_text() for pid in left if Path(f"/proc/{pid}").exists()]
            assert time.monotonic() < end, f"still alive: {named}"
            time.sleep(0.02)


def wait_until(condition: Callable[[], bool], limit: float, what: str) -> None:
    """Wait until `condition()`; AssertionError after `limit` seconds."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {limit:g} s"
        time.sleep(0.02)
