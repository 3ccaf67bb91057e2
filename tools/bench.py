"""Benchmarks: `python tools/bench.py [--json FILE] NAME`; `--help` lists them.

Prints a table; `--json` keeps figures.
They measure, they don't judge: nothing here is a timed test. Run them on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    commands = parser.add_subparsers(dest="command", required=True)
    overhead = commands.add_parser("overhead", help="CPU ms a step: hand-written loop, plain Lightning, the framework")
    overhead.add_argument("--cases", nargs="+", default=["single", "ddp", "fsdp"])
    overhead.add_argument("--rounds", type=int, default=5, help="how often each side runs")
    overhead.add_argument("--warmup", type=int, default=20, help="steps that aren't measured")
    overhead.add_argument("--steps", type=int, default=220, help="steps in all")
    overhead.add_argument("--bar", action="store_true", help="with each side's progress bar")
    overhead.add_argument("--profile", action="store_true", help="where the time goes (slows every side down)")
    checkpoint = commands.add_parser(
        "checkpoint", help="what a save costs training, beside torch's own and a gathered file"
    )
    checkpoint.add_argument("--sizes", nargs="+", type=int, default=[200, 1000], help="of the state, MB")
    checkpoint.add_argument("--ranks", type=int, default=4)
    checkpoint.add_argument("--recover", type=int, default=200, help="size of the state that each tier gives back, MB")
    checkpoint.add_argument("--interval", type=int, default=100, help="steps between two saves")
    checkpoint.add_argument("--step-ms", type=float, default=50.0, help="of an emulated step")
    checkpoint.add_argument("--rounds", type=int, default=3, help="how often each method saves")
    memory = commands.add_parser("memory", help="bytes a rank counted from tensors, against the arithmetic of the plan")
    memory.add_argument("--mixes", nargs="+", help="names of mixes; default: all")
    peak = commands.add_parser("peak", help="memory of a rank while a run starts, over the bytes of its parameters")
    peak.add_argument("--mixes", nargs="+", help="names of mixes; default: all")
    pipelines = commands.add_parser("pipelines", help="speed of pipeline schedules over GPipe's, at emulated compute")
    pipelines.add_argument("--schedules", nargs="+", default=["1f1b", "interleaved_1f1b", "pipedream", "pipedream_2bw"])
    pipelines.add_argument("--rounds", type=int, default=3, help="how often each schedule runs")
    pipelines.add_argument("--stages", type=int, default=4, help="ranks")
    pipelines.add_argument("--micros", type=int, default=8, help="micro-batches of a batch")
    pipelines.add_argument("--steps", type=int, default=12, help="steps that are measured")
    pipelines.add_argument("--forward-ms", type=float, default=10.0, help="of a sample on a rank; backward: twice that")
    savings = commands.add_parser(
        "savings", help="accumulation, 16 bit, fewer activations, 8-bit optimizer state: memory saved, and loss"
    )
    savings.add_argument("--steps", type=int, default=400, help="optimizer steps after which losses are compared")
    savings.add_argument("--seeds", type=int, default=3)
    savings.add_argument("--rows", nargs="+", help="names of rows beside the baseline; default: all")
    start = commands.add_parser("start", help="from the command to the first step, and from kill -9 to the next one")
    start.add_argument("--rounds", type=int, default=3)
    ledger = commands.add_parser("ledger", help="what always writing down the trained samples costs a step")
    ledger.add_argument("--steps", type=int, default=300, help="optimizer steps that are measured")
    _data_arguments(commands)
    zero = commands.add_parser("zero", help="DeepSpeed's stages and FSDP2: bytes a rank and tokens a second")
    zero.add_argument("--ranks", type=int, default=2)
    zero.add_argument("--steps", type=int, default=20, help="optimizer steps that are timed")
    zero.add_argument("--rows", nargs="+", help="names of rows; default: all")
    arguments = parser.parse_args()
    # Before torch is imported: one thread a rank, as a launcher would set on this many cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from framework.job import console

    report, shown = measure(arguments)
    console().print(shown)
    if arguments.json:
        arguments.json.write_text(json.dumps({**machine(), arguments.command: report}, indent=2) + "\n")


def _data_arguments(commands: Any) -> None:
    data = commands.add_parser("data", help="samples a second and data wait: our loader, torch's, torchdata's")
    data.add_argument("--workers", nargs="+", type=int, default=[0, 2], help="worker processes")
    data.add_argument("--rounds", type=int, default=7, help="how often each loader runs")
    data.add_argument("--batches", type=int, default=60, help="batches that are timed in a round")
    data.add_argument("--batch-size", type=int, default=32)
    data.add_argument("--context", type=int, default=1024, help="tokens of a window")
    data.add_argument("--pictures", type=int, default=128, help="files that are made")
    data.add_argument("--step-ms", type=float, default=40.0, help="of an emulated step, for data wait")


def measure(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Run the chosen benchmark; return its figures and a table of them."""
    if arguments.command == "overhead":
        from benchmarks import overhead

        names = [field.name for field in fields(overhead.Settings)]
        settings = overhead.Settings(**{name: getattr(arguments, name) for name in names})
        report = overhead.measure(arguments.cases, settings)
        return report, overhead.table(report)
    if arguments.command in ("memory", "peak"):
        from benchmarks import memory, peak

        module = memory if arguments.command == "memory" else peak
        report = module.measure(arguments.mixes)
        return report, module.table(report)
    if arguments.command == "zero":
        from benchmarks import zero

        report = zero.measure(arguments.ranks, arguments.steps, arguments.rows)
        return report, zero.table(report)
    if arguments.command == "pipelines":
        from benchmarks import pipelines

        names = [field.name for field in fields(pipelines.Settings)]
        report = pipelines.measure(
            arguments.schedules, pipelines.Settings(**{name: getattr(arguments, name) for name in names})
        )
        return report, pipelines.table(report)
    if arguments.command == "savings":
        from benchmarks import savings

        report = savings.measure(arguments.steps, arguments.seeds, arguments.rows)
        return report, savings.table(report)
    if arguments.command == "checkpoint":
        from benchmarks import checkpoint, tiers
        from rich.console import Group

        asked = arguments
        report = checkpoint.measure(asked.sizes, asked.ranks, asked.interval, asked.step_ms, asked.rounds)
        report["recovery"] = tiers.measure(asked.recover, asked.ranks, asked.rounds)
        return report, Group(checkpoint.table(report), tiers.table(report["recovery"]))
    if arguments.command == "data":
        from benchmarks import data

        names = [field.name for field in fields(data.Settings)]
        report = data.measure(data.Settings(**{name: getattr(arguments, name) for name in names}))
        return report, data.table(report)
    if arguments.command == "ledger":
        from benchmarks import ledger

        report = ledger.measure(arguments.steps)
        return report, ledger.table(report)
    from benchmarks import start

    report = start.measure(arguments.rounds)
    return report, start.table(report)


def machine() -> dict[str, Any]:
    """Say what the figures were measured on."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
