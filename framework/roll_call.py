"""Finding out that a collective call was made on some ranks only, within seconds (P45).

`if rank == 0: trainer.save_checkpoint(...)` leaves rank 0 waiting for ranks that will never come, which wait for it in
the next step, until a time limit of half an hour ends it all. A short limit would kill what is right: a rank may come
late because it prints, downloads or validates something alone.

So whoever calls waits at the store, where no message of another collective can be mistaken for one of this, and asks
what the missing ranks are doing. A thread of each rank answers, from numbers that are there anyway: how many batches
and collectives its main thread has begun since all were at one point together. A rank that is ahead of one that waits,
and doesn't move, has gone on without the call and waits itself.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from framework.adapters import torch_private
from framework.errors import RunFailedError, UsageError

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""Ranks that come within this time are asked nothing."""
POLL_S = 1.0
"""How often a rank looks whether it is asked, and who asks for the answers."""
STILL_S = 3.0
"""A rank that is ahead and hasn't moved for so long waits."""
TELL_S = 10.0
"""After this time a waiting rank says for whom it waits."""


class RollCall:
    """One a process and world; all ranks make it at the same point.

    Args:
        groups: whose collectives only main threads begin, all members alike; the world first.
        limit_s: how long a call waits in all.

    Attributes:
        batches: returns how many training batches this rank has begun.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], limit_s: float) -> None:
        self.groups = groups
        self.limit_s = limit_s
        self.batches: Callable[[], int] = int
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._calls = self._level = 0
        self._begun: dict[str, int] = {}
        self.level()
        if self._size > 1:
            self._store = torch_private.store_of_the_world()
            self._seen: Any = None
            self._since = 0.0
            threading.Thread(target=_answer, args=(weakref.ref(self),), name="roll-call", daemon=True).start()

    def level(self) -> None:
        """Count from here; called on all ranks at one point of the program."""
        self._begun = torch_private.begun_collectives(self.groups)
        self._level += 1

    def call(self, what: str) -> None:
        """Return when all ranks have called.

        Args:
            what: the function, as the user calls it.

        Raises:
            UsageError: a rank has gone on without the call.
            RunFailedError: a rank didn't come within the time limit.
        """
        if self._size == 1:
            return
        name, began, waited, told = f"roll_call/{self._calls}", time.monotonic(), 0.0, False
        self._calls += 1
        self._store.set(f"{name}/{self._rank}", what)
        if self._store.add(f"{name}/count", 1) == self._size:
            self._store.set(f"{name}/all", what)
        pause = 0.001
        while not self._store.check([f"{name}/all"]):
            waited = time.monotonic() - began
            if waited > PATIENCE_S:
                missing = [rank for rank in range(self._size) if not self._store.check([f"{name}/{rank}"])]
                self._store.set("roll_call/asked", str(self._calls))
                self._judge(what, missing)
                if waited > TELL_S and not told and missing:
                    told = True
                    log.warning("%s is collective; rank %d waits in it for rank %s.", what, self._rank, _list(missing))
                if waited > self.limit_s:
                    raise RunFailedError(f"Rank {_list(missing)} didn't come to {what} within {self.limit_s:g} s.")
            pause = min(2 * pause, POLL_S if waited > PATIENCE_S else 0.05)
            time.sleep(pause)
        self.level()
        if waited > PATIENCE_S:
            self._store.delete_key("roll_call/asked")
        if self._calls > 1:  # all have been told of the call before, as they have come to this one
            before = f"roll_call/{self._calls - 2}"
            for key in (self._rank, "count", "all") if self._rank == 0 else (self._rank,):
                self._store.delete_key(f"{before}/{key}")

    def leave(self) -> None:
        """Tell that this rank makes no calls any more."""
        if self._size > 1:
            self._store.set(f"roll_call/at/{self._rank}", json.dumps({"left": True}))

    def _judge(self, what: str, missing: Sequence[int]) -> None:
        mine = self._place()
        for rank in missing:
            key = f"roll_call/at/{rank}"
            if not self._store.check([key]):
                continue
            theirs = json.loads(self._store.get(key))
            if theirs.get("left"):
                where = "has ended"
            elif theirs["still_s"] >= STILL_S and _ahead(theirs, mine):
                where = f"has gone on without it and waits in another collective (batch {theirs['batches']})"
            else:
                continue
            raise UsageError(
                f"{what} was called on rank {self._rank}, but rank {rank} {where}. It is collective: call it on all "
                "ranks, not under `if rank == 0` or in a function of rank_zero_only."
            )

    def _place(self) -> dict[str, Any]:
        """Where this rank stands, in numbers that other ranks can compare with theirs."""
        level, begun = self._level, self._begun
        now = torch_private.begun_collectives(self.groups)
        begun_since = {name: number - begun[name] for name, number in now.items()}
        return {"level": level, "batches": self.batches(), "collectives": begun_since}

    def answer(self) -> bool:
        """Say where the main thread is, if somebody asks; return whether anybody ever will."""
        if dist.group.WORLD is not self.groups[0]:
            return False
        try:
            if self._store.check(["roll_call/asked"]):
                frame = sys._current_frames().get(threading.main_thread().ident or 0)
                place = self._place()
                here = (place, None if frame is None else (id(frame), frame.f_lasti))
                if here != self._seen:
                    self._seen, self._since = here, time.monotonic()
                still_s = time.monotonic() - self._since
                self._store.set(f"roll_call/at/{self._rank}", json.dumps({**place, "still_s": still_s}))
        except RuntimeError:  # the store is gone, and the run with it
            return False
        return True


def _answer(current: weakref.ref[RollCall]) -> None:
    """Look every second whether somebody asks; ends with the process group, which this thread doesn't keep alive."""
    while True:
        call = current()
        if call is None:
            return
        if not call.answer():
            forget(call)
            return
        del call
        time.sleep(POLL_S)


def _ahead(theirs: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether a rank has begun something that comes after where this one is."""
    if theirs["level"] != mine["level"]:
        return bool(theirs["level"] > mine["level"])
    shared = theirs["collectives"].keys() & mine["collectives"].keys()
    more = any(theirs["collectives"][name] > mine["collectives"][name] for name in shared)
    return more or bool(theirs["batches"] > mine["batches"])


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


_current: RollCall | None = None


def forget(ended: RollCall | None = None) -> None:
    """Let go of a roll call (None = whichever there is), and so of the groups and the trainer that it knows."""
    global _current  # noqa: PLW0603 - one world a process
    if ended is None or _current is ended:
        _current = None


def attend(groups: Sequence[dist.ProcessGroup], limit_s: float) -> RollCall:
    """Return this process's roll call in its present world."""
    global _current  # noqa: PLW0603 - one world a process
    if _current is None or _current.groups[0] is not groups[0]:
        _current = RollCall(groups, limit_s)
    return _current


def call(what: str) -> None:
    """Return when all ranks have called, as `RollCall.call`; at once where ranks haven't met for a run."""
    if _current is not None and dist.group.WORLD is _current.groups[0]:
        _current.call(what)


def level() -> None:
    """Call on all ranks behind messages that not all ranks had a part in: they count for nothing."""
    if _current is not None and dist.group.WORLD is _current.groups[0]:
        _current.level()


def leave() -> None:
    """Tell the other ranks, if any of them waits, that this one won't come."""
    if _current is not None and dist.group.WORLD is _current.groups[0]:
        _current.leave()
