"""`checkpoint`: what a save costs training, ours beside torch's own and a gathered file, in one run.

The state, weights and Adam's two moments, lies in pieces over all ranks, as under FSDP. A step is emulated: so many
milliseconds on a device that isn't this host's CPU (a sleep), and one small all-reduce; so many lie between two saves.
Measured are how long training waits for a save (`stall`: in the save, and before the next optimizer step for what
is copied until then), how much longer the interval's steps take than without a save (`slower`, that wait included), CPU
seconds that the save takes beside, over all ranks, and loading, every hash checked.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.telling import told

METHODS = ("ours, waited for", "ours, beside the steps", "DCP", "DCP, asynchronous", "gathered, torch.save")
STALL_BAR, SLOWER_BAR = 0.10, 0.05
WEIGHTS = 6
STATE = ("model.w{}", "optimizer.0.w{}.exp_avg", "optimizer.0.w{}.exp_avg_sq")

Finish = Callable[[], None]
Hold = Callable[[], float]
"""To be called before an optimizer step; returns for how many seconds it was held."""


def state_of(megabytes: int) -> dict[str, Tensor]:
    """Return a state of so many 10^6 bytes over all ranks: `WEIGHTS` weights of fp32 and their moments."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
    rows = megabytes * 10**6 // (4 * 1024 * WEIGHTS * len(STATE) * ranks)
    return {
        name: DTensor.from_local(torch.full((rows, 1024), float(number)), mesh, [Shard(0)])
        for number, name in enumerate(name.format(weight) for weight in range(WEIGHTS) for name in STATE)
    }


def saver(method: str, folder: Path) -> tuple[Callable[[dict[str, Tensor], int], Finish], Hold]:
    """Return a function that saves step `n`, which returns one that waits for that; and what holds steps."""
    if method.startswith("ours"):
        from framework_plugins.checkpoint.store import ShardedStore

        store = ShardedStore(background=method != METHODS[0])
        store.holds = True

        def ours(state: dict[str, Tensor], step: int) -> Finish:
            store.save(str(folder / f"step-{step:06d}"), state, {"step": step})
            return store.wait

        def hold() -> float:
            began = time.perf_counter()
            store.hold()
            return time.perf_counter() - began

        return ours, hold
    group = dist.new_group(backend="gloo")

    def others(state: dict[str, Tensor], step: int) -> Finish:
        path = folder / f"step-{step:06d}"
        if method == "DCP":
            dcp.save(state, checkpoint_id=path)
            return lambda: None
        if method == "DCP, asynchronous":
            future: Any = dcp.async_save(state, checkpoint_id=path, process_group=group)
            return future.result  # type: ignore[no-any-return]
        whole = {}
        for name, tensor in state.items():
            full = tensor.full_tensor()  # type: ignore[attr-defined]
            if dist.get_rank() == 0:
                whole[name] = full
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
            torch.save(whole, path / "state.pt")
        dist.barrier()
        return lambda: None

    return others, lambda: 0.0


def steps(number: int, step_ms: float, hold: Hold) -> tuple[float, float]:
    """Make so many emulated steps; return their seconds, and for how many of these optimizer steps were held."""
    began, beat, held = time.perf_counter(), torch.ones(8), 0.0
    for _ in range(number):
        time.sleep(step_ms / 1000)
        dist.all_reduce(beat)
        held += hold()
    return time.perf_counter() - began, held


def run(method: str, megabytes: int, interval: int, step_ms: float, rounds: int, folder: str) -> dict[str, float]:
    """As one rank: save at the beginning of each interval; return the medians over the rounds."""
    torch.set_num_threads(1)
    state = state_of(megabytes)
    save, hold = saver(method, Path(folder))
    save(state, 0)()  # plans, buffers, page cache
    rows = []
    for number in range(1, rounds + 1):
        dist.barrier()
        cpu = time.process_time()
        plain, _ = steps(interval, step_ms, hold)
        idle_cpu = time.process_time() - cpu
        dist.barrier()
        cpu, began = time.process_time(), time.perf_counter()
        finish = save(state, number)
        stall = time.perf_counter() - began
        busy, held = steps(interval, step_ms, hold)
        finish()
        rows.append((stall + held, busy / plain - 1, time.process_time() - cpu - idle_cpu))
    figures = [sorted(column)[len(rows) // 2] for column in zip(*rows, strict=True)]
    load_s = 0.0
    if method.startswith("ours"):
        from framework_plugins.checkpoint.store import ShardedStore

        dist.barrier()
        began = time.perf_counter()
        ShardedStore().load(str(Path(folder) / f"step-{rounds:06d}"), state)
        load_s = time.perf_counter() - began
    return {"stall_s": figures[0], "slower": figures[1], "cpu_s": figures[2], "load_s": load_s}


def measure(sizes: list[int], ranks: int, interval: int, step_ms: float, rounds: int) -> dict[str, Any]:
    """Return for each size and method what the slowest rank waited, how much slower it was, and CPU of all ranks."""
    from framework.testing import WorkerPool

    report: dict[str, Any] = {"ranks": ranks, "interval": interval, "step_ms": step_ms, "sizes": {}}
    for megabytes in sizes:
        rows = {}
        for method in told(METHODS, lambda method, size=megabytes: f"{size} MB, {method}"):
            folder = tempfile.mkdtemp(prefix="bench-")
            try:
                with WorkerPool() as pool:
                    args = (method, megabytes, interval, step_ms, rounds, folder)
                    found = pool.run(run, ranks, *args, timeout=900.0)
            finally:
                shutil.rmtree(folder)
            rows[method] = {
                "stall_s": max(one["stall_s"] for one in found),
                "slower": max(one["slower"] for one in found),
                "cpu_s_per_gb": sum(one["cpu_s"] for one in found) / (megabytes / 1000),
                "load_s": max(one["load_s"] for one in found),
            }
        waited = rows[METHODS[0]]["stall_s"]
        beside = rows[METHODS[1]]
        within = beside["stall_s"] <= STALL_BAR * waited and beside["slower"] <= SLOWER_BAR
        report["sizes"][megabytes] = {"rows": rows, "stall_ratio": beside["stall_s"] / waited, "within": within}
    return report


def table(report: Mapping[str, Any]) -> Any:
    """Return the figures, a block a size."""
    from rich.table import Table

    shown = Table(
        title=f"Saving on {report['ranks']} ranks, {report['interval']} steps of {report['step_ms']:g} ms between; "
        f"bars: stall {100 * STALL_BAR:g} % of waiting, {100 * SLOWER_BAR:g} % slower"
    )
    for name in ("MB", "method", "stall s", "of waiting", "steps slower", "CPU s a GB", "load s"):
        shown.add_column(name, justify="left" if name == "method" else "right")
    for megabytes, figures in report["sizes"].items():
        waited = figures["rows"][METHODS[0]]["stall_s"]
        for method, row in figures["rows"].items():
            load = f"{row['load_s']:.2f}" if row["load_s"] else ""
            shown.add_row(
                str(megabytes), method, f"{row['stall_s']:.3f}", f"{100 * row['stall_s'] / waited:.0f} %",
                f"{100 * row['slower']:.1f} %", f"{row['cpu_s_per_gb']:.1f}", load,
            )  # fmt: skip
        shown.add_section()
    return shown
