"""Each mix gives the numbers of the reference: losses, gradient norm, first gradients and updates, on every rank."""

from __future__ import annotations

import pytest
import torch
from mixes import MIXES, STEPS, Mix
from parity import initial_of, outcomes_of, reference_of
from reference import disagreements


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_mix_equals_the_reference(pool, mix):
    want = reference_of(pool, mix)
    assert len(want.losses) == STEPS
    outcomes = outcomes_of(pool, mix)
    for rank, outcome in enumerate(outcomes):
        assert disagreements(outcome.result, want, mix.bounds) == [], f"rank {rank}"
    start = initial_of(pool, mix.settings["precision"])
    assert {name for name, tensor in outcomes[0].initial.items() if not torch.equal(tensor, start[name])} == set()
    assert set(outcomes[0].initial) == set(start)


@pytest.mark.parametrize("words", ["", "strategy=fsdp", "pp=gpipe pp.microbatches=4"])
def test_the_clipping_rows_do_clip(pool, words):
    """A bound that is never reached would prove nothing."""
    for mix in MIXES:
        clip, algorithm = mix.clip
        if clip is not None:
            want = reference_of(pool, Mix("", 1, f"precision={mix.settings['precision']}"))
            largest = max(float(g.abs().max()) for g in want.first_gradients.values())
            assert (min(want.grad_norms) if algorithm == "norm" else largest) > clip
