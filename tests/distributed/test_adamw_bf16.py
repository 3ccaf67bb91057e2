"""`optimizer=adamw_bf16`: learns as AdamW does with half of its state, which goes on under any other mix as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fewer_bits_runs import MIXES, STEPS, STOP, goes_on_to_the_bit, gone_on, plan_of, whole

from framework.compose import model_on_meta
from framework.memory import bytes_per_rank

OURS = "adamw_bf16"
NEAR = 0.01
"""How far losses may be from those of fp32 state, in each of 40 steps (measured: 0.0015)."""
SAME, FEW, APART = 1e-6, 4, 2e-3
"""How far losses may be from those of the mix that was left: in the first few steps (measured: 1e-7, as with fp32
state), and in each of 20 (1.2e-4): a last digit of fp32 decides now and then which way an average is rounded. Mixes
that nobody stops come apart as far (in 40 steps measured: 5e-4)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("half")


@pytest.mark.parametrize("mix", MIXES)
def test_it_learns_as_adamw_does_with_half_the_state(pool: Any, folder: Path, mix: str) -> None:
    ours, fp32 = whole(pool, folder, mix, OURS), whole(pool, folder, "one", "adamw")
    assert sum(fp32[0][0][-10:]) < 0.85 * 10 * fp32[0][0][0]  # so that learning nothing isn't near
    assert ours[0][0] == pytest.approx(fp32[0][0], rel=NEAR)
    plan = plan_of(mix, folder, f"optimizer={OURS} trainer.max_steps={STEPS}")
    expected = [rank.optimizer_bytes for rank in bytes_per_rank(plan, model_on_meta(plan.components["model"])[0])]
    assert [held for _, held, _ in ours] == expected


def test_half_is_meant_to_the_byte(pool: Any, folder: Path) -> None:
    (_, ours, weights), (_, fp32, _) = whole(pool, folder, "one", OURS)[0], whole(pool, folder, "one", "adamw")[0]
    elements, steps = sum(tensor.numel() for tensor in weights.values()), 4 * len(weights)
    assert (ours, fp32) == (4 * elements + steps, 8 * elements + steps)


@pytest.mark.parametrize("mix", MIXES)
def test_a_run_goes_on_to_the_bit_under_the_same_mix(pool: Any, folder: Path, mix: str) -> None:
    goes_on_to_the_bit(pool, folder, mix, OURS)


@pytest.mark.parametrize(
    ("before", "after"),
    [("one", "fsdp"), ("fsdp", "tp"), ("tp", "pp"), ("pp", "fsdp x tp"), ("fsdp x tp", "ddp"), ("ddp", "one")],
)
def test_a_run_goes_on_under_another_mix(pool: Any, folder: Path, before: str, after: str) -> None:
    losses = gone_on(pool, folder, before, after, OURS)[0][0]
    want = whole(pool, folder, before, OURS)[0][0][STOP:]
    assert losses[:FEW] == pytest.approx(want[:FEW], rel=SAME)
    assert losses == pytest.approx(want, rel=APART)
