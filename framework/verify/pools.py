"""Several calls of ranks at once: while some wait for one another, others compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from framework.testing import WorkerPool

Given = TypeVar("Given")
Made = TypeVar("Made")


class Pools:
    """Worker pools that several threads may call; each call has one to itself. Use as a context manager."""

    def __init__(self) -> None:
        self._all: list[WorkerPool] = []
        self._idle: list[WorkerPool] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(0)

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        """`WorkerPool.run`, in a pool that is idle or new."""
        with self._lock:
            if not self._idle:
                self._all.append(WorkerPool())
                self._idle.append(self._all[-1])
            pool = self._idle.pop()
        try:
            return pool.run(*args, **kwargs)
        finally:
            with self._lock:
                self._idle.append(pool)

    def side_by_side(self, count: int, function: Callable[[Given], Made], tasks: Iterable[Given]) -> Iterator[Made]:
        """Yield what `function` returns for each task, in order, from up to `count` threads that call `run`."""
        self.keep(count)
        with ThreadPoolExecutor(count) as threads:
            try:
                yield from threads.map(function, tasks)
            except BaseException:  # Ctrl-C too: nothing waits for calls whose results nobody gets
                threads.shutdown(wait=False, cancel_futures=True)
                self.keep(0)
                raise

    def keep(self, count: int) -> None:
        """End the processes of all pools but `count`."""
        with self._lock:
            ended, self._all = self._all[count:], self._all[:count]
            self._idle = [pool for pool in self._idle if pool in self._all]
        for pool in ended:
            pool.close()
