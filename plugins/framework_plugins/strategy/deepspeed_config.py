"""The JSON that DeepSpeed gets: the user's own, completed from the plan, with `auto` filled in everywhere.

Batch sizes, clipping and precision belong to the plan. Where the user's JSON says them too, they must be equal, or the
run is refused with both numbers: DeepSpeed itself would take one of the two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from framework import Problem, RunPlan
from framework.errors import UsageError
from framework.plugin_manager import component

AUTO = "auto"
ZERO = "zero_optimization"

DEFAULTS: Mapping[str, Any] = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": False,
        # buffers of the sizes that DeepSpeed defaults to take gigabytes, whatever the model's size
        "reduce_bucket_size": 5_000_000,
        "allgather_bucket_size": 5_000_000,
        "stage3_prefetch_bucket_size": 5_000_000,
        # every parameter is cut, as FSDP does and as the start screen counts
        "stage3_param_persistence_threshold": 0,
        # a patch of torch.nn.functional.linear for the whole process
        "memory_efficient_linear": False,
    },
}
"""What is set where neither option nor JSON says it."""

ENGINES_OWN = {
    "optimizer": "the optimizer is the module's own or optimizer=..., and DeepSpeed would ignore this one",
    "scheduler": "the schedule is the module's own or optimizer.schedule, and both would move the learning rate",
    "tensor_parallel": "DeepSpeed's tensor parallelism would cut the model behind the plan's back",
    "autotuning": "it would end this run and start others",
}
"""Sections of a JSON that do what the plan does, with the reason against them."""


def filled(
    config: Mapping[str, Any], options: Mapping[str, Any], plan: RunPlan
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the whole JSON, and what in the user's contradicts the plan or the option.

    Args:
        config: the user's JSON.
        options: of `zero_optimization`, as the option says them; None = it doesn't.
        plan: the run.
    """
    result: dict[str, Any] = deepcopy(dict(config))
    problems = [Problem(f"strategy.config.{key}", ENGINES_OWN[key], "") for key in ENGINES_OWN if result.get(key)]
    problems += _fill_batch(result, plan)
    problems += _fill_precision(result, plan)
    problems += _fill_zero(result, options)
    for key, value in DEFAULTS.items():
        if key != ZERO and result.get(key, AUTO) == AUTO:
            result[key] = value
    problems += [
        Problem(f"strategy.config.{path}=auto", "nothing in the plan says it", f"strategy.config.{path}=<value>")
        for path in _autos(result)
    ]
    return result, problems


def show(plan: RunPlan) -> None:
    """Print the JSON that DeepSpeed would get: `python -m framework deepspeed_config strategy=deepspeed ...`.

    Raises:
        UsageError: the plan has another strategy.
    """
    option: Any = component(plan.components["strategy"]) if plan.components.get("strategy") else None
    if not hasattr(option, "whole_config"):
        raise UsageError("Only strategy=deepspeed has a DeepSpeed JSON: type strategy=deepspeed.")
    print(json.dumps(option.whole_config(plan)[0], indent=2))


def _fill_batch(result: dict[str, Any], plan: RunPlan) -> Iterator[Problem]:
    batch, clip = plan.batch, float(plan.trainer.get("gradient_clip_val") or 0.0)
    owned = {
        "train_batch_size": (batch.global_batch_size, "global_batch_size"),
        "train_micro_batch_size_per_gpu": (batch.local_batch_size, "micro_batch_size"),
        "gradient_accumulation_steps": (batch.accumulation, "trainer.accumulate_grad_batches"),
        "gradient_clipping": (clip, "trainer.gradient_clip_val"),
    }
    for key, (ours, setting) in owned.items():
        theirs = result.get(key, AUTO)
        if theirs not in (AUTO, ours):
            yield Problem(
                f"strategy.config.{key}={theirs}",
                f"the plan's {setting} is {ours}",
                f"{setting}={theirs}, or strategy.config.{key}=auto",
            )
        result[key] = ours


def _fill_precision(result: dict[str, Any], plan: RunPlan) -> Iterator[Problem]:
    spec = plan.components.get("precision") or {}
    weights, compute = spec.get("param_dtype", "float32"), spec.get("compute_dtype")
    name = spec.get("option", "fp32")
    wanted = {
        "fp16": compute == "float16",
        "bf16": weights == "bfloat16",
        "torch_autocast": compute == "bfloat16",
    }
    for section, enabled in wanted.items():
        if section == "bf16" and "bfloat16" in result:
            result["bf16"] = result.pop("bfloat16")
        given = result.setdefault(section, {})
        theirs = given.get("enabled", AUTO)
        if theirs not in (AUTO, enabled):
            yield Problem(
                f"strategy.config.{section}.enabled={theirs}".lower(),
                f"precision={name} needs {str(enabled).lower()}",
                f"another precision, or strategy.config.{section}.enabled=auto",
            )
        given["enabled"] = enabled
    if wanted["torch_autocast"]:
        # weights and gradients travel in fp32, as everywhere else; an empty list = of no class of modules in bf16
        _setdefaults(result["torch_autocast"], {"dtype": "bfloat16", "lower_precision_safe_modules": []})
    if wanted["fp16"]:
        # the scale itself is the precision's own
        power = round(math.log2(spec.get("init_scale") or 65536.0))
        _setdefaults(result["fp16"], {"loss_scale": 0, "initial_scale_power": power, "auto_cast": True})
    if wanted["bf16"] or wanted["fp16"]:
        _setdefaults(result, {"communication_data_type": "fp32"})


def _fill_zero(result: dict[str, Any], options: Mapping[str, Any]) -> Iterator[Problem]:
    section = result.setdefault(ZERO, {})
    for key, ours in options.items():
        theirs = section.get(key, AUTO)
        if ours is None:
            continue
        if theirs != AUTO and _device(theirs) != _device(ours):
            yield Problem(
                f"strategy.config.{ZERO}.{key}={_device(theirs)}",
                f"the option says {_device(ours)}",
                f"strategy.config.{ZERO}.{key}=auto",
            )
        section[key] = {**ours, **theirs} if isinstance(ours, dict) and isinstance(theirs, dict) else ours
    _setdefaults(section, DEFAULTS[ZERO])
    for key in [key for key, value in section.items() if value == AUTO]:
        del section[key]  # DeepSpeed's own default


def _device(value: Any) -> Any:
    return value.get("device", "none") if isinstance(value, Mapping) else value


def _setdefaults(section: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if section.get(key, AUTO) == AUTO:
            section[key] = value


def _autos(tree: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _autos(value, f"{path}{key}.")
        elif value == AUTO:
            yield f"{path}{key}"
