"""torchao's AdamW, which computes in fp32 whatever its state is kept in, run eagerly.

Imports torchao, which only the options with a state of fewer bits ask for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def _quietly() -> Any:
    """Torchao tells of kernels of its that don't load, none of which are used here."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


with _quietly():
    from torchao.optim import AdamW8bit as TorchaoAdamW
    from torchao.optim.subclass_8bit import OptimState8bit

__all__ = ["EagerAdamW", "OptimState8bit"]


class EagerAdamW(TorchaoAdamW):  # type: ignore[misc, unused-ignore]
    """With state of 8 bits, unless a subclass makes its own in `_new_buffer`."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step. Torchao would compile it for each shape of a parameter, which needs a compiler and minutes."""
        with torch.compiler.set_stance("force_eager"):
            return super().step(closure)
