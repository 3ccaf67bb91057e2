"""`zero`: bytes a rank and tokens a second of DeepSpeed's stages and of FSDP2, as ratios of plain data parallelism.

Bytes are counted from the tensors of real runs, at the moment of a step (two micro-steps) at which a rank holds most of
a kind. The resident size of the process says little: buffers and the allocator hide the difference, and on CPU
offloading moves nothing.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.telling import told
from framework.adapters import deepspeed_private
from framework.compose import compose
from framework.plan import RunPlan
from framework.precision import local

KINDS = ("parameters", "gradients", "optimizer", "masters")

ROWS = {
    "none (ddp)": "strategy=ddp",
    "stage 1": "strategy=deepspeed strategy.stage=1",
    "stage 2": "strategy=deepspeed strategy.stage=2",
    "stage 3": "strategy=deepspeed strategy.stage=3",
    "stage 3 + offload cpu": (
        "strategy=deepspeed strategy.stage=3 strategy.offload_optimizer=cpu strategy.offload_parameters=cpu"
    ),
    "fsdp shard_grad_op": "strategy=fsdp strategy.sharding=shard_grad_op",
    "fsdp full_shard": "strategy=fsdp",
}
"""Name -> words that a user would type; the first is what the others are compared with."""

COMMON = (
    "checkpoint=none recovery=none logs=none logger=[] trainer.limit_val_batches=0 trainer.enable_progress_bar=false "
    "precision=fp32 trainer.accumulate_grad_batches=2 optimizer=adamw"
)
WARMUP = 2
"""Optimizer steps that aren't timed."""


class Meter(Callback):
    """Counts what this rank's tensors take, and the time of the steps after the warm-up."""

    def __init__(self) -> None:
        self.bytes = dict.fromkeys(KINDS, 0)
        self.began = 0.0
        self.seconds = 0.0

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gradients of a micro-step are there."""
        zero = zero_of(trainer)
        pieces = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        pieces += [] if zero is None else deepspeed_private.gradient_pieces(zero)
        self._note("gradients", pieces)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Perhaps a step is done."""
        zero = zero_of(trainer)
        self._note("parameters", [getattr(p, "ds_tensor", p) for p in pl_module.parameters()])
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        self._note("optimizer", (value for state in states for value in state.values() if torch.is_tensor(value)))
        self._note("masters", [] if zero is None else [flat for flat, _ in deepspeed_private.flat_groups(zero)])
        if trainer.global_step == WARMUP and not self.began:
            self.began = time.perf_counter()
        self.seconds = time.perf_counter() - self.began

    def _note(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        self.bytes[kind] = max(self.bytes[kind], sum(held(tensors)))


def zero_of(trainer: Trainer) -> Any:
    """Return DeepSpeed's optimizer, None without one."""
    engine = getattr(trainer.strategy, "engine", None)
    return None if engine is None or not engine.zero_optimization() else engine.optimizer


def held(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """Yield bytes of what this rank holds, each piece of memory once."""
    seen = set()
    for tensor in tensors:
        piece = local(tensor)
        key = (piece.data_ptr(), piece.numel())
        if key not in seen:
            seen.add(key)
            yield piece.numel() * piece.element_size()


def train(plan: dict[str, Any]) -> dict[str, Any]:
    """Train as one rank of `plan`; return bytes by kind and seconds of the timed steps."""
    import framework
    from framework.objects import build
    from framework.trainer import build_model

    frozen = RunPlan.from_dict(plan)
    torch.set_num_threads(1)
    meter = Meter()
    trainer = framework.Trainer(frozen, callbacks=[meter])
    trainer.fit(build_model(frozen), datamodule=build(frozen.components["data"]))
    return {**meter.bytes, "seconds": meter.seconds}


def measure(ranks: int, steps: int, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return for each row the bytes of the fullest rank by kind, and tokens a second of all ranks together."""
    from framework.testing import WorkerPool

    report = {}
    with WorkerPool() as pool, tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(told(names or ROWS)):
            run_dir = os.path.join(folder, str(number))
            words = f"{ROWS[name]} {COMMON} devices={ranks} trainer.max_steps={WARMUP + steps} run_dir={run_dir}"
            plan = compose(words.split())
            found = pool.run(train, ranks, plan.to_dict(), process_group=False, timeout=600.0)
            fullest = max(found, key=lambda rank: sum(rank[kind] for kind in KINDS))
            context = int(plan.components["model"]["context"])
            tokens = plan.batch.global_batch_size * context * steps
            seconds = max(rank["seconds"] for rank in found)
            report[name] = {**{kind: fullest[kind] for kind in KINDS}, "tokens_per_s": tokens / seconds}
    return report


def table(report: Mapping[str, Any]) -> Any:
    """Return the figures as a table; ratios are those of the first row."""
    from rich.table import Table

    shown = Table(title="MiB on the fullest rank, counted; tokens a second of all ranks; ratios of the first row")
    for name in ("", *KINDS, "sum", "memory", "tokens/s", "speed"):
        shown.add_column(name, justify="right" if name else "left")
    sums = {name: sum(figures[kind] for kind in KINDS) for name, figures in report.items()}
    first = next(iter(report))
    for name, figures in report.items():
        cells = [f"{figures[kind] / 2**20:.2f}" for kind in KINDS]
        memory = f"{sums[name] / sums[first]:.2f}"
        speed = f"{figures['tokens_per_s'] / report[first]['tokens_per_s']:.2f}"
        shown.add_row(name, *cells, f"{sums[name] / 2**20:.2f}", memory, f"{figures['tokens_per_s']:,.0f}", speed)
    return shown
