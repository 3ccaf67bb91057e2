"""Communication hooks of torch's DDP wrapper: what travels instead of the gradients themselves.

`fp16` and `bf16` differ from torch's hooks of that name in two ways: they divide by the number of ranks before they
round, so that fewer values overflow, and they don't ask for NCCL (gloo sums both).

No `from __future__ import annotations` here: torch reads the annotations of a hook and wants the types themselves.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

WIRE = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Name of a rounding hook -> dtype on the wire."""

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]  # type: ignore[name-defined]


def rounding(dtype: torch.dtype) -> Hook:
    """Return a hook that averages in `dtype`; its state is the process group."""

    def hook(
        group: dist.ProcessGroup,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        work = dist.all_reduce((buffer / group.size()).to(dtype), group=group, async_op=True)
        return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))  # type: ignore[no-any-return]

    return hook


def powersgd(group: dist.ProcessGroup, rank: int, start_step: int) -> tuple[PowerSGDState, Hook]:
    """Return state and hook of PowerSGD (Vogels et al., 2019), with error feedback and warm start.

    Args:
        group: the replicas.
        rank: of the approximation of each matrix.
        start_step: optimizer steps that are reduced whole before; at least 2.
    """
    state = PowerSGDState(process_group=group, matrix_approximation_rank=rank, start_powerSGD_iter=start_step)
    return state, _one_at_a_time if dist.get_backend(group) == "gloo" else powerSGD_hook


def _one_at_a_time(
    state: PowerSGDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """PowerSGD, each bucket finished before the next one starts.

    Its three all-reduces a bucket are chained by callbacks that wait for the next one. gloo runs callbacks on its own
    two threads: with two buckets on the way both wait for a message that no thread is left to send (seen with torch
    2.13), or ranks send in different orders, so that messages of different sizes meet (`gloo::EnforceNotMet`).
    """
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future
