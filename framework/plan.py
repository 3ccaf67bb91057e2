"""The frozen values that describe one run and travel everywhere: `MeshSpec`, `BatchSpec`, `RunPlan`.

A plan is plain data: it pickles, it prints as YAML, and two equal plans are the same run. It is made once, in the
launcher (`compose.py`), after all settings were merged and checked; workers get it and never see Hydra's tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import prod
from typing import Any

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first: ranks that differ only in the last axis are neighbours. `ep` borrows from dp_shard."""

EXPERT_AXES = ("pp", "dp_replicate", "dp_mod_ep", "ep", "cp", "tp")
"""The same ranks in the same order, with dp_shard cut in two: what experts see. `dp_mod_ep * ep = dp_shard`."""

FILE = "plan.yaml"
"""What the workers got, in the folder of the run."""

STARTS = ("last", "best", "auto")
"""Words for `ckpt_path`: the newest complete checkpoint of the run, the best scored one, the newest if there is one."""

DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes whose ranks read different samples."""


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of the mesh axes; 1 means the axis is off and needs no special case anywhere."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def dp_mod_ep(self) -> int:
        """Ranks that hold pieces of the same experts; `dp_shard` without expert parallelism."""
        return self.dp_shard // self.ep

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.shape)

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of global `rank` on every axis (row-major over `AXES`)."""
        result = {}
        for axis in reversed(AXES):
            rank, result[axis] = divmod(rank, getattr(self, axis))
        return {axis: result[axis] for axis in AXES}

    def data_rank(self, rank: int) -> int:
        """Return which share of each batch global `rank` reads: `0 <= data_rank < data_ranks`."""
        at = self.coordinate(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def __str__(self) -> str:
        experts = f" (ep {self.ep})" if self.ep > 1 else ""
        told = {axis: f"{axis} {size}" for axis, size in zip(AXES, self.shape, strict=True) if size > 1}
        return " x ".join(text + experts if axis == "dp_shard" else text for axis, text in told.items()) or "1 rank"


@dataclass(frozen=True)
class BatchSpec:
    """How one optimizer step's samples are split.

    `global_batch_size = data_ranks * accumulation * microbatches * micro_batch_size`.

    Attributes:
        global_batch_size: samples an optimizer step, over all ranks.
        micro_batch_size: samples of one forward/backward.
        microbatches: micro-batches that one call of a pipeline schedule takes (1 without a pipeline).
        accumulation: Lightning batches an optimizer step (`accumulate_grad_batches`).
        data_ranks: ranks that read different samples.
        derived: names of those of the four that the user left open.
    """

    global_batch_size: int = 32
    micro_batch_size: int = 32
    microbatches: int = 1
    accumulation: int = 1
    data_ranks: int = 1
    derived: tuple[str, ...] = ()

    @property
    def local_batch_size(self) -> int:
        """Samples that one rank's loader yields a batch: `microbatches * micro_batch_size`."""
        return self.microbatches * self.micro_batch_size


@dataclass(frozen=True)
class RunPlan:
    """One run, frozen.

    Attributes:
        run_id: unique a run; the rendezvous refuses ranks of another run.
        run_dir: absolute folder of everything that the run writes.
        command: `fit` or `validate`.
        seed: of initial weights, data order and dropout.
        accelerator: `cpu` or `cuda`.
        mesh: sizes of the axes.
        batch: how a global batch is split.
        num_nodes: hosts; ranks are spread evenly over them.
        timeout_s: of every process group, seconds.
        threads: intra-op threads a rank; None = cores of the host / ranks on it, at least 1.
        ckpt_path: where attempt 0 starts from: None; a checkpoint; a run's folder (its newest complete one); of this
            run_dir `last` (its newest), `best` (the best scored) or `auto` (its newest if it has one); a URL.
        fall_back: `ckpt_path` was found by the launcher, as the newest: an older one is taken if it turns out damaged.
        on_nonfinite: what all ranks do together when a loss isn't finite or is None on any: `raise` or `skip`.
        trainer: keyword arguments for Lightning's Trainer (`max_steps`, `gradient_clip_val`, ...).
        components: slot -> plain description of the chosen option: `{"_target_": "pkg.Class", "option": "name", field:
            value}`; `logger` and `callbacks` hold a mapping name -> description.
        env: environment variables that the workers get (from `process_env` hooks, the user's own winning).
        facts: what the launcher learned about model and data and wants kept with the run (corpus hash, ...).
    """

    run_id: str
    run_dir: str
    name: str = "framework"
    command: str = "fit"
    seed: int = 0
    accelerator: str = "cpu"
    mesh: MeshSpec = field(default_factory=MeshSpec)
    batch: BatchSpec = field(default_factory=BatchSpec)
    num_nodes: int = 1
    timeout_s: float = 1800.0
    threads: int | None = None
    ckpt_path: str | None = None
    fall_back: bool = False
    on_nonfinite: str = "raise"
    trainer: Mapping[str, Any] = field(default_factory=dict)
    components: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.mesh.world_size

    @property
    def local_world_size(self) -> int:
        """Ranks on each host."""
        return self.mesh.world_size // self.num_nodes

    def chosen(self, slot: str) -> str | None:
        """Name of the option chosen for `slot`, or None if the concern is off."""
        component = self.components.get(slot)
        return None if component is None else component.get("option")

    def with_(self, **changes: Any) -> RunPlan:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers only: what `plan.yaml` holds."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunPlan:
        """Inverse of `to_dict`; unknown keys raise TypeError."""
        values = dict(data)
        values["mesh"] = MeshSpec(**values.get("mesh", {}))
        batch = dict(values.get("batch", {}))
        batch["derived"] = tuple(batch.get("derived", ()))
        values["batch"] = BatchSpec(**batch)
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise TypeError(f"Unknown plan fields: {sorted(unknown)}")
        return cls(**values)


@dataclass(frozen=True)
class Requirements:
    """What an option needs, gives and excludes, as words; data from which legal mixes are computed.

    The words that a chosen option `fsdp` of slot `strategy` always gives are `strategy` and `strategy=fsdp`. Others are
    free: `tied_weights`, `meta_init`, `bf16`. `needs` must all be given by some chosen option; `excludes` by none.
    `why` maps a needed or excluded word to the reason shown to the user. `variants` are settings (`sharding=...`,
    several in one text parted by spaces) that make the option another mix: `verify --mixes=all` goes through them.
    """

    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset()
    excludes: frozenset[str] = frozenset()
    why: Mapping[str, str] = field(default_factory=dict)
    variants: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        path: of its directory.
        step: optimizer steps done.
        tier: `memory`, `peer`, `disk` or `remote`: where it was found; it lies at `path` now.
        saved: when, seconds since the epoch; 0 where nobody noted it.
        found_s: what finding and fetching it took, seconds.
        life: of the run that saved it; 0 where nobody counted.
    """

    path: str
    step: int
    tier: str = "disk"
    saved: float = 0.0
    found_s: float = 0.0
    life: int = 0


@dataclass(frozen=True)
class Failure:
    """Why a rank ended: its number, exception text or signal, and when (seconds since the epoch)."""

    rank: int
    message: str
    exit_code: int
    time: float
    traceback: str = ""
