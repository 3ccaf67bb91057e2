"""All ranks go on together or fail together: the answer to errors that only one rank sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from framework.errors import FrameworkError

T = TypeVar("T")


def ranks() -> tuple[int, int]:
    """Return this process's global rank and the number of ranks; (0, 1) without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return `value` of every rank, by rank. Collective; `value` must pickle.

    Args:
        value: of this rank.
        group: of all ranks, for a thread that must not meet the main thread's collectives; None = the world.
    """
    size = ranks()[1]
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def odd_rank(values: Sequence[object]) -> int | None:
    """Return the first rank whose value, of those that `gather` returned, isn't rank 0's; None = all are alike."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def anywhere(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `flag` is true on any rank. Collective; a twentieth of what `gather` takes.

    Args:
        flag: of this rank.
        group: as in `gather`.
    """
    if ranks()[1] == 1:
        return flag
    one = torch.tensor(float(flag), device="cpu")  # the world has gloo for it under every accelerator
    dist.all_reduce(one, dist.ReduceOp.MAX, group=group)
    return bool(one.item())


def together(
    what: str, action: Callable[[], T], error: type[FrameworkError], group: dist.ProcessGroup | None = None
) -> T:
    """Run `action` on every rank; if it fails on any, raise `error` on all, with the failing ranks and their words.

    Collective, so also a barrier: when it returns, `action` is done on all ranks. `action` must not wait for other
    ranks at a place where one of them may have failed already.

    Args:
        what: the beginning of the message, "Saving step-000004".
        action: what to do.
        error: class to raise.
        group: as in `gather`.
    """
    result: list[T] = []
    failure: Exception | None = None
    text: str | None = None
    try:
        result.append(action())
    except Exception as caught:
        failure = caught
        text = str(caught) if isinstance(caught, FrameworkError) else f"{type(caught).__name__}: {caught}"
    if not anywhere(text is not None, group):
        return result[0]
    texts = gather(text, group)
    by_text: dict[str, list[int]] = {}
    for rank, one in enumerate(texts):
        if one is not None:
            by_text.setdefault(one, []).append(rank)
    if ranks()[1] == 1 and isinstance(failure, error):
        raise failure
    causes = "; ".join(f"rank {_numbers(failing)}: {one}" for one, failing in by_text.items())
    raise error(f"{what} failed on {causes}") from failure


def _numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
