"""What can't be under DeepSpeed, said before a process starts."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from framework import Problem, RunPlan

if TYPE_CHECKING:
    from framework_plugins.strategy.deepspeed import DeepSpeed


def complaints(option: DeepSpeed, plan: RunPlan) -> Iterator[Problem]:
    """Yield all complaints about the option in this plan that aren't about its JSON."""
    from framework_plugins.strategy.deepspeed import installed

    stage = option.zero_stage
    if not installed():
        yield Problem(
            "strategy=deepspeed",
            "the package deepspeed isn't installed",
            'pip install "lightning-framework[deepspeed]"',
        )
    algorithm = plan.trainer.get("gradient_clip_algorithm") or "norm"
    if plan.trainer.get("gradient_clip_val") and algorithm != "norm":
        yield Problem(
            f"trainer.gradient_clip_algorithm={algorithm}",
            "DeepSpeed clips by the norm only",
            "trainer.gradient_clip_algorithm=norm",
        )
    yield from _precision(stage, plan)
    yield from _offload(option, stage)
    if option.build_operators:
        yield from stale_locks()


def _precision(stage: int, plan: RunPlan) -> Iterator[Problem]:
    spec = plan.components.get("precision") or {}
    asked = f"precision={spec.get('option', 'fp32')}"
    fp16, bf16_weights = spec.get("compute_dtype") == "float16", spec.get("param_dtype") == "bfloat16"
    if fp16 and plan.accelerator == "cpu":
        yield Problem(asked, "DeepSpeed's CPU engine has no fp16", "precision=bf16-mixed")
    elif stage == 0 and (fp16 or bf16_weights):
        reason = "without sharding DeepSpeed has another optimizer for these formats, which isn't supported here"
        yield Problem(asked, reason, "strategy.stage=1 or precision=bf16-mixed")


def _offload(option: DeepSpeed, stage: int) -> Iterator[Problem]:
    optimizer, parameters = option.offloads("optimizer"), option.offloads("param")
    if parameters != "none" and stage != 3:
        yield Problem(
            f"strategy.offload_parameters={parameters}", f"stage {stage} shards no parameters", "strategy.stage=3"
        )
    if optimizer != "none" and stage == 0:
        yield Problem(
            f"strategy.offload_optimizer={optimizer}", "stage 0 shards no optimizer state", "strategy.stage=2"
        )
    if optimizer == "nvme" and stage in (1, 2):
        yield Problem("strategy.offload_optimizer=nvme", f"stage {stage} offloads to the host only", "strategy.stage=3")
    if "nvme" in (optimizer, parameters):
        if option.nvme_path is None:
            yield Problem("strategy.nvme_path=null", "nvme needs a folder on the drive", "strategy.nvme_path=<folder>")
        if not option.build_operators:
            yield Problem(
                "strategy.build_operators=false",
                "nvme needs DeepSpeed's operator async_io, which is compiled first (minutes; needs libaio's headers)",
                "strategy.build_operators=true",
            )


def extensions_folder() -> Path:
    """Return where torch keeps compiled operators: a folder for each, under one for each Python and CUDA."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given)
    cache = Path.home() / ".cache" if sys.platform == "linux" else Path.home() / "Library" / "Caches"
    if platform.system() == "Windows":
        cache = Path.home() / "AppData" / "Local"
    return cache / "torch_extensions"


def stale_locks() -> Iterator[Problem]:
    """Yield a complaint for each lock in torch's cache of compiled operators: a build there would wait for ever."""
    folder = extensions_folder()
    for lock in sorted({*folder.glob("*/lock"), *folder.glob("*/*/lock")}):
        yield Problem(
            "strategy.build_operators=true",
            f"{lock} is left of a build that was killed (or is running now), and a build would wait for it for ever",
            f"rm {lock}",
        )
