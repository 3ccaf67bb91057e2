"""Context parallelism in runs: pieces without a valid target, evaluation, resuming; the parity table has the mixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import fit
from mixes import GLOBAL_BATCH, SEQUENCE, Mix
from parity import LR, MOMENTUM, SHAPE, SmallGpt, plan_of, samples
from test_resume_matrix import MATRIX
from torch import Tensor
from torch.nn.functional import cross_entropy
from user_modules import Rows, loader

from framework.plan import RunPlan
from framework.trainer import Trainer
from framework.verify.reference import Bounds, Result, disagreements, global_norm, train

FRONT, END = slice(0, SEQUENCE // 2), slice(3 * SEQUENCE // 4, SEQUENCE)
OPTIONS = [("cp=ring", END), ("cp=allgather cp.balance=none", END), ("cp=ulysses", FRONT)]
"""And which targets count: one of two ranks has none of them."""


class ByHand(SmallGpt):
    """Its mean over valid targets is 0 / 0, with a gradient that isn't finite, where there is none."""

    def loss(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits, targets = self(batch["inputs"], batch.get("positions")), batch["targets"]
        valid = targets != -100
        nll = cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none")
        return {"loss": (nll * valid.flatten()).sum() / valid.sum(), "weight": valid.sum()}


def by_hand() -> ByHand:
    with torch.device("meta"):
        return ByHand(**SHAPE)


def only(counted: slice) -> Rows:
    """Samples of which only these targets count."""
    columns = samples().columns
    targets = torch.full_like(columns["targets"], -100)
    targets[:, counted] = columns["inputs"][:, counted].flip(1)
    return Rows(inputs=columns["inputs"], targets=targets)


def outcome(plan: RunPlan, counted: slice) -> tuple[Result, dict[str, Tensor]]:
    seen = fit(plan, by_hand, only(counted))
    updates = {name: seen.final[name] - start for name, start in seen.initial.items()}
    norms = [global_norm(step.values()) for step in seen.gradients]
    return Result(seen.losses, norms, seen.gradients[0], updates), seen.initial


@pytest.mark.parametrize(("words", "counted"), OPTIONS)
def test_a_piece_without_a_valid_target_counts_nothing_but_is_seen(pool: Any, words: str, counted: slice) -> None:
    """The gradients of its loss are no numbers; those of its keys and values, of other ranks' losses, are."""
    outcomes = pool.run(outcome, 2, plan_of(Mix("", 2, words)), counted, process_group=False, timeout=90)
    model = ByHand(**SHAPE).double()
    model.load_state_dict(outcomes[0][1])
    pieces = zip(*(column.split(GLOBAL_BATCH) for column in only(counted).columns.values()), strict=True)
    steps = [[{"inputs": inputs, "targets": targets}] for inputs, targets in pieces]

    def loss_of(module: Any, batch: Any) -> tuple[Tensor, float]:
        found = module.loss(batch)
        return found["loss"], float(found["weight"])

    want = train(model, steps, loss_of, lr=LR, momentum=MOMENTUM)
    for result, _ in outcomes:
        assert disagreements(result, want, Bounds()) == []


def validated(plan: RunPlan) -> float:
    """The logged loss of a validation over all samples."""
    trainer = Trainer(plan)
    with torch.device("meta"):
        model = SmallGpt(**SHAPE)
    trainer.validate(model, loader(samples(), plan.batch.local_batch_size), verbose=False)
    return float(trainer.callback_metrics["val_loss"])


def test_evaluation_is_a_mean_over_the_tokens_of_all_pieces(pool: Any) -> None:
    one, *others = (
        pool.run(validated, ranks, plan_of(Mix("", ranks, words)), process_group=False, timeout=90)
        for ranks, words in ((1, ""), (2, "cp=ring"), (4, "cp=allgather strategy=ddp"))
    )
    for found in others:
        assert found == pytest.approx([one[0]] * len(found), rel=1e-12)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Mix("", 4, "cp=ring strategy=fsdp activation=full"), Mix("", 2, "tp=dtensor")),
        (Mix("", 2, "strategy=fsdp"), Mix("", 4, "cp=ulysses strategy=ddp")),
    ],
    ids=["from ring x fsdp", "to ulysses x ddp"],
)
def test_a_run_goes_on_under_another_mix(pool: Any, tmp_path: Path, before: Mix, after: Mix) -> None:
    whole, losses, *_ = MATRIX.run(pool, Mix("", 1), 6, tmp_path)
    MATRIX.run(pool, before, MATRIX.stop, tmp_path, save=tmp_path / "saved")
    weights, later, _, steps = MATRIX.run(pool, after, 6, tmp_path, start=tmp_path / "saved")
    assert steps == 6
    assert later == pytest.approx(losses[MATRIX.stop :], rel=1e-9)
    for name, tensor in whole.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-12, msg=name)
