"""`savings`: memory that accumulation, 16 bit, fewer activations and smaller averages save, and the loss with them.

Memory is counted from the tensors that are alive at the peak of the second step, by category, as torch's own tracker
sees them; not the process's resident memory. What is mapped from files is counted for itself, at its most, and is no
part of the peak. Loss is that of a fixed held-out set, over several seeds, of a smaller model: at the end, and how many
steps a row takes to the baseline's.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.telling import told
from framework.adapters import torch_memory
from framework.compose import compose
from framework.plan import RunPlan

PEAK_BAR, LOSS_BAR, STEPS_BAR = 0.32, 0.002, 0.005
MICROS = 8
SHAPE = "model.width=128 model.layers=6 model.heads=4 model.context=128 global_batch_size=32"
"""What memory is counted with: 1.3 M parameters, 4,096 tokens a step, in the baseline all in one forward."""
SMALL = "model.width=64 model.layers=3 model.heads=4 model.context=64 global_batch_size=32"
"""What is trained for its loss."""
COMMON = "logger=none checkpoint=none recovery=none logs=none threads=1 trainer.enable_progress_bar=false"
ROWS = {
    "baseline": "",
    "accumulation": f"trainer.accumulate_grad_batches={MICROS}",
    "16 bit": "precision=bf16-mixed",
    "checkpointing": "activation=full",
    "all three": f"trainer.accumulate_grad_batches={MICROS} precision=bf16-mixed activation=full",
    "selective": "activation=selective",
    "budget 0.4": "activation=selective activation.budget=0.4",
    "offload": "activation=offload activation.to=disk",
    "bf16 state": "optimizer=adamw_bf16",
    "8-bit state": "optimizer=adamw8bit",
    "all and 8-bit state": f"trainer.accumulate_grad_batches={MICROS} precision=bf16-mixed activation=full "
    "optimizer=adamw8bit",
}
"""The mission's five, which the bars are for, then newer options; `optimizer=adamw` unless a row says another."""
KINDS = {"PARAM": "weights", "GRAD": "gradients", "OPT": "optimizer", "ACT": "activations", "TEMP": "temporary"}


class Peak(Callback):
    """Tracks the second optimizer step."""

    def __init__(self) -> None:
        self.tracker: Any = None
        self.bytes: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin, and forget the last micro-step's modules (the tracker takes one forward of each at a time)."""
        if self.tracker is None and trainer.global_step == 1:
            self.tracker = torch_memory.memory_tracker()
            self.tracker.track_external(pl_module, *trainer.optimizers)
            self.tracker.__enter__()
        elif self.tracker is not None:
            self.tracker.reset_mod_stats()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """End, and read the peak."""
        if self.tracker is not None and trainer.global_step == 2 and not self.bytes:
            self.tracker.__exit__(None, None, None)
            (found,) = self.tracker.get_tracker_snapshot("peak").values()
            self.bytes = {str(kind).rpartition(".")[2]: size for kind, size in found.items()}
            self.bytes["MAPPED"] = self.tracker.most_mapped


class HeldOut(Callback):
    """Notes the loss of each validation."""

    def __init__(self) -> None:
        self.curve: list[tuple[int, float]] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note it."""
        if not trainer.sanity_checking:
            self.curve.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))


def run(plan: dict[str, Any], counted: bool) -> Any:
    """Train as the one rank of `plan`; return the bytes at the peak, or the curve of the held-out loss."""
    import framework
    from framework.objects import build
    from framework.trainer import build_model

    frozen = RunPlan.from_dict(plan)
    torch.set_num_threads(1)
    callback: Any = Peak() if counted else HeldOut()
    trainer = framework.Trainer(frozen, callbacks=[callback])
    trainer.fit(build_model(frozen), datamodule=build(frozen.components["data"]))
    return callback.bytes if counted else callback.curve


def reached(curve: list[tuple[int, float]], loss: float) -> float | None:
    """Return after how many steps a curve comes down to `loss`, between two points of it along a line; None = never."""
    for (before, high), (after, low) in pairwise(curve):
        if low <= loss < high:
            return before + (after - before) * (high - loss) / (high - low)
    return None


def measure(steps: int, seeds: int, chosen: Sequence[str] | None = None) -> dict[str, Any]:
    """Return for each row bytes by kind, final losses, and steps to the baseline's final loss, over the seeds.

    Args:
        steps: optimizer steps after which losses are compared.
        seeds: how many.
        chosen: names of rows beside the baseline; None = all.
    """
    from framework.testing import WorkerPool

    names = [name for name in ROWS if chosen is None or name in chosen or name == "baseline"]
    if unknown := set(chosen or ()) - set(ROWS):
        raise SystemExit(f"--rows {', '.join(sorted(unknown))}: there is none. Choose from {', '.join(ROWS)}.")
    every, more = max(1, steps // 20), max(1, steps // 20)
    rows: dict[str, Any] = {}
    with WorkerPool() as pool, tempfile.TemporaryDirectory() as folder:
        for name, plan, seed in told(_plans(names, folder, steps + more, every, seeds), _said):
            began = time.monotonic()
            row = rows.setdefault(name, {"curves": [], "seconds": 0.0})
            (found,) = pool.run(run, 1, plan.to_dict(), seed is None, process_group=False, timeout=900.0)
            if seed is None:
                row["bytes"] = found
            else:
                row["curves"].append([(step, loss) for step, loss in found])
            row["seconds"] += time.monotonic() - began
    goals = [dict(curve)[steps] for curve in rows["baseline"]["curves"]]
    for row in rows.values():
        row["peak"] = sum(row["bytes"][kind] for kind in KINDS)
        row["loss"] = mean(dict(curve)[steps] for curve in row["curves"])
        found = [reached(curve, goal) for curve, goal in zip(row["curves"], goals, strict=True)]
        row["steps"] = None if None in found else mean(one for one in found if one is not None)
        row["peak_ratio"] = row["peak"] / rows["baseline"]["peak"]
        row["loss_off"] = row["loss"] / rows["baseline"]["loss"] - 1
        row["steps_off"] = None if row["steps"] is None else row["steps"] / steps - 1
    last = rows.get("all three")
    within = last and last["peak_ratio"] <= PEAK_BAR and abs(last["loss_off"]) <= LOSS_BAR
    within = within and last["steps_off"] is not None and last["steps_off"] <= STEPS_BAR
    return {"steps": steps, "seeds": seeds, "native_16_bit": native(), "rows": rows, "within": within}


def _plans(
    names: Sequence[str], folder: str, steps: int, every: int, seeds: int
) -> Iterator[tuple[str, RunPlan, int | None]]:
    """Yield name, plan, and seed (None = memory is counted)."""
    for name in names:
        words = ROWS[name] if "optimizer=" in ROWS[name] else f"optimizer=adamw {ROWS[name]}"
        run_dir = os.path.join(folder, name.replace(" ", "_"))
        memory = f"{SHAPE} {COMMON} {words} trainer.max_steps=3 trainer.limit_val_batches=0 run_dir={run_dir}"
        yield name, compose(memory.split()), None
        batches = every * (MICROS if "accumulate" in words else 1)
        for seed in range(seeds):
            long = (
                f"{SMALL} {COMMON} {words} seed={seed} trainer.max_steps={steps} trainer.val_check_interval={batches} "
                f"trainer.limit_val_batches={16 * batches // every} run_dir={run_dir}-{seed}"
            )
            yield name, compose(long.split()), seed


def _said(row: tuple[str, RunPlan, int | None]) -> str:
    name, _, seed = row
    return f"{name}, memory" if seed is None else f"{name}, seed {seed}"


def native() -> bool:
    """Whether this CPU computes in bf16 by itself; else it is emulated, and slow."""
    file = Path("/proc/cpuinfo")
    return file.exists() and ("avx512_bf16" in file.read_text() or "amx_bf16" in file.read_text())


def table(report: Mapping[str, Any]) -> Any:
    """Return a row for each, in the form of the figures that others publish."""
    from rich.table import Table

    kind = "by this CPU's own instructions" if report["native_16_bit"] else "emulated on this CPU"
    shown = Table(
        title=f"Peak of live tensors, MiB; loss after {report['steps']} steps, {report['seeds']} seeds; bf16 {kind}. "
        f"Bars for all three: {PEAK_BAR} x, {100 * LOSS_BAR:g} %, {100 * STEPS_BAR:g} %"
    )
    columns = (*KINDS.values(), "peak", "of it", "in files", "loss", "off", "steps to it")
    for name in ("", *columns):
        shown.add_column(name, justify="right" if name else "left")
    for name, row in report["rows"].items():
        shown.add_row(
            name, *(f"{row['bytes'][kind] / 2**20:.1f}" for kind in KINDS), f"{row['peak'] / 2**20:.1f}",
            f"{row['peak_ratio']:.2f}", f"{row['bytes']['MAPPED'] / 2**20:.1f}", f"{row['loss']:.4f}",
            f"{100 * row['loss_off']:+.2f} %", "not reached" if row["steps"] is None else f"{row['steps']:.1f}",
        )  # fmt: skip
    return shown
