"""Run a function on several real processes with gloo, fast: `run_ranks` and `WorkerPool`.

Processes are forked from one server process that has torch, Lightning and the framework imported already, so starting
them takes a fraction of a second; a `WorkerPool` keeps them for many calls. Each call gets a store of its own and the
environment that torchrun would give, so a function may call `torch.distributed.init_process_group()`, build a
`framework.Trainer`, or find the process group already made.
"""

from __future__ import annotations

import atexit
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from framework.errors import FrameworkError
from framework.testing.rank_process import Done, Task, dumps, serve

T = TypeVar("T")

PRELOAD = ("torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "lightning.pytorch", "framework.trainer")
START_UP_S = 120.0
"""Time limit for starting the processes: importing torch and Lightning took up to 45 s on a busy machine."""
GRACE_S = 5.0
"""How long the other ranks may go on after one has failed: they are likely to wait for it for ever."""
LOG_TAIL = 4000
"""Characters of each rank's log that a failure shows."""
SYMPTOMS = ("Connection closed", "Connection reset", "Broken pipe", "DistNetworkError", "Connection refused")
"""What a rank says when another one is gone: never the cause if there is any other error."""


class RanksError(FrameworkError):
    """A function failed on a rank, or didn't end in time; `str()` has the first failing rank's traceback and all logs.

    Attributes:
        rank: the first failing rank (None if all were merely too slow).
        kind: class name of its exception; `killed` with the signal's name if the process died; `timeout`.
        messages: rank -> text of its exception, for all ranks that failed.
    """

    def __init__(self, text: str, rank: int | None, kind: str, messages: Mapping[int, str]) -> None:
        super().__init__(text)
        self.rank = rank
        self.kind = kind
        self.messages = dict(messages)


@dataclass
class _Rank:
    process: BaseProcess
    pipe: connection.Connection
    log: Path


class WorkerPool:
    """Processes that stay for many calls; `run` starts more for a larger world, and new ones after a failure.

    Use as a context manager or call `close`. Not for use from several threads.
    """

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        self._calls = 0
        atexit.register(self.close)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that are there now."""
        return [rank.process.pid or 0 for rank in self._ranks]

    def run(
        self,
        fn: Callable[..., T],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        process_group: bool = True,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[T]:
        """Call `fn(*args, **kwargs)` on `world_size` processes at once.

        Args:
            fn: a function at the top level of an importable module; it gets no rank, but the environment has it.
            world_size: number of processes.
            args: picklable.
            timeout: seconds that the call may take, start of processes not included; also that of the process group.
            process_group: make the default process group (gloo) before the call. It is destroyed after it in any case.
            env: added to this process's environment in the ranks.
            kwargs: picklable.

        Returns:
            What `fn` returned, by rank; tensors come as copies.

        Raises:
            RanksError: a rank failed or the time ran out.
        """
        self._start(world_size)
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

        self._calls += 1
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        base = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "TORCHELASTIC_RUN_ID": f"{os.getpid()}-{self._calls}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        call = _pickle_call(fn, args, kwargs)
        for number, rank in enumerate(self._ranks[:world_size]):
            rank.log.write_bytes(b"")
            task = Task(
                call=call,
                env={**base, "RANK": str(number), "LOCAL_RANK": str(number)},
                path=list(sys.path),
                cwd=os.getcwd(),
                timeout=timeout if process_group else None,
            )
            rank.pipe.send_bytes(pickle.dumps(task))
        return self._collect(world_size, timeout)

    def close(self) -> None:
        """End all processes, and whatever they started."""
        self._stop()
        self._folder.cleanup()
        atexit.unregister(self.close)

    def _start(self, world_size: int) -> None:
        if any(not rank.process.is_alive() for rank in self._ranks):
            self._stop()
        context = get_context("forkserver")
        context.set_forkserver_preload(list(PRELOAD))
        fresh = []
        for number in range(len(self._ranks), world_size):
            ours, theirs = context.Pipe()
            log = Path(self._folder.name) / f"rank{number}.log"
            process = context.Process(target=serve, args=(theirs, str(log)), name=f"rank{number}", daemon=False)
            process.start()
            theirs.close()
            fresh.append(_Rank(process, ours, log))
        self._ranks += fresh
        end = time.monotonic() + START_UP_S
        for rank in fresh:
            if not rank.pipe.poll(max(0.0, end - time.monotonic())):
                text = f"{rank.process.name} was not ready after {START_UP_S:.0f} s\n{_tail(rank.log)}"
                self._stop()
                raise RanksError(text, None, "timeout", {})
            try:
                rank.pipe.recv_bytes()
            except EOFError as error:
                text = (
                    f"{rank.process.name} ended before it was ready; what it said is on this process's standard error. "
                    "A script that starts ranks needs `if __name__ == '__main__':` around its code."
                )
                self._stop()
                raise RanksError(text, None, "killed", {}) from error

    def _stop(self) -> None:
        for rank in self._ranks:
            _kill_group(rank.process.pid, signal.SIGKILL)
        for rank in self._ranks:
            rank.process.join(10)
            rank.pipe.close()
        self._ranks = []

    def _collect(self, world_size: int, timeout: float) -> list[Any]:
        ranks = self._ranks[:world_size]
        done: dict[int, Done] = {}
        end = time.monotonic() + timeout
        while len(done) < world_size and (left := end - time.monotonic()) > 0:
            waiting = {rank.pipe: number for number, rank in enumerate(ranks) if number not in done}
            failed = any(report.error for report in done.values())
            for pipe in connection.wait(list(waiting), min(left, 1.0)):
                number = waiting[pipe]  # type: ignore[index]
                done[number] = _receive(ranks[number])
            if not failed and any(report.error for report in done.values()):
                end = min(end, time.monotonic() + GRACE_S)
        if any(report.spent for report in done.values()) and len(done) == world_size:
            self._stop()
        if len(done) == world_size and not any(report.error for report in done.values()):
            return [pickle.loads(done[number].value) for number in range(world_size)]
        late = [number for number in range(world_size) if number not in done]
        for number in late:  # faulthandler in the rank writes where each thread is
            _kill_group(ranks[number].process.pid, signal.SIGABRT)
        for number in late:
            ranks[number].process.join(2)
        error = _failure(done, late, ranks, timeout)
        if late or any(report.kind == "killed" for report in done.values()):
            self._stop()
        raise error


def run_ranks(fn: Callable[..., T], world_size: int, *args: Any, timeout: float = 60.0, **options: Any) -> list[T]:
    """Call `fn(*args)` on `world_size` fresh processes and return the results by rank; see `WorkerPool.run`."""
    with WorkerPool() as pool:
        return pool.run(fn, world_size, *args, timeout=timeout, **options)


def _pickle_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    try:
        return dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{getattr(fn, '__qualname__', fn)} and its arguments travel to other processes by pickle, which failed: "
            f"{error}. Define the function at the top level of a module and pass plain values."
        ) from error


def _receive(rank: _Rank) -> Done:
    try:
        report: Done = pickle.loads(rank.pipe.recv_bytes())
        return report
    except (EOFError, ConnectionResetError):
        rank.process.join(10)
        code = rank.process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return Done(error=f"the process died: {how}", kind="killed", traceback="", time=time.time())


def _failure(done: Mapping[int, Done], late: Sequence[int], ranks: Sequence[_Rank], timeout: float) -> RanksError:
    failed = {number: report for number, report in done.items() if report.error}
    concerned = sorted({*failed, *late})  # what the others wrote would bury it
    logs = "\n".join(f"--- log of rank {number}\n{_tail(ranks[number].log)}" for number in concerned)
    if not failed:
        text = f"Ranks {late} did not end within {timeout:g} s\n{logs}"
        return RanksError(text, None, "timeout", {})

    def order(number: int) -> tuple[bool, float]:
        report = failed[number]
        return any(symptom in report.traceback + report.error for symptom in SYMPTOMS), report.time

    first = min(failed, key=order)
    report = failed[first]
    others = f" (failed too: {sorted(set(failed) - {first})}; ended while waiting: {list(late)})"
    after = "".join(f"\n--- then rank {n}: ...{r.traceback[-1500:]}" for n, r in sorted(failed.items()) if n != first)
    head = f"Rank {first}: {report.error}{others if len(failed) > 1 or late else ''}"
    text = f"{head}\n{report.traceback}{after}\n{logs}"
    return RanksError(text, first, report.kind, {number: report.error for number, report in failed.items()})


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    text = re.sub(r"^Extension modules: .*\n", "", text, flags=re.MULTILINE)  # faulthandler's, longer than all the rest
    return text if len(text) <= LOG_TAIL else "...\n" + text[-LOG_TAIL:]


def _kill_group(pid: int | None, number: signal.Signals) -> None:
    if pid is None:
        return
    with suppress(ProcessLookupError):
        os.killpg(pid, number)
        return
    with suppress(ProcessLookupError):  # it has not become the leader of a group of its own yet
        os.kill(pid, number)
