"""`python -m framework catalogue URL`: the runs and checkpoints of the tier `remote`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from framework.errors import EXIT_OK
from framework.guide import PROGRAM
from framework.hookspecs import takes_words
from framework_plugins.checkpoint import copier, remote


@takes_words
def main(words: Sequence[str]) -> int:
    """Show which runs and checkpoints lie there.

    Args:
        words: after the command's name.
    """
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} catalogue", description=__doc__)
    parser.add_argument("url", metavar="URL", help="what checkpoint.remote was set to, s3://bucket/folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    flags = parser.parse_args(list(words))
    found = remote.entries(flags.url)
    if flags.json:
        print(json.dumps(found, indent=1))
        return EXIT_OK
    _show(flags.url, found)
    return EXIT_OK


def _show(url: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    from rich.table import Table

    from framework.job import console

    if not found:
        console().print(
            f"{url} has no catalogue of runs: type what checkpoint.remote was when a run saved.", markup=False
        )
        return
    table = Table("run", "mesh", "newest", "saved", "best", "kept", "GB", title=url)
    for name, entry in found.items():
        rows = entry["checkpoints"]
        last = rows[-1] if rows else None
        best = next(iter(copier.ranked(rows, str(entry.get("better", "min")))), None)
        table.add_row(
            name,
            str(entry["mesh"]),
            "none" if last is None else f"step {last['step']}",
            "" if last is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["saved"])),
            "" if best is None else f"step {best.step} ({best.score:.6g})",
            str(len(rows)),
            f"{sum(row['bytes'] for row in rows) / 1e9:.2f}",
        )
    console().print(table)
    console().print(f"Go on from the newest one: ckpt_path={url.rstrip('/')}/<run>", markup=False)
