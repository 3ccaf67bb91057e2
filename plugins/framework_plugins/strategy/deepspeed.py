"""`strategy=deepspeed`: optimizer state, gradients and parameters sharded by DeepSpeed's engine (ZeRO).

Rajbhandari et al., ZeRO (2020): stage 1 shards the optimizer's state, 2 also gradients, 3 also parameters; Ren et al.,
ZeRO-Offload (2021) and Rajbhandari et al., ZeRO-Infinity (2021): states in host memory or on a drive. The engine owns
backward and step, so the option brings a Lightning strategy of its own; data, losses, metrics, validation, initial
weights and checkpoints stay the framework's.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework import Problem, Requirements, RunPlan, hookimpl
from framework_plugins.strategy.deepspeed_config import AUTO, DEFAULTS, ZERO, filled

if TYPE_CHECKING:
    from pluggy import PluginManager

    from framework.mesh import Mesh
    from framework.parts import ModelPart
    from framework_plugins.strategy.deepspeed_strategy import DeepSpeedStrategy

DEVICES = ("none", "cpu", "nvme")
SAME = {1: "strategy.sharding=shard_grad_op", 2: "strategy.sharding=shard_grad_op", 3: "strategy.sharding=full_shard"}
"""Stage -> the setting of strategy=fsdp that shards as much or more."""


@dataclass(kw_only=True, eq=False)
class DeepSpeed:
    """ZeRO by DeepSpeed.

    Attributes:
        stage: what is sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters; null = what `config`
            says, else 2.
        offload_optimizer: where optimizer state lives and is updated: `none` (with the gradients), `cpu` (host memory)
            or `nvme` (a drive, stage 3 only); null = what `config` says, else none.
        offload_parameters: the same of parameters, stage 3 only.
        nvme_path: folder on the drive; needed with `nvme`.
        contiguous_gradients: copy gradients into one buffer as they come; null = what `config` says, else true.
        overlap_comm: reduce gradients while backward goes on; null = what `config` says, else false.
        reduce_bucket_size: elements reduced at once, of which a buffer is kept; null = what `config` says, else 5
            million.
        build_operators: let DeepSpeed compile C++ operators where a setting needs one (async_io, DeepSpeedCPUAdam),
            which takes minutes the first time; false = refuse what would.
        size: ranks; null = what `devices` leaves.
        config: everything else: a DeepSpeed JSON file, or its content. What the plan says (batch sizes, clipping,
            precision) may be left out or `auto`.
    """

    stage: int | None = None
    offload_optimizer: str | None = None
    offload_parameters: str | None = None
    nvme_path: str | None = None
    contiguous_gradients: bool | None = None
    overlap_comm: bool | None = None
    reduce_bucket_size: int | None = None
    build_operators: bool = False
    size: int | None = None
    config: Any = None

    def __post_init__(self) -> None:
        self._config = _read(self.config)
        if self.zero_stage not in range(4):
            raise ValueError(f"strategy.stage={self.zero_stage} is unknown; choose 0, 1, 2 or 3.")
        for name in ("offload_optimizer", "offload_parameters"):
            value = getattr(self, name)
            if value is not None and value not in DEVICES:
                raise ValueError(f"strategy.{name}={value} is unknown; choose {', '.join(DEVICES)}.")
        if self.reduce_bucket_size is not None and self.reduce_bucket_size < 1:
            raise ValueError(f"strategy.reduce_bucket_size={self.reduce_bucket_size} must be at least 1.")

    # -- what is asked, whichever of option and JSON says it -----------------------------------------------------------
    @property
    def zero_stage(self) -> int:
        """The stage."""
        section = self._config.get(ZERO) or {}
        said = section.get("stage", AUTO)
        return int(self.stage if self.stage is not None else DEFAULTS[ZERO]["stage"] if said == AUTO else said)

    def offloads(self, what: str) -> str:
        """Where `optimizer` or `param` live."""
        own = self.offload_optimizer if what == "optimizer" else self.offload_parameters
        section = (self._config.get(ZERO) or {}).get(f"offload_{what}") or {}
        return str(own if own is not None else section.get("device", "none") if isinstance(section, dict) else "none")

    def whole_config(self, plan: RunPlan) -> tuple[dict[str, Any], list[Problem]]:
        """Return the JSON that the engine gets, and what in the user's contradicts the plan."""
        options: dict[str, Any] = {
            "stage": self.stage,
            "contiguous_gradients": self.contiguous_gradients,
            "overlap_comm": self.overlap_comm,
            "reduce_bucket_size": self.reduce_bucket_size,
        }
        for what, device in (("optimizer", self.offload_optimizer), ("param", self.offload_parameters)):
            if device is not None:
                path = {"nvme_path": self.nvme_path} if device == "nvme" else {}
                options[f"offload_{what}"] = {"device": device, **path}
        return filled(self._config, options, plan)

    # -- hooks ---------------------------------------------------------------------------------------------------------
    @hookimpl
    def mesh_axes(self) -> Mapping[str, int | None]:
        """Ranks on `dp_shard`; on `dp_replicate` in stage 0, which shards nothing."""
        return {"dp_shard" if self.zero_stage else "dp_replicate": self.size}

    @hookimpl
    def requirements(self) -> Requirements:
        """Gives data parallelism and what the stage shards; excludes what cuts the model that the engine owns."""
        shards = ("shards_optimizer", "shards_gradients", "shards_parameters")[: self.zero_stage]
        also = {2: {"reduces_every_batch"}, 3: {"reduces_every_batch", "frees_blocks"}}.get(self.zero_stage, set())
        instead = f"strategy=fsdp {SAME[self.zero_stage]}" if self.zero_stage else "strategy=ddp"
        owns = f"DeepSpeed's engine owns the whole model; {instead} shards as much and goes with it"
        cuts = {"pp", "tp", "cp", "ep"}
        return Requirements(
            needs=frozenset({"data_sharding"}),
            gives=frozenset({"data_parallel", *shards, *also}),
            excludes=frozenset({*cuts, "precision=fp64"}),
            why={
                "data_sharding": "ranks would train on the same samples",
                "precision=fp64": "DeepSpeed keeps master weights in fp32",
                **dict.fromkeys(cuts, owns),
            },
            variants=("stage=0", "stage=1", "stage=3"),
        )

    @hookimpl
    def process_env(self, plan: RunPlan) -> Mapping[str, str]:
        """Tell DeepSpeed the device, which it would otherwise guess."""
        return {"DS_ACCELERATOR": plan.accelerator}

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """Everything that can be said before a process starts."""
        from framework_plugins.strategy.deepspeed_checks import complaints

        return [*self.whole_config(plan)[1], *complaints(self, plan)]

    @hookimpl
    def check_model(self, plan: RunPlan, model: Any) -> Sequence[Problem]:
        """The engine has one optimizer, which it steps itself."""
        if getattr(model, "automatic_optimization", True):
            return []
        reason = f"{type(model).__name__} steps its optimizers itself, and DeepSpeed's engine has to step"
        return [Problem("strategy=deepspeed", reason, "strategy=fsdp")]

    @hookimpl
    def make_strategy(self, plan: RunPlan, manager: PluginManager | None, spawn: bool) -> DeepSpeedStrategy:
        """Return the strategy around the engine."""
        from framework_plugins.strategy.deepspeed_strategy import DeepSpeedStrategy

        return DeepSpeedStrategy(plan, manager, spawn, config=self.whole_config(plan)[0], build=self.build_operators)

    @hookimpl
    def apply_data_parallel(self, part: ModelPart, mesh: Mesh, plan: RunPlan) -> None:
        """Have each parameter of a module without weights sharded as soon as it has its values (stage 3)."""
        if self.zero_stage == 3 and plan.command == "fit":
            from framework_plugins.strategy.deepspeed_strategy import sharder

            part.initialised = sharder(self.whole_config(plan)[0])


def installed() -> bool:
    """Whether the package is there; it isn't imported, which takes seconds."""
    return importlib.util.find_spec("deepspeed") is not None


def _read(config: Any) -> dict[str, Any]:
    """Return the content of `config`: of a file, or as it is."""
    if config is None:
        return {}
    if isinstance(config, str):
        path = Path(config)
        if not path.is_file():
            raise ValueError(f"strategy.config={config}: there is no such file.")
        try:
            config = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"strategy.config={path} is no JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"strategy.config={config} must be a file or a mapping.")
    if not isinstance(config.get(ZERO, {}), dict):
        raise ValueError(f"strategy.config.{ZERO}={config[ZERO]} must be a mapping.")
    return config
