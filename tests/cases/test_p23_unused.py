"""P23: parameters without a gradient under DDP: named with the option that helps, or right with it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from fitting import fit
from plans import make_plan, option
from user_modules import TwoHeads, regression

from framework.testing import RanksError

DATA = regression(samples=24)
STEPS = 3


def run(
    pool: Any, ranks: tuple[int, ...], find: bool, optimizer: str = "sgd", reduction: str = "bucketed"
) -> list[Any]:
    plan = make_plan(
        2,
        micro_batch_size=4,
        strategy="ddp",
        trainer={"max_steps": STEPS},
        components={"strategy": option("strategy", "ddp", find_unused_parameters=find, reduction=reduction)},
    )
    return pool.run(fit, 2, plan, partial(TwoHeads, ranks, optimizer), DATA, process_group=False, timeout=60)


@pytest.mark.parametrize("reduction", ["bucketed", "overlap"])
@pytest.mark.parametrize("ranks", [(), (0,)], ids=["nowhere", "on rank 0"])
def test_p23_what_is_not_used_is_named_with_the_option(pool: Any, ranks: tuple[int, ...], reduction: str) -> None:
    with pytest.raises(RanksError, match=r"head_b\.weight, head_b\.bias got no gradient") as caught:
        run(pool, ranks, find=False, reduction=reduction)
    assert "strategy.find_unused_parameters=true" in str(caught.value)


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning")
@pytest.mark.parametrize("reduction", ["bucketed", "overlap"])
def test_p23_a_used_nowhere_stays_as_it_was_also_with_weight_decay(pool: Any, reduction: str) -> None:
    for probe in run(pool, (), find=True, optimizer="adamw", reduction=reduction):
        assert torch.equal(probe.final["head_b.weight"], probe.initial["head_b.weight"])
        assert torch.equal(probe.final["head_b.bias"], probe.initial["head_b.bias"])
        assert not torch.equal(probe.final["layers.0.0.weight"], probe.initial["layers.0.0.weight"])


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning")
@pytest.mark.parametrize("reduction", ["bucketed", "overlap"])
def test_p23_b_used_on_one_rank_is_averaged_over_both(pool: Any, reduction: str) -> None:
    """The bias's gradient is 4, its batch, on rank 0 and nothing on rank 1: 2 on both."""
    for probe in run(pool, (0,), find=True, reduction=reduction):
        torch.testing.assert_close(probe.gradients[0]["head_b.bias"], torch.full((4,), 2.0))
        moved = probe.initial["head_b.bias"] - probe.final["head_b.bias"]
        torch.testing.assert_close(moved, torch.full((4,), 2.0 * 0.01 * STEPS))
