"""P07, P08: the loss is the mean over the tokens of the whole optimizer step, the last window's too."""

from __future__ import annotations

from functools import partial

import pytest
from fitting import fit
from plans import make_plan
from user_modules import Scalar, tokens

STRATEGIES = [None, "ddp", "fsdp"]


def gradients(probes) -> list[list[float]]:
    """The gradient of `w` in each optimizer step, by rank."""
    return [[step["w"].item() for step in probe.gradients] for probe in probes]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_p07a_unequal_ranks(pool, strategy):
    plan = make_plan(2, strategy=strategy)
    for probe in pool.run(fit, 2, plan, Scalar, tokens([1], [5, 5, 5]), process_group=False):
        assert [g["w"].item() for g in probe.gradients] == pytest.approx([4.0])  # mean of means: 3.0
        assert probe.final["w"].item() == pytest.approx(-0.4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_p07b_unequal_ranks_and_micro_steps(pool, strategy):
    data = tokens([8], [2, 2], [0, 0, 0], [2, 2])
    for probe in pool.run(fit, 2, make_plan(2, strategy=strategy, accumulation=2), Scalar, data, process_group=False):
        assert [g["w"].item() for g in probe.gradients] == pytest.approx([2.0])  # mean of means: 3.0
        assert probe.final["w"].item() == pytest.approx(-0.2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_p07_a_micro_batch_without_valid_tokens_counts_nothing(pool, strategy):
    ranks = 2 if strategy else 1
    plan = make_plan(ranks, strategy=strategy, accumulation=4 // ranks)
    for probe in pool.run(fit, ranks, plan, Scalar, tokens([3], [], [6, 6], [9]), process_group=False):
        assert [g["w"].item() for g in probe.gradients] == pytest.approx([24 / 4])
        assert probe.losses == [0.0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("batches", "want"), [(6, [1.0, 1.0]), (3, [1.0])])
def test_p08_last_window(pool, strategy, batches, want):
    """Stock Lightning gives [1.0, 0.5] and [0.75]."""
    ranks = 2 if strategy else 1
    data = tokens(*[[1.0]] * (batches * ranks))
    for epochs in (1, 2):
        plan = make_plan(ranks, strategy=strategy, accumulation=4, trainer={"max_epochs": epochs})
        for probe in pool.run(fit, ranks, plan, partial(Scalar, lr=0.5), data, process_group=False):
            assert [g["w"].item() for g in probe.gradients] == want * epochs
            assert probe.global_step == len(want) * epochs
            assert probe.final["w"].item() == -0.5 * len(want) * epochs
