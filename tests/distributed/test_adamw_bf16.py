"""`optimizer=adamw_bf16`: learns as AdamW does with half of its state, which goes on under any other mix as it was."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from test_adamw8bit import MIXES, STEPS, STOP, plan_of, run

from framework.compose import model_on_meta
from framework.memory import bytes_per_rank

NEAR = 0.01
"""How far losses may be from those of fp32 state, in each of 40 steps (measured: 0.0015)."""
SAME, FEW, APART = 1e-6, 4, 2e-3
"""How far losses may be from those of the mix that was left: in the first few steps (measured: 1e-7, as with fp32
state), and in each of 20 (1.2e-4): a last digit of fp32 decides now and then which way an average is rounded. Mixes
that nobody stops come apart as far (in 40 steps measured: 5e-4)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("half")


@functools.cache
def whole(pool: Any, folder: Path, mix: str, optimizer: str = "adamw_bf16") -> Any:
    """A run that isn't stopped."""
    words = f"optimizer={optimizer} trainer.max_steps={STEPS} checkpoint.save_top_k=0"
    return run(pool, plan_of(mix, folder / f"whole-{mix}-{optimizer}".replace(" ", "_"), words))


@functools.cache
def stopped(pool: Any, folder: Path, mix: str) -> Path:
    """A run that is saved at its end, in the middle of the other."""
    path = folder / f"half-{mix}".replace(" ", "_")
    run(pool, plan_of(mix, path, f"optimizer=adamw_bf16 trainer.max_steps={STOP} checkpoint.every_n_steps={STOP}"))
    return path / "checkpoints" / f"step-{STOP:06d}"


@pytest.mark.parametrize("mix", MIXES)
def test_it_learns_as_adamw_does_with_half_the_state(pool: Any, folder: Path, mix: str) -> None:
    ours, fp32 = whole(pool, folder, mix), whole(pool, folder, "one", "adamw")
    assert sum(fp32[0][0][-10:]) < 0.85 * 10 * fp32[0][0][0]  # so that learning nothing isn't near
    assert ours[0][0] == pytest.approx(fp32[0][0], rel=NEAR)
    plan = plan_of(mix, folder, f"optimizer=adamw_bf16 trainer.max_steps={STEPS}")
    expected = [rank.optimizer_bytes for rank in bytes_per_rank(plan, model_on_meta(plan.components["model"])[0])]
    assert [held for _, held, _ in ours] == expected


def test_half_is_meant_to_the_byte(pool: Any, folder: Path) -> None:
    (_, ours, weights), (_, fp32, _) = whole(pool, folder, "one")[0], whole(pool, folder, "one", "adamw")[0]
    elements, steps = sum(tensor.numel() for tensor in weights.values()), 4 * len(weights)
    assert (ours, fp32) == (4 * elements + steps, 8 * elements + steps)


@pytest.mark.parametrize("mix", MIXES)
def test_a_run_goes_on_to_the_bit_under_the_same_mix(pool: Any, folder: Path, mix: str) -> None:
    start = stopped(pool, folder, mix)
    words = f"optimizer=adamw_bf16 trainer.max_steps={STEPS} checkpoint.save_top_k=0 ckpt_path={start}"
    again = run(pool, plan_of(mix, folder / f"again-{mix}".replace(" ", "_"), words))
    assert again[0][0] == whole(pool, folder, mix)[0][0][STOP:]
    want = whole(pool, folder, mix)[0][2]
    assert again[0][2].keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(again[0][2][name], tensor), name


@pytest.mark.parametrize(
    ("before", "after"),
    [("one", "fsdp"), ("fsdp", "tp"), ("tp", "pp"), ("pp", "fsdp x tp"), ("fsdp x tp", "ddp"), ("ddp", "one")],
)
def test_a_run_goes_on_under_another_mix(pool: Any, folder: Path, before: str, after: str) -> None:
    start = stopped(pool, folder, before)
    words = f"optimizer=adamw_bf16 trainer.max_steps={STEPS} checkpoint.save_top_k=0 ckpt_path={start}"
    name = f"{before}-{after}".replace(" ", "_")
    losses = run(pool, plan_of(after, folder / name, words))[0][0]
    want = whole(pool, folder, before)[0][0][STOP:]
    assert losses[:FEW] == pytest.approx(want[:FEW], rel=SAME)
    assert losses == pytest.approx(want, rel=APART)
