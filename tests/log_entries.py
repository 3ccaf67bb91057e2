"""What the ranks do in tests of logs under the real launcher."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import torch.distributed as dist

from framework.plan import RunPlan

log = logging.getLogger("user")


def chatter(plan: RunPlan, rank: int, manager: Any) -> None:
    """Say the same on all ranks, an error on rank 1; `facts.victim` is killed on the first attempt after a word."""
    log.info("hello")
    if rank == 1:
        log.error("rank-one-only")
    dist.barrier()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == plan.facts.get("victim"):
        log.warning("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    log.info("bye")
