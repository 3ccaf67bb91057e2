"""P24: two optimizers in one batch are one step. P25: one weight on two stages is one weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import Gan, samples
from fitting import fit
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from plans import make_plan, option
from torch import Tensor, nn
from user_modules import Rows, loader

from framework.survey import survey
from framework.trainer import Trainer
from framework_plugins.model.gpt import GPT
from framework_plugins.pp.cutting import SURVEY
from framework_plugins.pp.schedules import Schedule


class Batches(Callback):
    """Counts batches, and notes at which of them the learning rates were read."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1


class Watched(Gan):
    """Keeps what the generator has for a gradient when the critic steps."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.foreign = 0, []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.turn += 1
        if self.turn % 2 == 0:  # the critic
            before = self.generator[0].weight.grad
            self.foreign.append(torch.equal(before, self.kept))
        else:
            self.kept = self.generator[0].weight.grad.clone()


def steps_of_a_gan(plan: Any, folder: str) -> tuple[int, int, int, list[str], bool]:
    counted, keep = Batches(), ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)
    module = Watched().double()
    trainer = Trainer(plan, callbacks=[counted, keep])
    trainer.fit(module, loader(samples(100), plan.batch.local_batch_size))
    files = sorted(name for name in keep.best_k_models or [keep.last_model_path])
    return counted.seen, trainer.global_step, trainer.strategy.optimizer_calls, files, all(module.foreign)


def test_p24_ten_steps_are_ten_batches(pool, tmp_path):
    plan = make_plan(
        1,
        micro_batch_size=4,
        precision="fp64",
        run_dir=str(tmp_path),
        trainer={"max_steps": 10},
        components={"checkpoint": option("checkpoint", "dcp")},
    )
    (seen,) = pool.run(steps_of_a_gan, 1, plan, str(tmp_path / "kept"), process_group=False)
    batches, step, calls, _, clean = seen
    assert (batches, step, calls) == (10, 10, 20)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step=10.ckpt", "step=5.ckpt"]
    assert clean, "the critic's pass left something in the generator's gradients"


def clip_a_gan(plan: Any) -> None:
    Trainer(plan).fit(Gan(), loader(samples(8), 4))


@pytest.mark.parametrize("setting", [{"gradient_clip_val": 1.0}, {}])
def test_p24_automatic_clipping_and_accumulation_are_refused(setting):
    plan = make_plan(1, micro_batch_size=4, accumulation=1 if setting else 2, trainer=setting)
    with pytest.raises(MisconfigurationException, match="manual optimization"):
        clip_a_gan(plan)


def test_p24_a_pipeline_refuses_manual_optimization():

    plan = make_plan(2, pp="gpipe", micro_batch_size=4)
    (problem,) = Schedule().check_model(plan, Gan())
    assert str(problem) == "pp=gpipe: a pipeline runs no manual optimization. Type pp=none."


class Scalars(LightningModule):
    """h = w x on the first stage, w h + 5 w on the second; `other` only makes two places to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = Times(), Times()
        self.leave.w = self.enter.w
        self.last = Times(1.0)
        self.last.w.requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        h = self.enter(batch["x"])
        loss = (self.leave(self.last(h)) + 5 * self.leave.w).sum()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Times(nn.Module):
    def __init__(self, w: float = 2.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


@pytest.mark.parametrize("clip", [None, 8.5])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_p25_the_worked_example(pool, schedule, clip):
    plan = make_plan(2, pp=schedule, trainer={"max_steps": 1, "gradient_clip_val": clip})
    plan = (
        plan.with_(batch=plan.batch)
        if schedule == "gpipe"
        else make_plan(2, pp=schedule, microbatches=2, trainer={"max_steps": 1, "gradient_clip_val": clip})
    )
    data = Rows(x=torch.full((plan.batch.global_batch_size, 1), 3.0))
    for seen in pool.run(fit, 2, plan, Scalars, data, process_group=False):
        gradient, norm = seen.gradients[0], seen.grad_norm
        assert gradient == {"enter.w": torch.tensor([17.0])}  # 6 + 11, under its first name, once
        assert norm == (None if clip is None else pytest.approx(17.0, rel=1e-6))
        assert seen.final["enter.w"].item() == pytest.approx(0.3 if clip is None else 2.0 - 0.85, rel=1e-6)


def test_p25_a_cut_between_blocks_says_what_to_type():

    plan = make_plan(2, pp="gpipe", microbatches=2)
    (problem,) = Schedule(cut="blocks").check_model(plan, GPT(vocab_size=8, width=8, layers=2, heads=2, tied=True))
    assert "'tokens.weight' and 'output.weight' are one tied parameter" in str(problem)
    assert problem.fix == "pp.cut=graph"


class TiedGpt(GPT):
    """The default GPT, small, with a wide enough start and SGD."""

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.12)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.04, momentum=0.9)


def tied_gpt() -> LightningModule:
    with torch.device("meta"):
        return TiedGpt(vocab_size=16, layers=4, width=16, heads=4, hidden=32, context=8, tied=True)


def gpt_samples() -> Rows:
    ids = samples(96).columns
    return Rows(inputs=ids["ids"], targets=ids["next"])


TIED = [
    ("gpipe x fsdp", {"pp": "gpipe", "strategy": "fsdp"}, 4),
    ("1f1b x ddp", {"pp": "1f1b", "strategy": "ddp"}, 4),
    ("zbv, first and last stage on one rank", {"pp": "zbv"}, 2),
]


@pytest.mark.parametrize(("name", "mix", "ranks"), TIED, ids=[name for name, *_ in TIED])
def test_p25_tied_gpt_equals_one_process_and_resumes_there(pool, tmp_path, name, mix, ranks):
    """Four steps under the mix, then two in one process from its checkpoint, are six in one process."""

    def plan_of(ranks: int, steps: int, folder: str, **mix: Any) -> Any:
        size = 16 // (ranks // 2 * 4) if mix.get("pp") else 16
        return make_plan(
            ranks,
            **mix,
            microbatches=4 if mix.get("pp") else 1,
            micro_batch_size=size,
            precision="fp64",
            run_dir=str(tmp_path / folder),
            trainer={"max_steps": steps, "gradient_clip_val": 0.5},
            components={"checkpoint": option("checkpoint", "dcp")},
        )

    path = str(tmp_path / "saved")
    cut = pool.run(
        fit, ranks, plan_of(ranks, 4, "cut", **mix), tied_gpt, gpt_samples(), process_group=False, save_to=path
    )
    (want,) = pool.run(fit, 1, plan_of(1, 6, "whole"), tied_gpt, gpt_samples(), process_group=False)
    for seen in cut:
        assert set(seen.initial) == set(want.initial)
        assert all(torch.equal(seen.initial[n], tensor) for n, tensor in want.initial.items())
        assert seen.losses == pytest.approx(want.losses[:4], rel=1e-9)
        assert seen.grad_norm is not None
    (resumed,) = pool.run(
        fit, 1, plan_of(1, 6, "resumed"), tied_gpt, gpt_samples(), process_group=False, ckpt_path=path
    )
    for n, tensor in want.final.items():
        assert torch.allclose(resumed.final[n], tensor, rtol=1e-9, atol=1e-12), n


def test_p25_refused_where_one_rank_would_shard_it_twice():

    plan = make_plan(4, pp="zbv", strategy="fsdp", microbatches=4)
    model, rows = tied_gpt(), gpt_samples()
    model.__dict__[SURVEY] = survey(model, next(iter(loader(rows, 2))))
    (problem,) = Schedule(schedule="zbv", stages_per_rank=2).check_model(plan, model)
    assert "one rank would hold 'tokens.weight' for stages 0, 3 of its own" in str(problem)
    assert problem.fix == "pp=gpipe or pp=1f1b"
