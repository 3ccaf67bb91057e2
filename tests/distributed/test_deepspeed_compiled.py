"""What needs a C++ operator of DeepSpeed: `make compiled`. Each is compiled on first use, which takes minutes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import fit
from mixes import CLIP, FP32, Mix
from parity import SHAPE, SmallGpt, plan_of, reference_of, run, samples

from framework.plan import RunPlan
from framework.verify.reference import disagreements

pytestmark = [pytest.mark.compiled_ops, pytest.mark.slow]

COMPILE_S = 1700.0
ZERO = "precision=fp32 strategy=deepspeed strategy.build_operators=true strategy.offload_optimizer="


class Adam(SmallGpt):
    """AdamW by torch, or on the host by DeepSpeed's operator `cpu_adam`."""

    def __init__(self, compiled: bool) -> None:
        super().__init__(**SHAPE)
        self.compiled = compiled

    def configure_optimizers(self) -> Any:
        if not self.compiled:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(list(self.parameters()), lr=0.01, weight_decay=0.01, adamw_mode=True)


def train(plan: RunPlan, compiled: bool) -> dict[str, torch.Tensor]:
    """Called on every rank: the weights at the end."""
    with torch.device("meta"):
        model = Adam(compiled)
    return fit(plan, functools.partial(_return, model), samples(), tensors=False).final


def _return(model: Adam) -> Adam:
    return model


def test_deepspeeds_own_adam(pool: Any) -> None:
    plan = plan_of(Mix("", 2, f"{ZERO}cpu"))
    want = pool.run(train, 2, plan, False, process_group=False)[0]
    got = pool.run(train, 2, plan, True, process_group=False, timeout=COMPILE_S)[0]
    for name, weight in want.items():
        torch.testing.assert_close(got[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parameters", ["none", "nvme"])
def test_states_on_a_drive(pool: Any, tmp_path: Path, parameters: str) -> None:
    """Needs libaio's headers."""
    words = f"nvme strategy.stage=3 strategy.offload_parameters={parameters} strategy.nvme_path={tmp_path} {CLIP}"
    mix = Mix("", 2, ZERO + words)
    for got in pool.run(run, 2, plan_of(mix), process_group=False, timeout=COMPILE_S):
        assert disagreements(got.result, reference_of(pool, mix), FP32) == []
