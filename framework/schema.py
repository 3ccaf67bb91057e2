"""`RunConfig`: the settings tree, one slot a concern. Hydra composes into it; `compose.py` makes a `RunPlan` of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OPTIONAL_SLOTS = ("strategy", "tp", "pp", "cp", "ep", "activation", "compile", "profile")
"""Concerns that are off unless asked for, in the order in which a newcomer would ask."""

DEFAULT_SLOTS = (
    "model", "data", "optimizer", "sampler", "precision", "checkpoint", "recovery", "logs", "comm", "launcher",
)  # fmt: skip
"""Concerns that always have a choice."""

LIST_SLOTS = ("logger", "callbacks")
"""Concerns of which several options can be on at once."""

SLOTS = {
    "strategy": "who holds a copy of what: data parallelism, sharded or not",
    "tp": "tensor parallelism: layers split over ranks",
    "pp": "pipeline parallelism: the model cut into stages, and their schedule",
    "cp": "context parallelism: sequences split over ranks",
    "ep": "expert parallelism: experts of a mixture spread over ranks",
    "activation": "activation checkpointing",
    "compile": "compilation of the model",
    "profile": "profilers",
    "model": "the LightningModule",
    "data": "the LightningDataModule",
    "optimizer": "optimizer and learning-rate schedule",
    "sampler": "which rank reads which sample, and where a resumed run goes on",
    "precision": "number formats of weights, compute and gradients",
    "checkpoint": "how state is written and read",
    "recovery": "what happens when a process dies or is asked to stop",
    "logs": "where log records of all ranks go",
    "comm": "network settings of the collectives",
    "launcher": "how worker processes are started",
    "logger": "Lightning loggers, several at once",
    "callbacks": "Lightning callbacks, several at once",
}
"""Every concern of the core with one line of help."""


@dataclass
class TrainerSettings:
    """The part of Lightning's Trainer that users set; None leaves Lightning's own default."""

    max_steps: int = -1
    """Optimizer steps; -1 = no limit, or 400 if neither epochs nor time limit the run."""
    max_epochs: int | None = None
    max_time: str | None = None
    """DD:HH:MM:SS."""
    accumulate_grad_batches: int | None = None
    """Batches an optimizer step; None = 1, or derived from `micro_batch_size`."""
    gradient_clip_val: float | None = None
    """One global norm (or value) over all axes."""
    gradient_clip_algorithm: str = "norm"
    """`norm`, `inf_norm` or `value`."""
    val_check_interval: Any = None
    check_val_every_n_epoch: int | None = 1
    limit_train_batches: Any = None
    limit_val_batches: Any = None
    num_sanity_val_steps: int = 0
    log_every_n_steps: int = 10
    """Optimizer steps between two logged points."""
    enable_progress_bar: bool = True
    deterministic: bool = False
    benchmark: bool | None = None
    detect_anomaly: bool = False


@dataclass
class RunConfig:
    """Everything that can be set; a slot is None when its concern is off."""

    name: str = "framework"
    """Shown in tables and used in file names."""
    seed: int = 0
    devices: Any = "auto"
    """Ranks in all; `auto` = all GPUs, or on CPU the smallest world that gives each chosen axis its size."""
    accelerator: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    num_nodes: int = 1
    global_batch_size: int = 32
    """Samples an optimizer step = data ranks x accumulation x pp.microbatches x micro_batch_size."""
    micro_batch_size: int | None = None
    """Samples of one forward; None = derived."""
    timeout_s: float = 1800.0
    """Time limit of every collective, seconds."""
    threads: int | None = None
    """Intra-op threads a rank; None = cores / ranks."""
    ckpt_path: str | None = None
    """Start from here: a checkpoint, a run's folder, or of this run `last`, `best`, `auto` (last if there is one)."""
    on_nonfinite: str = "raise"
    """What all ranks do together when a loss isn't finite on any: `raise` or `skip`."""
    run_dir: str = "???"
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    strategy: Any = None
    tp: Any = None
    pp: Any = None
    cp: Any = None
    ep: Any = None
    activation: Any = None
    compile: Any = None
    profile: Any = None
    model: Any = None
    data: Any = None
    optimizer: Any = None
    sampler: Any = None
    precision: Any = None
    checkpoint: Any = None
    recovery: Any = None
    logs: Any = None
    comm: Any = None
    launcher: Any = None
    logger: Any = None
    callbacks: Any = None
