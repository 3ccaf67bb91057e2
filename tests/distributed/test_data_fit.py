"""Each source of tokens trains alike in one process, over data ranks, in a pipeline, and as a plain loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from framework import cli
from framework.errors import EXIT_OK

SMALL = [
    "model.layers=2", "model.width=16", "model.heads=2", "model.hidden=32", "model.context=16", "global_batch_size=8",
]  # fmt: skip


@pytest.mark.parametrize(
    ("data", "mix"),
    [
        ("packed", ["+strategy=ddp"]),
        ("packed", ["+strategy=fsdp", "+pp=gpipe"]),
        ("shards", ["+strategy=ddp"]),
        ("mixture", ["+strategy=ddp"]),
    ],
)
def test_mixes_are_equal(capsys: pytest.CaptureFixture[str], tmp_path: Path, data: str, mix: list[str]) -> None:
    kept = [f"data.cache_dir={tmp_path}"] if data != "mixture" else []
    code = cli.main(["verify", f"data={data}", *mix, *kept, *SMALL, "--steps", "4", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert code == EXIT_OK, result
    assert [row["verdict"] for row in result["rows"]] == ["equal", "equal"]
    assert [row["ranks"] for row in result["rows"]] == [1, 2 * len(mix)]
