"""The precisions: `fp64`, `fp32`, `bf16-mixed`, `bf16-true`, `fp16-mixed`; one class, one YAML each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from framework import Problem, RunPlan, hookimpl

if TYPE_CHECKING:
    from framework.precision import Precision

log = logging.getLogger(__name__)

DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(kw_only=True, eq=False)
class Formats:
    """Number formats.

    Attributes:
        name: shown to users.
        param_dtype: of stored weights and optimizer state: a name of `DTYPES`.
        compute_dtype: of matrix products (autocast); None = as the weights.
        init_scale: first loss scale; None = no loss scale.
        growth_interval: steps without overflow before the loss scale doubles.
    """

    name: str = "fp32"
    param_dtype: str = "float32"
    compute_dtype: str | None = None
    init_scale: float | None = None
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        for field, value in (("param_dtype", self.param_dtype), ("compute_dtype", self.compute_dtype)):
            if value is not None and value not in DTYPES:
                raise ValueError(f"precision.{field}={value} is no number format; choose one of {', '.join(DTYPES)}.")
        if self.init_scale is not None and self.init_scale <= 0:
            raise ValueError(f"precision.init_scale={self.init_scale} must be positive.")
        if self.growth_interval < 1:
            raise ValueError(f"precision.growth_interval={self.growth_interval} must be at least 1.")

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """Weights in fp16 have no master copy; refuse them."""
        if self.param_dtype == "float16":
            return [
                Problem(
                    "precision.param_dtype=float16",
                    "weights in fp16 lose small updates and overflow",
                    "precision=fp16-mixed",
                )
            ]
        return []

    @hookimpl
    def make_precision(self, plan: RunPlan) -> Precision:
        """Build the Lightning precision plugin."""
        import torch

        from framework.precision import LossScale, Precision

        if self.param_dtype == "bfloat16":
            log.warning(
                "precision=%s keeps weights and optimizer state in bf16: an update smaller than about 1/256 of a "
                "weight is rounded away; precision=bf16-mixed keeps them in fp32.",
                self.name,
            )
        return Precision(
            name=self.name,
            param_dtype=getattr(torch, self.param_dtype),
            compute_dtype=getattr(torch, self.compute_dtype) if self.compute_dtype else None,
            scale=LossScale(self.init_scale, growth_interval=self.growth_interval) if self.init_scale else None,
            device_type=plan.accelerator,
        )
