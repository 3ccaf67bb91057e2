"""`kill -9` of real training runs: each recovers and ends with the weights of an undisturbed one."""

from __future__ import annotations

import os
import random
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kills
import pytest
import torch
from figures import keep
from kills import MIXES, MOMENTS

from framework.launch import prewarm

SEED = 20
BOUND = 1e-6
"""Relative, in fp32; a repeated or skipped batch makes 1e-2 and more."""

Reference = Callable[[str], tuple[dict[str, torch.Tensor], str | None]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Final weights and last link of the ledger of a mix without kills; computed once a mix."""
    prewarm()
    known: dict[str, tuple[dict[str, torch.Tensor], str | None]] = {}

    def weights(mix: str) -> tuple[dict[str, torch.Tensor], str | None]:
        if mix not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            result = kills.run(kills.plan_of(mix, folder))
            assert result.status == "finished", result.describe()
            known[mix] = kills.final_weights(folder), kills.ledger(folder)[1]
        return known[mix]

    return weights


def survive(mix: str, planned: list[dict[str, Any]], folder: Path, undisturbed: Reference) -> None:
    """Run a mix with kills; AssertionError unless it ends as if nothing had happened."""
    row = measure(mix, planned, folder, undisturbed)
    assert row["survived"], row


def measure(
    mix: str, planned: list[dict[str, Any]], folder: Path, undisturbed: Reference, *words: str
) -> dict[str, Any]:
    """Run a mix with kills and return what happened."""
    result = kills.run(kills.plan_of(mix, folder, planned, *words))
    done = kills.times(folder, "kills.txt")
    firsts = kills.times(folder, "first_steps.txt")
    finished = result.status == "finished" and result.restarts == len(done) > 0
    weights, link = undisturbed(mix)
    distance = kills.difference(kills.final_weights(folder), weights) if finished else float("inf")
    wrong, own_link = kills.ledger(folder) if finished else ([], None)
    return {
        "mix": mix,
        "kills": planned,
        "survived": finished and distance <= BOUND and not wrong and own_link == link,
        "ledger": wrong,
        "restarts": result.restarts,
        "resumed_from": result.resumed_from,
        "difference": distance,
        "kill_to_first_step_s": [min((at - kill for at in firsts if at > kill), default=None) for kill in done],
        "reason": result.describe(),
    }


@pytest.mark.parametrize(
    ("mix", "moment"),
    [
        ("ddp 2", "start-up"),
        ("fsdp 2", "before the first checkpoint"),
        ("gpipe 2", "step"),
        ("tp 2", "save"),
        ("ddp 2", "save"),
        ("gpipe 2", "validation"),
    ],
)
def test_a_killed_rank_costs_nothing_but_time(mix: str, moment: str, tmp_path: Path, undisturbed: Reference) -> None:
    """A seeded sample of the campaign: every moment, every single axis."""
    kill = kills.draw(random.Random(f"{SEED} {mix} {moment}"), mix, moment)
    survive(mix, [kill], tmp_path, undisturbed)


def test_three_kills_in_one_run(tmp_path: Path, undisturbed: Reference) -> None:
    """As many as `recovery.max_restarts` allows, at three moments."""
    planned = [
        {"attempt": 0, "rank": 1, "moment": "step", "step": 3, "delay_s": 0.0},
        {"attempt": 1, "rank": 0, "moment": "save", "step": 4, "delay_s": 0.0},
        {"attempt": 2, "rank": 2, "moment": "step", "step": 6, "delay_s": 0.0},
    ]
    survive("fsdp 2 x 1f1b 2", planned, tmp_path, undisturbed)


def test_one_kill_more_than_allowed_ends_clearly(tmp_path: Path) -> None:
    """The rank, the signal and the setting are named."""
    planned = [{"attempt": n, "rank": 1, "moment": "start-up", "step": 0, "delay_s": 0.0} for n in range(2)]
    result = kills.run(kills.plan_of("ddp 2", tmp_path, planned, "recovery.max_restarts=1"))
    assert (result.status, result.exit_code, result.restarts) == ("failed", 1, 1)
    assert result.describe().startswith("Rank 1 was killed by signal 9 (SIGKILL)")
    assert "recovery.max_restarts=1" in result.describe()


def resized(folder: Path, chance: random.Random) -> list[str]:
    """Make the steps in three launches under mixes drawn by chance, each with a kill or without; return the mixes."""
    mixes = []
    for until in (chance.randint(2, 3), chance.randint(4, 6), kills.STEPS):
        mix = chance.choice(list(MIXES))
        planned = [kills.draw(chance, mix, chance.choice(MOMENTS))] if chance.random() < 0.7 else []
        plan = kills.plan_of(mix, folder, planned, "ckpt_path=auto")
        result = kills.run(plan.with_(trainer={**plan.trainer, "max_steps": until}))
        assert result.status == "finished", result.describe()
        mixes.append(mix)
    return mixes


def test_kills_and_resizes_lose_no_sample_and_repeat_none(tmp_path: Path, undisturbed: Reference) -> None:
    """A seeded sample of the campaign: one run of three launches under different mixes."""
    mixes = resized(tmp_path, random.Random(f"{SEED} resized 1"))
    assert len(set(mixes)) > 1
    assert kills.ledger(tmp_path) == ([], undisturbed("ddp 2")[1])


@pytest.mark.campaign
def test_campaign_of_kills_and_resizes(tmp_path: Path, undisturbed: Reference) -> None:
    """Thirty runs of three launches each, kills in most of them; figures go to `tests/campaign/resizes.json`."""
    rows = []
    for number in range(30):
        folder = tmp_path / str(number)
        mixes = resized(folder, random.Random(f"{SEED} resized {number}"))
        wrong, link = kills.ledger(folder)
        rows.append({"mixes": mixes, "findings": wrong, "same_order": link == undisturbed("ddp 2")[1]})
    whole = sum(not row["findings"] and row["same_order"] for row in rows)
    keep("resizes", {"seed": SEED, "runs": len(rows), "whole": whole, "rows": rows})
    assert whole == len(rows), [row for row in rows if row["findings"] or not row["same_order"]]


def in_a_save(number: int, folder: Path, undisturbed: Reference) -> dict[str, Any]:
    """Kill a rank at a moment of an asynchronous save, from its copying to its commit and a little after."""
    chance = random.Random(f"{SEED} asynchronous {number}")
    mix = chance.choice([mix for mix in MIXES if " x " not in mix])
    kill = kills.draw(chance, mix, "save")
    kill |= {"step": chance.choice((2, 4, 6)), "delay_s": round(chance.uniform(0, 0.06), 4)}
    row = measure(mix, [kill], folder, undisturbed, "checkpoint.mode=async")
    start = row.pop("resumed_from")
    row["lost_steps"] = kill["step"] - (0 if start is None else int(Path(start).name.partition("-")[2]))
    return row


@pytest.mark.parametrize("number", range(2))
def test_a_kill_in_an_asynchronous_save(number: int, tmp_path: Path, undisturbed: Reference) -> None:
    """A seeded sample of the campaign."""
    row = in_a_save(number, tmp_path, undisturbed)
    assert row["survived"], row
    assert row["lost_steps"] <= kills.EVERY, "it goes on from that save or from the one before"


@pytest.mark.campaign
def test_campaign_of_kills_in_asynchronous_saves(tmp_path: Path, undisturbed: Reference) -> None:
    """Two hundred; figures go to `tests/campaign/save_kills.json`."""
    rows = []
    for number in range(200):
        rows.append(in_a_save(number, tmp_path / str(number), undisturbed))
        shutil.rmtree(tmp_path / str(number))
    good = [row for row in rows if row["survived"] and row["lost_steps"] <= kills.EVERY]
    figures = {
        "seed": SEED,
        "kills": len(rows),
        "recovered": len(good),
        "from_that_save_or_a_later_one": sum(row["lost_steps"] <= 0 for row in rows),
        "largest_difference": max(row["difference"] for row in rows),
    }
    keep("save_kills", figures)
    assert len(good) == len(rows), [row for row in rows if row not in good]


@pytest.mark.campaign
def test_campaign_of_kills(tmp_path: Path, undisturbed: Reference) -> None:
    """Eight kills a mix over all moments, six mixes; figures with commit and seed go to `tests/campaign/kills.json`."""
    rows = []
    for mix in MIXES:
        for number in range(8):
            chance = random.Random(f"{SEED} campaign {mix} {number}")
            moment = MOMENTS[number % len(MOMENTS)]
            planned = [kills.draw(chance, mix, moment)]
            rows.append(measure(mix, planned, tmp_path / f"{mix}-{number}".replace(" ", "_"), undisturbed))
    seconds = [second for row in rows for second in row["kill_to_first_step_s"] if second is not None]
    figures = {
        "seed": SEED,
        "cores": os.cpu_count(),
        "kills": len(rows),
        "survived": sum(row["survived"] for row in rows),
        "largest_difference": max(row["difference"] for row in rows),
        "kill_to_first_step_s": {"median": statistics.median(seconds), "max": max(seconds)},
        "rows": rows,
    }
    keep("kills", figures)
    assert figures["survived"] == len(rows), [row for row in rows if not row["survived"]]
