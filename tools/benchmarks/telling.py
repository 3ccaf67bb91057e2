"""Says on stderr what is being measured: some benchmarks take minutes. Nothing is drawn while something is timed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def told(items: Iterable[Item], what: Callable[[Item], object] = str) -> Iterator[Item]:
    """Yield each item when a line about it is out."""
    listed = list(items)
    for number, item in enumerate(listed, 1):
        print(f"{number} of {len(listed)}: {what(item)}", file=sys.stderr, flush=True)
        yield item
