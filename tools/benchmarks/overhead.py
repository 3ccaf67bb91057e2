"""`overhead`: CPU time a step of the framework's Trainer, of plain Lightning and of a hand-written loop.

All three train the same model on the same data under the same mix, in the same processes, in turn: load on the machine
hits them alike. The model is tiny on purpose: what is left is what a loop costs.
"""

from __future__ import annotations

import cProfile
import logging
import os
import pstats
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import framework
from benchmarks.telling import told
from framework.compose import compose
from framework.plan import RunPlan

WIDTH = 64
BATCH = 8
LOG_EVERY = 10
CASES = {"single": 1, "ddp": 2, "fsdp": 2}
"""Mix -> ranks."""
SIDES = ("hand", "lightning", "framework")

Profile = Callable[[], AbstractContextManager[Any]]


class Net(nn.Module):
    """Two alike blocks and a head, so that FSDP has what it shards block by block in a real model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, WIDTH] to [batch, 1]."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Module(LightningModule):
    """What a user would write; run by plain Lightning and by the framework."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Mean squared error, logged as the mean over all ranks: what the framework logs with or without the flag."""
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class ShardedModule(Module):
    """The same for Lightning's ModelParallelStrategy, which leaves the sharding to the module."""

    def configure_model(self) -> None:
        """Shard each block, then the rest."""
        assert self.device_mesh is not None
        shard(self.net, self.device_mesh["data_parallel"])


def shard(net: Net, mesh: Any) -> None:
    """Shard as `strategy=fsdp` does."""
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)


class Timer(Callback):
    """CPU and wall seconds from the end of step `warmup` to the end of step `steps`."""

    def __init__(self, warmup: int, steps: int, profile: cProfile.Profile | None) -> None:
        self.warmup, self.steps, self.profile = warmup, steps, profile
        self.start = self.stop = (0.0, 0.0)

    def tick(self, step: int) -> None:
        """Note the time if `step` is one of the two."""
        if step == self.warmup:
            self.start = (time.process_time(), time.perf_counter())
            if self.profile:
                self.profile.enable()
        elif step == self.steps:
            if self.profile:
                self.profile.disable()
            self.stop = (time.process_time(), time.perf_counter())

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Tick."""
        self.tick(trainer.global_step)

    @property
    def ms(self) -> tuple[float, float]:
        """CPU and wall milliseconds a step."""
        count = (self.steps - self.warmup) / 1000
        return (self.stop[0] - self.start[0]) / count, (self.stop[1] - self.start[1]) / count


def loader(steps: int, sharded: bool) -> DataLoader[Any]:
    """Return `steps` batches for this rank, in order."""
    world = dist.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(steps * BATCH * world, WIDTH), torch.randn(steps * BATCH * world, 1))
    sampler: Any = DistributedSampler(data, shuffle=False) if sharded and world > 1 else None
    return DataLoader(data, batch_size=BATCH, sampler=sampler, shuffle=False)


def hand(case: str, timer: Timer, folder: str, bar: bool) -> None:
    """Train in a loop of one's own; the global loss is read every `LOG_EVERY` steps."""
    torch.manual_seed(0)
    net = Net()
    model: nn.Module = net
    if case == "ddp":
        model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    elif case == "fsdp":
        shard(net, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    log = Path(folder) / "loss.csv"
    for step, (x, y) in enumerate(loader(timer.steps, sharded=True), 1):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % LOG_EVERY == 0:
            value = loss.detach().clone()
            dist.all_reduce(value)
            if dist.get_rank() == 0:
                with log.open("a") as file:
                    file.write(f"{step},{value.item() / dist.get_world_size()}\n")
        timer.tick(step)


def plain(case: str, timer: Timer, folder: str, bar: bool) -> None:
    """Train with Lightning as it is."""
    torch.manual_seed(0)
    ranks = CASES[case]
    strategies: Mapping[str, Callable[[], Any]] = {
        "single": lambda: "auto",
        "ddp": lambda: DDPStrategy(gradient_as_bucket_view=True),
        "fsdp": lambda: ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
    }
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy=strategies[case](), max_steps=timer.steps, max_epochs=-1,
        logger=CSVLogger(folder), log_every_n_steps=LOG_EVERY, enable_checkpointing=False, enable_model_summary=False,
        callbacks=[timer, *([RichProgressBar()] if bar else [])], enable_progress_bar=bar, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(ShardedModule() if case == "fsdp" else Module(), loader(timer.steps, sharded=False))


def ours(case: str, timer: Timer, folder: str, bar: bool) -> None:
    """Train with the framework."""
    torch.manual_seed(0)
    frozen = PLANS[case]
    logger = {"csv": {**frozen.components["logger"]["csv"], "save_dir": folder}}
    here = frozen.with_(run_dir=folder, components={**frozen.components, "logger": logger})
    trainer = framework.Trainer(here, callbacks=[timer])
    trainer.fit(Module(), loader(timer.steps, sharded=False))


PLANS: dict[str, RunPlan] = {}
"""Case -> its plan; filled in each rank by `run_case`."""


def plan(case: str, steps: int, bar: bool) -> RunPlan:
    """Return the plan of one case, as typed by a user: the bundled options, the same logging as plain Lightning."""
    words = [
        *([] if case == "single" else [f"strategy={case}"]),
        *(f"{slot}=none" for slot in ("checkpoint", "recovery", "logs")),
        "logger=[csv]", f"devices={CASES[case]}", f"global_batch_size={BATCH * CASES[case]}", "threads=1",
        f"trainer.max_steps={steps}", f"trainer.log_every_n_steps={LOG_EVERY}",
        f"trainer.enable_progress_bar={str(bar).lower()}",
    ]  # fmt: skip
    return compose(words, model=False)


LOOPS = {"hand": hand, "lightning": plain, "framework": ours}


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        rounds: how often each side runs.
        warmup: steps that aren't measured.
        steps: steps in all.
        bar: with each side's progress bar.
        profile: find out where the time goes (slows every side down).
    """

    rounds: int
    warmup: int
    steps: int
    bar: bool = False
    profile: bool = False


def run_case(case: str, settings: Settings, plan_of_case: dict[str, Any]) -> dict[str, Any]:
    """Run all sides in turn, `settings.rounds` times; called on each rank with the process group made.

    Returns:
        side -> `cpu_ms` and `wall_ms` a step (one a round), and with `profile` where the time went.
    """
    PLANS[case] = RunPlan.from_dict(plan_of_case)
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    result: dict[str, Any] = {side: {"cpu_ms": [], "wall_ms": []} for side in SIDES}
    warmup, steps, bar = settings.warmup, settings.steps, settings.bar
    for number in range(settings.rounds):
        for side in SIDES[number % len(SIDES) :] + SIDES[: number % len(SIDES)]:
            profiler = cProfile.Profile() if settings.profile else None
            timer = Timer(warmup, steps, profiler)
            with tempfile.TemporaryDirectory() as folder, _quiet(bar):
                LOOPS[side](case, timer, folder, bar)
            dist.barrier()
            cpu, wall = timer.ms
            result[side]["cpu_ms"].append(cpu)
            result[side]["wall_ms"].append(wall)
            if profiler:
                result[side]["profile"] = where(profiler, steps - warmup)
    return result


def _quiet(bar: bool) -> AbstractContextManager[Any]:
    """Bars are drawn into nothing: what is measured is the drawing, not a terminal."""
    from contextlib import redirect_stdout

    return redirect_stdout(open(os.devnull, "w")) if bar else nullcontext()


def where(profiler: cProfile.Profile, steps: int) -> dict[str, Any]:
    """Return ms a step by package (own time), and the framework's dearest functions (cumulative)."""
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    packages: dict[str, float] = {}
    functions: dict[str, float] = {}
    for (file, _, name), (_, _, own, cumulative, _) in stats.items():
        package = _package(file)
        packages[package] = packages.get(package, 0.0) + own * 1000 / steps
        if package in ("framework", "framework_plugins"):
            functions[f"{Path(file).stem}.{name}"] = cumulative * 1000 / steps
    top = sorted(functions.items(), key=lambda entry: -entry[1])[:15]
    return {"own_ms": dict(sorted(packages.items(), key=lambda entry: -entry[1])), "cumulative_ms": dict(top)}


def _package(file: str) -> str:
    for name in ("framework_plugins", "lightning_utilities", "lightning", "torch", "framework"):
        if f"/{name}/" in file:
            return name
    return "builtins" if file == "~" else "python"


def measure(cases: Iterable[str], settings: Settings) -> dict[str, Any]:
    """Measure each case; figures are medians over rounds, means over ranks."""
    from framework.testing import run_ranks

    report = {}
    for case in told(cases):
        limit = 60.0 + settings.rounds * settings.steps
        frozen = plan(case, settings.steps, settings.bar)
        ranks = run_ranks(run_case, CASES[case], case, settings, frozen.to_dict(), timeout=limit)
        figures: dict[str, Any] = {}
        for side in SIDES:
            figures[side] = {
                "cpu_ms": mean(median(rank[side]["cpu_ms"]) for rank in ranks),
                "wall_ms": mean(median(rank[side]["wall_ms"]) for rank in ranks),
                "cpu_ms_rounds": [rank[side]["cpu_ms"] for rank in ranks],
            }
            if settings.profile:
                figures[side]["profile"] = ranks[0][side]["profile"]
        figures["framework_to_lightning"] = figures["framework"]["cpu_ms"] / figures["lightning"]["cpu_ms"]
        figures["framework_minus_hand_ms"] = figures["framework"]["cpu_ms"] - figures["hand"]["cpu_ms"]
        report[case] = figures
    return report


def table(report: Mapping[str, Any]) -> Any:
    """Return the figures as a table."""
    from rich.table import Table

    shown = Table(title="CPU ms a step and rank (wall ms in brackets)")
    for name in ("mix", "hand loop", "Lightning", "framework", "framework / Lightning", "framework - hand"):
        shown.add_column(name, justify="left" if name == "mix" else "right")
    for case, figures in report.items():
        sides = [f"{figures[side]['cpu_ms']:.2f} ({figures[side]['wall_ms']:.2f})" for side in SIDES]
        ratio, distance = figures["framework_to_lightning"], figures["framework_minus_hand_ms"]
        shown.add_row(f"{case} {CASES[case]}", *sides, f"{ratio:.2f}", f"{distance:.2f}")
    return shown
