"""`peak`: memory of a rank while a run starts, over the bytes of the parameters that it holds.

A model on the meta device gets its weights shard by shard; nowhere may a whole one be needed. The resident memory of
each rank is read before the model is built, and its high-water mark until the first batch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.memory import COMMON, size
from benchmarks.telling import told
from framework.compose import compose
from framework.plan import RunPlan

LIMIT = 1.2
"""How much of the shard may be needed at most."""

MODEL = "model.layers=32 model.width=1024 model.heads=16 model.hidden=2816"
"""Some 400 M parameters, so that what a process needs anyhow (groups, hooks) counts for little."""

MIXES = {
    "full_shard": "strategy=fsdp devices=2",
    "full_shard 4": "strategy=fsdp devices=4",
    "shard_grad_op": "strategy=fsdp strategy.sharding=shard_grad_op devices=2",
    "hybrid 2 x 2": "strategy=fsdp strategy.replicas=2 devices=4",
    "tp": "tp=dtensor devices=2",
    "tp, megatron": "tp=megatron devices=2",
    "pp": "pp=gpipe devices=2",
    "pp, interleaved": "pp=interleaved_1f1b pp.stages_per_rank=2 devices=2",
    "tp x full_shard": "tp=dtensor strategy=fsdp devices=4",
    "pp x full_shard": "pp=1f1b strategy=fsdp devices=4",
    "cp x full_shard": "cp=ring strategy=fsdp devices=4",
    "experts x full_shard": "model=moe ep=alltoall strategy=fsdp devices=2",
}
"""Name -> words that a user would type."""


class Started(Callback):
    """Reads the high-water mark when everything is ready for the first batch."""

    peak = 0
    shard = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Weights are there."""
        self.peak = status("VmHWM")
        self.shard = sum(size(p) for p in pl_module.parameters() if not p.is_meta)
        trainer.should_stop = True
        trainer.limit_train_batches = 0


def status(field: str) -> int:
    """Return a figure of this process in bytes, as Linux keeps it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def rise(plan: dict[str, Any]) -> tuple[int, int]:
    """Start as one rank of `plan`; return by how much memory rose at most, and the bytes of this rank's parameters."""
    import framework
    from framework.objects import build
    from framework.trainer import build_model

    frozen = RunPlan.from_dict(plan)
    torch.set_num_threads(1)
    started = Started()
    trainer = framework.Trainer(frozen, callbacks=[started])
    data = build(frozen.components["data"])
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the mark begins anew
    trainer.fit(build_model(frozen), datamodule=data)
    return started.peak - before, started.shard


def measure(names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return for each mix the rise and the shard of each rank, and the largest ratio of the two."""
    from framework.testing import WorkerPool

    report = {}
    for name in told(names or MIXES):
        with WorkerPool() as pool, tempfile.TemporaryDirectory() as folder:  # new processes: nothing is warm
            shape = MODEL if "model=moe" not in MIXES[name] else MODEL.replace("layers=32", "layers=4")
            plan = compose(f"{MIXES[name]} {shape} {COMMON} run_dir={os.path.join(folder, 'run')}".split())
            ranks = pool.run(rise, plan.world_size, plan.to_dict(), process_group=False, timeout=600.0)
        ratio = max(peak / shard for peak, shard in ranks)
        report[name] = {"mesh": str(plan.mesh), "ranks": ranks, "ratio": ratio, "within": ratio <= LIMIT}
    return report


def table(report: Mapping[str, Any]) -> Any:
    """Return the figures of the rank that needed most over its shard."""
    from rich.table import Table

    shown = Table(title=f"Memory while a run starts, MiB of one rank; at most {LIMIT} x its parameters")
    for name in ("mix", "mesh", "parameters", "rise", "ratio", ""):
        shown.add_column(name, justify="left" if name in ("mix", "mesh", "") else "right")
    for name, figures in report.items():
        peak, shard = max(figures["ranks"], key=lambda pair: pair[0] / pair[1])
        verdict = "within" if figures["within"] else "[red]above[/red]"
        shown.add_row(
            name, figures["mesh"], f"{shard / 2**20:.1f}", f"{peak / 2**20:.1f}", f"{peak / shard:.2f}", verdict
        )
    return shown
