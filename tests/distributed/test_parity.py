"""Each mix gives the numbers of the reference: losses, gradient norm, first gradients and updates, on every rank."""

from __future__ import annotations

import copy

import pytest
import torch
from mixes import BOUNDS, IN_SUITE, MIXES, Mix
from parity import LR, MOMENTUM, SHAPE, SmallGpt, equal_to_reference, global_batches, mean_loss, reference_of

from framework.verify.reference import disagreements, train


@pytest.mark.parametrize(
    "mix", [pytest.param(mix, id=mix.name, marks=() if mix in IN_SUITE else pytest.mark.campaign) for mix in MIXES]
)
def test_mix_equals_the_reference(pool, mix):
    equal_to_reference(pool, mix)


def test_the_clipping_rows_do_clip(pool):
    """A bound that is never reached would prove nothing."""
    for mix in MIXES:
        clip, algorithm = mix.clip
        if clip is not None:
            want = reference_of(pool, Mix("", 1, f"precision={mix.settings['precision']}"))
            largest = max(float(g.abs().max()) for g in want.first_gradients.values())
            assert (min(want.grad_norms) if algorithm == "norm" else largest) > clip


FAULTS = {
    "sum of ranks": lambda: (global_batches(), lambda model, batch: (2 * mean_loss(model, batch)[0], 1)),
    "mean of ranks' means": lambda: (global_batches(2), lambda model, batch: (mean_loss(model, batch)[0], 1)),
    "mean of micro-batches' means": lambda: (global_batches(8), lambda model, batch: (mean_loss(model, batch)[0], 1)),
    "no all-reduce": lambda: ([pieces[:1] for pieces in global_batches(2)], mean_loss),
    "last micro-batch skipped": lambda: ([pieces[:-1] for pieces in global_batches(8)], mean_loss),
}


@pytest.mark.parametrize("precision", list(BOUNDS))
@pytest.mark.parametrize("fault", list(FAULTS))
def test_each_planted_fault_exceeds_the_bounds_of_each_precision(fault, precision):
    torch.manual_seed(0)
    right = SmallGpt(**SHAPE).double()
    wrong = copy.deepcopy(right)
    want = train(right, global_batches(), mean_loss, lr=LR, momentum=MOMENTUM)
    batches, loss_of = FAULTS[fault]()
    got = train(wrong, batches, loss_of, lr=LR, momentum=MOMENTUM)
    lines = disagreements(got, want, BOUNDS[precision])
    assert len([line for line in lines if line.startswith("first gradient")]) > len(want.updates) / 2
