"""torchao's AdamW with averages in bf16, beside weights in any format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from framework_plugins.optimizer.eager import EagerAdamW

AVERAGES = ("exp_avg", "exp_avg_sq")


class AdamWBf16(EagerAdamW):
    """See `framework.state.OwnFormat`: state is saved as it is, and stays bf16 where weights change their format."""

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        return torch.zeros_like(p, dtype=torch.bfloat16)

    def saved_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return a parameter's state."""
        return dict(self.state[parameter])

    def loaded_state(self, parameter: nn.Parameter, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that was saved, under any mix and precision."""
        return {**saved, **{key: saved[key].bfloat16() for key in AVERAGES}}

    @staticmethod
    def state_bytes(elements: int, itemsize: int) -> int:
        """Return the bytes of state of a parameter of which a rank holds `elements`, of `itemsize` bytes each."""
        steps = 4
        return 2 * 2 * elements + steps
