"""P42: what `comm` says about an interface is what gloo does with it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from framework.testing import RanksError, WorkerPool
from framework_plugins.comm import interfaces


def one_plus_one() -> float:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()


@pytest.mark.parametrize("value", ["", "lo"])
def test_p42_good_values_connect(pool: WorkerPool, value: str) -> None:
    assert interfaces.gloo_complaint(value, interfaces.host_interfaces()) is None
    env = {"GLOO_SOCKET_IFNAME": value}
    assert pool.run(one_plus_one, 2, process_group=False, env=env) == [2.0, 2.0]


@pytest.mark.parametrize("value", ["nosuch0", "^lo", "127.0.0.1", "lo,nosuch0"])
def test_p42_bad_values_do_not(pool: WorkerPool, value: str) -> None:
    """If gloo learns to take one of these, the check in `comm` has to follow."""
    assert interfaces.gloo_complaint(value, interfaces.host_interfaces()) is not None
    with pytest.raises(RanksError, match="Unable to find address"):
        pool.run(one_plus_one, 2, process_group=False, env={"GLOO_SOCKET_IFNAME": value})


def wrap_in_ddp() -> None:
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


def test_torchs_wrapper_still_crashes_under_detail(pool: WorkerPool) -> None:
    """If it no longer does, `comm` need not refuse `comm=debug strategy=ddp` on CPU any more."""
    with pytest.raises(RanksError, match="SIGSEGV"):
        pool.run(wrap_in_ddp, 2, process_group=False, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def test_it_works_under_info(pool: WorkerPool) -> None:
    pool.run(wrap_in_ddp, 2, process_group=False, env={"TORCH_DISTRIBUTED_DEBUG": "INFO"})
