"""Asynchronous pipelines equal one process with the same delays, drained at the same points; resumed ones too."""

from __future__ import annotations

import csv
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from user_modules import Rows, gathered, loader

from framework.errors import RunFailedError
from framework.plan import RunPlan
from framework.testing import plan
from framework.trainer import Trainer
from framework.verify.reference import Result, train

BATCH, STEPS, LR, MOMENTUM = 8, 10, 0.05, 0.9
LAYERS = 8


class Deep(LightningModule):
    """Eight blocks, cut into two or four stages; the learning rate falls by 10 % a step."""

    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.inlet = nn.Linear(4, 6)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(LAYERS)])
        self.outlet = nn.Linear(6, 4)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.6
        self.weighted = weighted

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(x)
        return self.outlet(x)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss, weight = loss_of(self, batch)
        self.log("train_loss", loss)
        return {"loss": loss, "weight": torch.tensor(weight)} if self.weighted else loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", loss_of(self, batch)[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def decay(step: int) -> float:
    return 0.9**step


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Mean over the values that count, and their number."""
    error = ((model(batch["x"]) - batch["y"]) * batch["valid"]).pow(2).sum()
    count = int(batch["valid"].sum())
    return error / count, count


def rows() -> Rows:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, STEPS * BATCH, 4, generator=generator, dtype=torch.float64)
    valid = (torch.rand(STEPS * BATCH, 4, generator=generator) < 0.7).double()
    valid[:, 0] = 1.0
    return Rows(x=x, y=y, valid=valid)


def batches() -> list[list[dict[str, Tensor]]]:
    return [[batch] for batch in DataLoader(rows(), batch_size=BATCH)]


def oracle(depth: int, schedule: str, weighted: bool = False, **kwargs: Any) -> tuple[Result, dict[str, Tensor]]:
    """One process with delays; and its final weights."""
    model = Deep(weighted)
    where = stages(depth)
    delays = {name: 1 if schedule == "pipedream_2bw" else depth - 1 - where[name] for name in where}
    result = train(model, batches(), loss_of, lr=LR, momentum=MOMENTUM, schedule=decay, delays=delays, **kwargs)
    return result, {name: p.detach().clone() for name, p in model.named_parameters()}


def stages(depth: int) -> dict[str, int]:
    """Which stage has which parameter."""
    names = [name for name, _ in Deep().named_parameters()]
    at = {name: int(name.split(".")[1]) * depth // LAYERS for name in names if name.startswith("layers")}
    return {name: at.get(name, 0 if name.startswith("inlet") else depth - 1) for name in names}


@dataclass
class Seen:
    """What a rank saw."""

    losses: list[float] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)
    final: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    versions: int = 0


class Keep(Callback):
    """Keeps them."""

    def __init__(self, save_at: int | None, path: str) -> None:
        self.seen = Seen()
        self.save_at, self.path = save_at, path

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen.losses.append(float(trainer.callback_metrics["train_loss"]))
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.path)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.strategy.grad_norm is not None:
            self.seen.norms.append(float(trainer.strategy.grad_norm))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.seen.val_losses.append(float(trainer.callback_metrics["val_loss"]))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.seen.final = gathered(module.named_parameters())
        self.seen.versions = trainer.strategy.pipeline.versions_held


def run(plan: RunPlan, weighted: bool, save_at: int | None, path: str, resume: str | None) -> Seen:
    """Train; called on every rank."""
    keep = Keep(save_at, path)
    trainer = Trainer(plan, callbacks=[keep])
    trainer.fit(Deep(weighted), loader(rows(), BATCH), loader(rows(), BATCH), ckpt_path=resume)
    return keep.seen


def plan_of(*words: str, run_dir: str | None = None, validate: bool = False) -> RunPlan:
    """The plan of what would be typed; the model is `Deep`, which isn't looked at before it runs."""
    common = {
        "global_batch_size": BATCH,
        "precision": "fp64",
        "sampler.shuffle": "false",
        "threads": 1,
        "trainer.max_steps": STEPS,
        "trainer.enable_progress_bar": "false",
        "trainer.limit_val_batches": 2 if validate else 0,
        "run_dir": run_dir or tempfile.mkdtemp(prefix="pipedream-"),
        "checkpoint.save_top_k": 0,
        **dict.fromkeys(("logs", "recovery", "logger"), "none"),
    }
    return plan(*words, *(f"{key}={value}" for key, value in common.items()), model=False)


def measure(
    pool: Any, depth: int, words: str, weighted: bool = False, validate: bool = False, run_dir: str | None = None,
    save_at: int | None = None, resume: str | None = None, path: str = "",
) -> list[Seen]:  # fmt: skip
    """Run; what each rank saw."""
    made = plan_of(*words.split(), f"pp.size={depth}", run_dir=run_dir, validate=validate)
    return pool.run(run, depth, made, weighted, save_at, path, resume, process_group=False, timeout=90)


def apart(seen: Seen, final: dict[str, Tensor]) -> float:
    """Largest difference of any weight."""
    assert set(seen.final) == set(final)
    return max(float((seen.final[name] - value).abs().max()) for name, value in final.items())


@pytest.mark.parametrize("vertical", [False, True], ids=["stashing", "vertical sync"])
@pytest.mark.parametrize("depth", [2, 4])
def test_pipedream_equals_its_oracle_bit_by_bit(pool, depth, vertical):
    want, final = oracle(depth, "pipedream", vertical_sync=vertical)
    plain, _ = oracle(1, "pipedream")
    assert max(abs(a - b) for a, b in zip(want.losses, plain.losses, strict=True)) > 1e-3, "delays change nothing here"
    everyone = measure(pool, depth, f"pp=pipedream pp.vertical_sync={vertical} pp.sync_every=1")
    for seen in everyone:
        assert seen.losses == want.losses
        assert apart(seen, final) == 0.0
    held = [seen.versions for seen in everyone]
    assert held == ([depth] * depth if vertical else [depth - stage for stage in range(depth)])


@pytest.mark.parametrize("words", ["", "activation=full", "trainer.gradient_clip_val=0.05"])
def test_pipedream_2bw_weighs_micro_batches_by_their_tokens(pool, words):
    clip = 0.05 if "clip" in words else None
    want, final = oracle(4, "pipedream_2bw", weighted=True, clip=clip)
    for stage, seen in enumerate(
        measure(pool, 4, f"pp=pipedream_2bw pp.microbatches=4 pp.sync_every=1 {words}", weighted=True)
    ):
        assert seen.losses == pytest.approx(want.losses, rel=1e-12)
        assert apart(seen, final) < 1e-13
        assert seen.versions == (1 if stage == 3 else 2)


@pytest.mark.parametrize("words", ["activation=full", "trainer.gradient_clip_val=0.05"])
def test_recomputed_activations_and_the_clip_norm_of_a_step_are_the_oracles(pool, words):
    clip = 0.05 if "clip" in words else None
    want, final = oracle(4, "pipedream", clip=clip)
    for seen in measure(pool, 4, f"pp=pipedream pp.sync_every=1 {words}"):
        assert apart(seen, final) <= (1e-13 if clip else 0.0)
        if clip:  # Lightning tells callbacks before it clips: one step late; float32 where a stage has no gradient yet
            assert seen.norms == pytest.approx(want.grad_norms[:-1], rel=1e-6)


def test_values_are_means_since_the_ranks_agreed_last(pool):
    """In the first step, every fourth and the last: the same on every rank, at most three steps old."""
    want, final = oracle(2, "pipedream")
    for seen in measure(pool, 2, "pp=pipedream pp.sync_every=4"):
        assert apart(seen, final) == 0.0
        ends = [0, 1, 4, 8, STEPS]
        for begin, end in pairwise(ends):
            mean = sum(want.losses[begin:end]) / (end - begin)
            until = {0: 3, 1: 7, 4: 9, 8: STEPS}[begin]
            assert seen.losses[end - 1 : until] == pytest.approx([mean] * (until - end + 1), rel=1e-12)


def test_validation_and_checkpoints_drain_and_a_resumed_run_is_the_run_that_went_on(pool, tmp_path):
    """Drained after 4 and 8 batches for validation and after 6 for a checkpoint, from which another run goes on."""
    words = "pp=pipedream pp.sync_every=2 trainer.val_check_interval=4 trainer.check_val_every_n_epoch=null"
    want, final = oracle(4, "pipedream", drain_after={4, 6, 8})
    never, _ = oracle(4, "pipedream")
    assert max(abs(a - b) for a, b in zip(want.losses, never.losses, strict=True)) > 1e-3, "drains change nothing here"
    model = Deep()
    four = train(
        model, batches()[:4], loss_of, lr=LR, momentum=MOMENTUM, schedule=decay,
        delays={name: 3 - stage for name, stage in stages(4).items()},
    )  # fmt: skip
    assert four.losses == want.losses[:4]
    measured = sum(float(loss_of(model, batch)[0].detach()) for (batch,) in batches()[:2]) / 2
    path = str(tmp_path / "six")
    for seen in measure(pool, 4, words, validate=True, save_at=6, path=path):
        assert apart(seen, final) == 0.0
        assert len(seen.val_losses) == 3, "after 4, 8 and 10 batches"
        assert seen.val_losses[0] == pytest.approx(measured, rel=1e-12)
    for seen in measure(pool, 4, words, validate=True, resume=path):
        assert apart(seen, final) == 0.0


@pytest.mark.parametrize(
    "words", ["pp=pipedream", "pp=pipedream pp.vertical_sync=true", "pp=pipedream_2bw pp.microbatches=4"]
)
def test_forward_and_backward_of_a_batch_meet_one_version(pool, tmp_path, words):
    measure(pool, 4, f"{words} pp.trace_versions=true", run_dir=str(tmp_path))
    traces = [
        list(csv.DictReader((tmp_path / f"versions-stage{stage}.csv").read_text().splitlines())) for stage in range(4)
    ]
    micros = 4 if "2bw" in words else 1
    for stage, trace in enumerate(traces):
        assert [int(row["stage"]) for row in trace] == [stage] * STEPS * micros
        assert [(int(row["batch"]), int(row["micro"])) for row in trace] == [
            (batch, micro) for batch in range(STEPS) for micro in range(micros)
        ]
        assert [row["forward"] for row in trace] == [row["backward"] for row in trace]
        by_version = {row["version"]: row["forward"] for row in trace}
        assert len(set(by_version.values())) == len(by_version) > 1, "versions are different weights"
        delay = 1 if "2bw" in words else 3 if "vertical" in words else 3 - stage
        assert [int(row["version"]) for row in trace] == [max(0, int(row["batch"]) - delay) for row in trace]


class Explodes(Deep):
    """Its loss isn't a number in the sixth batch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 5 else loss


def explode(plan: RunPlan, save_at: int | None, path: str) -> str:
    """Train; how it ended, on this rank."""
    trainer = Trainer(plan, callbacks=[Keep(save_at, path)])
    try:
        trainer.fit(Explodes(), loader(rows(), BATCH))
    except RunFailedError as error:
        return str(error)
    return "ended well"


@pytest.mark.parametrize("save_at", [None, 7])
def test_a_loss_that_is_not_finite_stops_all_ranks_before_a_checkpoint_is_written(pool, tmp_path, save_at):
    made = plan_of("pp=pipedream", "pp.size=2", "pp.sync_every=8")
    path = tmp_path / "seven"
    for said in pool.run(explode, 2, made, save_at, str(path), process_group=False, timeout=90):
        assert "The loss isn't finite" in said
        assert "go on from a checkpoint" in said
    assert not path.exists()


class Pair(nn.Module):
    """A block that passes on its output, what it got, and how many blocks there were, which the next one divides by."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, before: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(self.linear(x) + before / count[:, None]), x, count + 1


class Carrying(Deep):
    """Two floats and an integer travel between stages; the first stage doesn't learn."""

    def __init__(self) -> None:
        super().__init__(weighted=True)
        state = [p.data for layer in self.layers for p in layer.parameters()]
        self.layers = nn.ModuleList([Pair() for _ in range(LAYERS)])
        for parameter, value in zip(self.layers.parameters(), state, strict=True):
            parameter.data = value
        for part in (self.inlet, *self.layers[: LAYERS // 2]):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        carried = (x, torch.zeros_like(x), torch.ones(len(x), dtype=torch.long))
        for layer in self.layers:
            carried = layer(*carried)
        return self.outlet(carried[0] + carried[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=LR, momentum=MOMENTUM)


def carry(plan: RunPlan) -> dict[str, Tensor]:
    """Train; the final weights."""
    keep = Keep(None, "")
    Trainer(plan, callbacks=[keep]).fit(Carrying(), loader(rows(), BATCH))
    return keep.seen.final


@pytest.mark.parametrize("words", ["pp=pipedream", "pp=pipedream_2bw pp.microbatches=4"])
def test_tuples_integers_and_a_frozen_stage(pool, words):
    model = Carrying()
    delays = {name: 1 if "2bw" in words else 0 for name, p in model.named_parameters() if p.requires_grad}
    train(model, batches(), loss_of, lr=LR, momentum=MOMENTUM, delays=delays)
    for final in pool.run(carry, 2, plan_of(*words.split(), "pp.size=2"), process_group=False, timeout=90):
        assert set(final) == {name for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(final[name], parameter.detach(), rtol=1e-12, atol=1e-13)


class Meetings(Callback):
    """Counts the collectives of all ranks from the end of step 2 to the end of the last but one."""

    NAMES = ("all_reduce", "broadcast", "barrier", "all_gather", "all_gather_object", "broadcast_object_list")

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.original = {name: getattr(dist, name) for name in self.NAMES}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            for name, function in self.original.items():
                setattr(dist, name, self._counting(name, function))
        elif trainer.global_step == STEPS - 1:
            self.leave()

    def _counting(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return function(*args, **kwargs)

        return call

    def leave(self) -> None:
        for name, function in self.original.items():
            setattr(dist, name, function)


def meet(plan: RunPlan) -> dict[str, int]:
    """Train; called on every rank: the collectives between two agreements."""
    meetings = Meetings()
    try:
        Trainer(plan, callbacks=[meetings]).fit(Deep(), loader(rows(), BATCH))
    finally:
        meetings.leave()
    return dict(meetings.calls)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_ranks_meet_only_where_they_agree(pool, schedule):
    """Else each stage would wait for the slowest in every step: Lightning's own loop asks rank 0 about SIGTERM."""
    made = plan_of(f"pp={schedule}", "pp.size=2", "pp.sync_every=100")
    assert pool.run(meet, 2, made, process_group=False, timeout=90) == [{}, {}]
