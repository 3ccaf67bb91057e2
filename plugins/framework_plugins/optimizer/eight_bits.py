"""torchao's AdamW with its state in 8 bits, as it is needed here: saved so that any mix can read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from framework.precision import local
from framework_plugins.optimizer.eager import EagerAdamW, OptimState8bit

SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""The averages, and whether they can be negative."""
ONE = 255
"""The code whose value is 1."""


class AdamW8bit(EagerAdamW):
    """See `framework.state.OwnFormat` for how its state is saved.

    A number is saved as a code and the scale of its block, each laid out like the parameter: any mix finds its
    elements. Where all numbers of a new block come from one old block they are taken over bit for bit; where they come
    from several they are rounded anew.
    """

    @torch.no_grad()
    def saved_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return a parameter's state as codes (uint8) and scales (fp32), five bytes for each number."""
        saved = {}
        for key, value in self.state[parameter].items():
            if key not in SIGNED:
                saved[key] = value
                continue
            piece = local(value)
            if isinstance(piece, OptimState8bit):
                code, scale = piece.codes, piece.scale.repeat_interleave(piece.block_size).view(piece.shape)
            else:
                code, scale = torch.full_like(piece, ONE, dtype=torch.uint8), piece.float()
            saved[f"{key}_code"], saved[f"{key}_scale"] = _like(parameter, code), _like(parameter, scale)
        return saved

    @torch.no_grad()
    def loaded_state(self, parameter: nn.Parameter, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that `saved_state`, under any mix, has described."""
        state = {key: value for key, value in saved.items() if not key.endswith(("_code", "_scale"))}
        for key, signed in SIGNED.items():
            code, scale = local(saved[f"{key}_code"]), local(saved[f"{key}_scale"]).float()
            table = OptimState8bit.zeros((256,), signed, 256, code.device).qmap
            state[key] = self._new_buffer(parameter, signed)
            piece = local(state[key])
            piece.copy_(table[code.long()] * scale)
            if isinstance(piece, OptimState8bit):
                scales = scale.view(-1, piece.block_size)
                whole = (scales == scales[:, :1]).all(dim=1)
                piece.codes.view(scales.shape)[whole] = code.view(scales.shape)[whole]
                piece.scale[whole] = scales[whole, 0]
        return state

    @staticmethod
    def state_bytes(elements: int, itemsize: int) -> int:
        """Return the bytes of state of a parameter of which a rank holds `elements`, of `itemsize` bytes each."""
        steps = 4
        if elements < 4096 or elements % 256:
            return 2 * elements * itemsize + steps
        return 2 * (elements + elements // 256 * 4 + 256 * 4) + steps


def _like(parameter: nn.Parameter, piece: Tensor) -> Tensor:
    """Lay a rank's piece out as its piece of the parameter is."""
    if not isinstance(parameter, DTensor):
        return piece
    return DTensor.from_local(
        piece, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
