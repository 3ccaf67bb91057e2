"""Inside one process of `framework.testing.ranks`: wait for a call, make it, report, and clean up for the next."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import io
import logging
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1
ONCE = ("horovod.torch",)
"""Libraries that crash when a process uses them again among other ranks: after one call with any it ends."""
MOST_THREADS = 100
"""A process with more than these left over from its calls ends: those of gloo groups that a library holds on to
(DeepSpeed's engines hold six) wake up a hundred times a second each, which slows all others down."""


@dataclass
class Task:
    """One call: the pickled `(fn, args, kwargs)` and the surroundings that it expects.

    `timeout` is that of the default process group, seconds; None = don't make one.
    """

    call: bytes
    env: dict[str, str]
    path: list[str]
    cwd: str
    timeout: float | None


@dataclass
class Done:
    """How a call ended: the pickled result, or the error's text, class name, traceback and time (s since the epoch).

    `spent`: this process can't make another call.
    """

    value: bytes = b""
    error: str = ""
    kind: str = ""
    traceback: str = ""
    time: float = 0.0
    spent: bool = False


NUMPYS = ("torch.float64", "torch.float32", "torch.float16", "torch.int64", "torch.int32", "torch.bool")
"""Types of tensors that NumPy has too."""


class _Pickler(pickle.Pickler):
    """Takes a tensor's own values as one piece of memory; torch would write a small file of all its storage."""

    def reducer_override(self, value: Any) -> Any:
        """Called for each object; NotImplemented = as usual."""
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or value.requires_grad:
            return NotImplemented
        if str(value.dtype) not in NUMPYS or value.layout is not torch.strided or value.device.type != "cpu":
            return NotImplemented
        return _tensor, (value.numpy(),)


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)


def dumps(value: Any) -> bytes:
    """Pickle what travels between processes."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def serve(pipe: Connection, log: str) -> None:
    """Make the calls that come through `pipe`, one after the other, until the other end closes.

    The process leads a process group of its own, so that whatever it starts can be ended with it, and dies with the
    server process that forked it. Standard output and error go to the file `log`.
    """
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(file=2, all_threads=True)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # the collection after each call needn't look through what the libraries made
    pipe.send_bytes(b"ready")
    while True:
        try:
            task: Task = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        done = _make(task)
        done.spent = any(name in sys.modules for name in ONCE) or threads() > MOST_THREADS
        pipe.send_bytes(pickle.dumps(done))


def threads() -> int:
    """Return how many threads this process has, C++ ones included; 0 where the system doesn't say."""
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else 0


def _make(task: Task) -> Done:
    import torch.distributed as dist

    with _clean_surroundings(task):
        try:
            fn, args, kwargs = pickle.loads(task.call)
            if task.timeout is not None:
                dist.init_process_group("gloo", timeout=timedelta(seconds=task.timeout))
            value = fn(*args, **kwargs)
            return Done(value=dumps(value))
        except (Exception, SystemExit) as error:
            return Done(
                error=f"{type(error).__name__}: {error}",
                kind=type(error).__name__,
                traceback=traceback.format_exc(),
                time=time.time(),
            )
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


@contextlib.contextmanager
def _clean_surroundings(task: Task) -> Iterator[None]:
    """Give the call the environment, seed and signal handlers of a fresh process; destroy its process group after."""
    import torch
    import torch.distributed as dist

    from framework import roll_call
    from framework.adapters.torch_private import forget_meshes

    os.environ.clear()
    os.environ.update(task.env)
    os.chdir(task.cwd)
    sys.path[:] = task.path
    torch.manual_seed(0)
    random.seed(0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    log_handlers, log_level = list(logging.getLogger().handlers), logging.getLogger().level
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        roll_call.forget()
        forget_meshes()
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        logging.getLogger().handlers[:] = log_handlers
        logging.getLogger().setLevel(log_level)
        gc.collect()
        if sys.platform == "linux":  # holes that one world leaves in the heap are no place for the next one's tensors
            ctypes.CDLL(None).malloc_trim(0)
