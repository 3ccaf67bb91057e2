"""What ranks do in tests of `strategy=horovod`, which need Horovod."""

from __future__ import annotations

from typing import Any

import torch

from framework.plan import RunPlan


def meet(plan: RunPlan, rank: int, manager: Any) -> dict[str, Any]:
    """Start Horovod, add up 1 + rank, and say where Horovod thinks that this rank is."""
    import horovod.torch as hvd

    from framework_plugins.strategy.horovod import Horovod
    from framework_plugins.strategy.horovod_world import start, stop

    start(plan, Horovod().process_env(plan))
    told = {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local_rank": hvd.local_rank(),
        "local_size": hvd.local_size(),
        "cross_rank": hvd.cross_rank(),
        "cross_size": hvd.cross_size(),
        "sum": float(hvd.allreduce(torch.tensor(rank + 1.0), name="sum", op=hvd.Sum)),
    }
    stop()
    return told
