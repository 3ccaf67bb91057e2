"""The process harness itself: results, failures, time limits, no leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from framework.testing import RanksError, run_ranks
from framework.testing.rank_process import MOST_THREADS


def leave_threads(number: int) -> int:
    for _ in range(number):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def sum_of_ranks(scale: float) -> torch.Tensor:
    value = torch.tensor([float(dist.get_rank())]) * scale
    dist.all_reduce(value)
    return value


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"wrong on {rank}")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_with_child(seconds: float) -> int:
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
    print(f"child {child.pid}", flush=True)
    child.wait()
    return child.pid


def mismatched_p2p() -> None:
    """Rank 1 waits for four times what rank 0 sends: gloo ends the process, no Python exception."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.ones(1), 0)
    dist.barrier()


def gather_a_shard() -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return float(distribute_tensor(torch.ones(4), mesh, [Shard(0)]).redistribute(placements=[Replicate()]).sum())


def threads() -> int:
    return psutil.Process().num_threads()


def environment() -> dict[str, str]:
    assert not dist.is_initialized()
    return dict(os.environ)


def test_results_come_back_by_rank_and_processes_are_used_again(pool):
    assert [t.item() for t in pool.run(sum_of_ranks, 3, 2.0)] == [6.0, 6.0, 6.0]
    pids = pool.pids
    assert [t.item() for t in pool.run(sum_of_ranks, 2, 1.0)] == [1.0, 1.0]
    assert pool.pids == pids


def test_environment_is_torchruns_and_the_callers(pool, monkeypatch):
    monkeypatch.setenv("MINE", "1")
    rank = pool.run(environment, 2, process_group=False, env={"GIVEN": "2"})[1]
    assert (rank["RANK"], rank["LOCAL_RANK"], rank["WORLD_SIZE"], rank["MINE"], rank["GIVEN"]) == (
        "1",
        "1",
        "2",
        "1",
        "2",
    )


def test_threads_of_a_process_group_end_with_it(pool):
    """Caches of DTensor held meshes, and with them threads that wake up a hundred times a second."""
    pool.run(sum_of_ranks, 2, 1.0)
    before = pool.run(threads, 2, process_group=False)
    assert pool.run(gather_a_shard, 2) == [4.0, 4.0]
    assert pool.run(threads, 2, process_group=False) == before


def test_the_first_failing_rank_is_named_and_the_pool_goes_on(pool):
    with pytest.raises(RanksError, match=r"Rank 1: ValueError: wrong on 1[\s\S]*in fail_on") as error:
        pool.run(fail_on, 2, 1)
    assert (error.value.rank, error.value.kind) == (1, "ValueError")
    assert pool.run(sum_of_ranks, 2, 1.0)[0].item() == 1.0


def test_a_killed_rank_is_the_cause_not_its_peers_connection_errors(pool):
    start = time.monotonic()
    with pytest.raises(RanksError, match="Rank 1: the process died: SIGKILL"):
        pool.run(die_on, 3, 1)
    assert time.monotonic() - start < 15
    assert pool.run(sum_of_ranks, 2, 1.0)[0].item() == 1.0


def test_a_gloo_mismatch_is_reported_and_the_pool_restarts(pool):
    with pytest.raises(RanksError):
        pool.run(mismatched_p2p, 2, timeout=20)
    assert pool.run(sum_of_ranks, 2, 1.0)[0].item() == 1.0


def test_a_rank_that_takes_too_long_is_ended_with_its_children_and_its_stack_is_shown(pool):
    with pytest.raises(RanksError, match=r"did not end within 2 s[\s\S]*sleep_with_child") as error:
        pool.run(sleep_with_child, 2, 60, timeout=2)
    children = [int(line.split()[1]) for line in str(error.value).splitlines() if line.startswith("child ")]
    assert len(children) == 2
    assert not [pid for pid in children if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_processes_that_are_full_of_threads_are_replaced(pool):
    few = pool.run(leave_threads, 2, 9)
    assert pool.run(leave_threads, 2, MOST_THREADS) == few
    fresh = pool.run(leave_threads, 2, 0)
    assert not set(fresh) & set(few)


def test_local_functions_are_refused_in_words(pool):
    with pytest.raises(TypeError, match="top level of a module"):
        pool.run(lambda: 1, 1)


def test_processes_die_with_the_tests_own_process():
    """A killed pytest leaves nothing behind."""
    code = (
        "import time, sys; sys.path.insert(0, 'tests/distributed')\n"
        "from framework.testing import WorkerPool; import test_ranks\n"
        "pool = WorkerPool(); pool.run(test_ranks.sum_of_ranks, 2, 1.0); print(*pool.pids, flush=True); time.sleep(60)"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    process.kill()
    process.communicate()
    end = time.monotonic() + 10
    while (alive := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive


def test_a_script_without_a_guard_is_told_what_it_lacks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os\nfrom framework.testing import run_ranks\nrun_ranks(os.getpid, 1)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert "needs `if __name__ == '__main__':`" in done.stderr


def test_run_ranks_starts_and_ends_its_own():
    assert [t.item() for t in run_ranks(sum_of_ranks, 2, 3.0)] == [3.0, 3.0]
