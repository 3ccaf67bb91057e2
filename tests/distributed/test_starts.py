"""`ckpt_path` from Python: the words of the command line, and what isn't a checkpoint of ours (P17)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plans import make_plan, option
from user_modules import Mlp, loader, regression

from framework.testing import RanksError
from framework.trainer import Trainer


def begun_at(run_dir: Path, start: str | None, steps: int) -> tuple[int, list[int]]:
    """Return the step at which a run ends, and those that it saved."""
    checkpoint = option("checkpoint", "dcp", every_n_steps=1, keep=9)
    trainer = {"max_steps": steps, "max_epochs": 9}
    plan = make_plan(
        1, micro_batch_size=4, run_dir=str(run_dir), trainer=trainer, components={"checkpoint": checkpoint}
    )
    made = Trainer(plan)
    made.fit(Mlp(), loader(regression(24), 4), ckpt_path=start)
    return made.global_step, sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))


def test_the_words_find_this_runs_newest(pool: Any, tmp_path: Path) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    assert pool.run(begun_at, 1, first, "auto", 2, process_group=False)[0] == (2, [1, 2])
    assert pool.run(begun_at, 1, first, "last", 3, process_group=False)[0] == (3, [1, 2, 3])
    assert pool.run(begun_at, 1, other, str(first), 4, process_group=False)[0] == (4, [4]), "goes on at 3"
    with pytest.raises(RanksError, match=r"ckpt_path=last: there is no complete checkpoint in .*none; type"):
        pool.run(begun_at, 1, tmp_path / "none", "last", 1, process_group=False)


def test_a_file_of_lightnings_is_refused_in_a_sentence(pool: Any, tmp_path: Path) -> None:
    torch.save({"state_dict": Mlp().state_dict()}, tmp_path / "model.ckpt")
    with pytest.raises(RanksError, match=r"model\.ckpt is a file, and a checkpoint is a folder .*weights_only=True"):
        pool.run(begun_at, 1, tmp_path / "run", str(tmp_path / "model.ckpt"), 1, process_group=False)
