"""`memory`: bytes of parameters, gradients and optimizer state a rank, counted from the tensors of real runs.

Each mix trains the default GPT for two steps; what the tensors of each rank take (of sharded ones the local piece) is
held against `framework.memory`, which knows only the plan and a model without weights.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.telling import told
from framework.compose import compose, model_on_meta
from framework.memory import bytes_per_rank, held_bytes
from framework.plan import RunPlan

KINDS = ("parameters", "gradients", "optimizer")
LIMIT = 0.05
"""Largest relative difference that is called equal."""

MIXES = {
    "one replica": "",
    "ddp": "strategy=ddp devices=2",
    "shard_grad_op": "strategy=fsdp strategy.sharding=shard_grad_op devices=2",
    "full_shard": "strategy=fsdp devices=2",
    "full_shard 4": "strategy=fsdp devices=4",
    "hybrid 2 x 2": "strategy=fsdp strategy.replicas=2 devices=4",
    "tp": "tp=dtensor",
    "pp": "pp=gpipe",
    "pp interleaved": "pp=interleaved_1f1b pp.stages_per_rank=2",
    "tp x full_shard": "tp=dtensor strategy=fsdp devices=4",
    "pp x ddp": "pp=gpipe strategy=ddp devices=4",
    "pp x shard_grad_op": "pp=gpipe strategy=fsdp strategy.sharding=shard_grad_op devices=4",
    "pp x tp": "pp=1f1b tp=dtensor devices=4",
    "pp x tp x full_shard": "pp=1f1b tp=dtensor strategy=fsdp devices=8",
    "full_shard x tp adamw8bit": "strategy=fsdp tp=dtensor devices=4 optimizer=adamw8bit",
    "full_shard bf16-true": "strategy=fsdp devices=2 precision=bf16-true",
}
"""Name -> words that a user would type."""

COMMON = (
    "checkpoint=none recovery=none logs=none logger=[] trainer.max_steps=2 trainer.limit_val_batches=0 "
    "trainer.enable_progress_bar=false"
)


class Counter(Callback):
    """Counts what this rank's tensors take, in the second step: after the backward, and after the step."""

    def __init__(self) -> None:
        self.bytes = dict.fromkeys(KINDS, 0)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Gradients are complete."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self.bytes["gradients"] = sum(held_bytes(p.grad) for p in held if p.grad is not None)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """The step is done."""
        self.bytes["parameters"] = sum(held_bytes(p) for p in pl_module.parameters() if not p.is_meta)
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        self.bytes["optimizer"] = sum(held_bytes(v) for state in states for v in state.values() if torch.is_tensor(v))


def count(plan: dict[str, Any]) -> dict[str, int]:
    """Train two steps as one rank of `plan`; return bytes by kind."""
    import framework
    from framework.objects import build

    frozen = RunPlan.from_dict(plan)
    torch.set_num_threads(1)
    torch.manual_seed(frozen.seed)
    counter = Counter()
    trainer = framework.Trainer(frozen, callbacks=[counter])
    trainer.fit(build(frozen.components["model"]), datamodule=build(frozen.components["data"]))
    return counter.bytes


def measure(names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return for each mix and rank what was counted, what the arithmetic says, and the largest relative difference."""
    from framework.testing import WorkerPool

    report = {}
    with WorkerPool() as pool, tempfile.TemporaryDirectory() as folder:
        for name in told(names or MIXES):
            run_dir = os.path.join(folder, name.replace(" ", "_"))
            words = f"{MIXES[name]} {COMMON} run_dir={run_dir}".split()
            plan = compose(words)
            model, _ = model_on_meta(plan.components["model"])
            expected = [
                {"parameters": r.parameter_bytes, "gradients": r.gradient_bytes, "optimizer": r.optimizer_bytes or 0}
                for r in bytes_per_rank(plan, model)
            ]
            counted = pool.run(count, plan.world_size, plan.to_dict(), timeout=240.0)
            off = max(
                abs(found[kind] - wanted[kind]) / max(wanted[kind], 1)
                for found, wanted in zip(counted, expected, strict=True)
                for kind in KINDS
            )
            report[name] = {
                "mesh": str(plan.mesh), "counted": counted, "arithmetic": expected, "largest_difference": off,
                "within": off <= LIMIT,
            }  # fmt: skip
    return report


def table(report: Mapping[str, Any]) -> Any:
    """Return the figures of the fullest rank of each mix as a table."""
    from rich.table import Table

    shown = Table(title=f"MiB on the fullest rank, counted (arithmetic); equal = within {LIMIT:.0%} on every rank")
    for name in ("mix", "mesh", *KINDS, "sum", "largest difference", ""):
        shown.add_column(name, justify="left" if name in ("mix", "mesh", "") else "right")
    for name, figures in report.items():
        pairs = zip(figures["counted"], figures["arithmetic"], strict=True)
        found, wanted = max(pairs, key=lambda pair: sum(pair[0].values()))
        cells = [f"{found[kind] / 2**20:.2f} ({wanted[kind] / 2**20:.2f})" for kind in KINDS]
        total = f"{sum(found.values()) / 2**20:.2f}"
        verdict = "equal" if figures["within"] else "[red]differs[/red]"
        shown.add_row(name, figures["mesh"], *cells, total, f"{figures['largest_difference']:.2%}", verdict)
    return shown
