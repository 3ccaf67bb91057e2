"""Twelve kinds of model run in stages, unedited, and equal one process; what can't is refused with the reason."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from families import FAMILIES, ResNet, samples
from family_runs import MICRO, MICROBATCHES, Row, family_plan, row
from figures import keep
from user_modules import loader

from framework.trainer import Trainer

BY_NAME = {family.name: family for family in FAMILIES}
SAMPLE = [("T5 (encoder-decoder)", 2), ("U-Net", 2), ("ResNet", 2), ("graph net", 2), ("VAE", 4)]


def check(result: Row) -> None:
    assert not result.refused
    assert result.lines == []
    assert result.dearest <= 1.3


@pytest.mark.parametrize(("name", "stages"), SAMPLE, ids=[f"{name}, {stages}" for name, stages in SAMPLE])
def test_a_family_in_stages_equals_one_process(pool, name, stages):
    check(row(pool, BY_NAME[name], stages))


def test_two_optimizers_are_refused_with_the_reason(pool):
    assert row(pool, BY_NAME["GAN"], 2).refused == "pp=gpipe: a pipeline runs no manual optimization. Type pp=none."


def evaluated(plan: Any, pieces: int) -> float:
    """Validate on ten samples, in batches of which the last is smaller."""
    torch.manual_seed(plan.seed)
    module = ResNet()
    metrics = Trainer(plan).validate(module, loader(samples(10), plan.batch.local_batch_size), verbose=False)
    return float(metrics[0]["val_loss"])


def test_evaluation_takes_any_size_of_batch(pool):
    plan = family_plan(2).with_(command="validate")
    seen = pool.run(evaluated, 2, plan, 1, process_group=False)
    torch.manual_seed(0)
    module = ResNet().double().eval()
    want = module.loss(next(iter(loader(samples(10), 10))))
    assert seen == pytest.approx([want.item()] * 2, rel=1e-9)


@pytest.mark.campaign
def test_all_families(pool):
    """Writes `tests/campaign/families.json`; at least nine run in 2 and in 4 stages, the others say why not."""
    rows = [row(pool, family, stages) for family in FAMILIES for stages in (2, 4)]
    keep("families", {"micro_batch": MICRO, "microbatches": MICROBATCHES, "rows": [asdict(one) for one in rows]})
    ran = [one for one in rows if not one.refused]
    for one in ran:
        check(one)
    assert len({one.family for one in ran}) >= 9
