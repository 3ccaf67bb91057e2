"""Gradients added up by Horovod; imported where it is chosen only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import horovod.torch as hvd
import torch.distributed as dist
from torch import Tensor, nn

from framework.errors import RunFailedError
from framework.reduction import GradientReduction

POLL_S = 0.0005
"""Pause between two looks; Horovod's own `synchronize` makes one of a millisecond."""


class Sum:
    """An all-reduce on its way.

    Horovod 0.28.1 itself would wait for ever for a rank that hangs: with gloo its stall inspector sees no ranks.

    Args:
        handle: Horovod's number of it.
        name: what is added up.
        limit_s: how long it may take, seconds.
    """

    def __init__(self, handle: int, name: str, limit_s: float) -> None:
        self.handle = handle
        self.name = name
        self.limit_s = limit_s

    def wait(self) -> None:
        """Return when the sum is there.

        Raises:
            HorovodInternalError: a rank is gone.
            RunFailedError: it isn't there at the time limit.
        """
        end = time.monotonic() + self.limit_s
        while not hvd.poll(self.handle):
            if time.monotonic() > end:
                raise RunFailedError(
                    f"Rank {hvd.rank()} has waited {self.limit_s:g} s for the gradient of {self.name} of the other "
                    "ranks, so one of them hangs in its backward or left that parameter out; a longer limit is "
                    "timeout_s=<seconds>."
                )
            time.sleep(POLL_S)
        hvd.synchronize(self.handle)


class HorovodReduction(GradientReduction):
    """Averages gradients over all ranks of the run; each is told to Horovod by its parameter's name.

    `hvd.DistributedOptimizer` isn't used: it steps the user's optimizer itself, so clipping, the true weight of an
    optimizer step and steps that all ranks leave out would have no place between reduction and step.

    Args:
        parameters: as in `GradientReduction`.
        group: as there: all ranks.
        limit_s: how long a rank waits for the others, seconds.
        settings: as there.
    """

    takes_sparse = "strategy=ddp"

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, *, limit_s: float, **settings: Any
    ) -> None:
        super().__init__(parameters, group, **settings)
        self.limit_s = limit_s

    def send(self, values: Tensor, name: str) -> Any:
        """Start to add up `values` over all ranks, in place."""
        return Sum(hvd.allreduce_async_(values, name=name, op=hvd.Sum), name, self.limit_s)
