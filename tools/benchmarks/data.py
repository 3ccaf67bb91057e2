"""`data`: samples a second of our loader, of torch's and of torchdata's, and how long training would wait for each.

Token packing and decoding of real JPEG and PNG files, made here; in the process itself and with workers. Each loader is
iterated as fast as it goes, with whatever training does to a batch's numbers (ours alone has any), and beside steps of
a fixed length, emulated by sleeping: what is waited then is `data wait`. Loaders take turns in each round; shown are
medians, and the median of the ratios to torch's loader in the same round.
"""

from __future__ import annotations

import logging
import random
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import framework
from benchmarks.telling import told
from framework.compose import compose
from framework.data import Loaders
from framework.plugin_manager import manager_for
from framework_plugins.data.packed import Packed
from framework_plugins.data.windows import as_it_is

BAR = 0.95
"""Least share of the samples a second of torch's own loader."""
PLAIN, STATEFUL, OURS = "torch", "torchdata", "ours"
SIDE = 192
"""Pixels of a picture's side."""


@dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        workers: numbers of worker processes.
        rounds: how often each loader runs.
        batches: that are timed in a round; some go before them.
        batch_size: samples of a batch.
        context: tokens of a window.
        pictures: files that are made; they are read again and again.
        step_ms: length of an emulated step.
    """

    workers: Sequence[int] = (0, 2)
    rounds: int = 7
    batches: int = 60
    batch_size: int = 32
    context: int = 1024
    pictures: int = 128
    step_ms: float = 40.0


class Pictures(Dataset[dict[str, Tensor]]):
    """`{"image": [3, side, side] uint8}` of files that are decoded when they are read."""

    def __init__(self, files: Sequence[Path], length: int) -> None:
        self.files = files
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Decode one picture."""
        from PIL import Image

        with Image.open(self.files[index % len(self.files)]) as picture:
            pixels = np.array(picture.convert("RGB"))
        return {"image": torch.from_numpy(pixels).permute(2, 0, 1).contiguous()}


class Repeated(Dataset[Any]):
    """The windows of a text, as often as are needed for an epoch of `length`."""

    def __init__(self, windows: Any, length: int) -> None:
        self.windows = windows
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return a whole batch."""
        return self.windows.__getitems__([index % len(self.windows) for index in indices])


def draw(folder: Path, count: int) -> list[Path]:
    """Write pictures with edges, gradients and some noise, every other one as JPEG, the rest as PNG."""
    from PIL import Image

    chance = np.random.default_rng(0)
    files = []
    across, down = np.meshgrid(np.linspace(0, 6, SIDE), np.linspace(0, 6, SIDE))
    for number in range(count):
        waves = [np.sin(across * chance.uniform(0.5, 4) + down * chance.uniform(0.5, 4)) for _ in range(3)]
        pixels = np.stack(waves, -1) * 90 + 128 + chance.normal(0, 6, (SIDE, SIDE, 3))
        pixels[chance.integers(SIDE // 2) :, chance.integers(SIDE // 2) :] *= 0.6
        files.append(folder / f"{number:05d}.{'png' if number % 2 else 'jpg'}")
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(files[-1])
    return files


def make(kind: str, settings: Settings, folder: Path) -> tuple[Dataset[Any], Any]:
    """Return a data set that is long enough for one iteration, and its `collate_fn` (None = torch's)."""
    length = settings.batch_size * (settings.batches + 64)
    if kind == "pictures":
        return Pictures(draw(folder, settings.pictures), length), None
    packed = Packed(context=settings.context)
    return Repeated(packed.windows(0), length), as_it_is


class Ours:
    """The loader that a run would have, and what training does with each batch's numbers."""

    def __init__(self, user: DataLoader[Any], settings: Settings, folder: Path) -> None:
        plan = compose(
            f"global_batch_size={settings.batch_size} logger=none checkpoint=none recovery=none logs=none threads=1 "
            f"trainer.enable_progress_bar=false run_dir={folder / 'run'}".split()
        )
        self.trainer = framework.Trainer(plan)
        self.trainer.state.stage = RunningStage.TRAINING
        self.loaders = Loaders(plan, manager_for(plan), 0)
        self.loader: Any = self.loaders.process(user, self.trainer)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.loader):
            self.loaders.tray.claim(batch)
            self.loaders.tray.begin(number)
            self.loaders.tray.take()
            yield batch


def build(name: str, data: Dataset[Any], collate: Any, workers: int, settings: Settings, folder: Path) -> Any:
    """Return one of the loaders, shuffled."""
    how = {"shuffle": True, "collate_fn": collate, "num_workers": workers}
    if name == OURS:
        return Ours(DataLoader(data, **how), settings, folder)
    if name == PLAIN:
        return DataLoader(data, batch_size=settings.batch_size, **how)
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata 0.11 calls a function that torch 2.13 has deprecated
        return StatefulDataLoader(data, batch_size=settings.batch_size, **how)


def run(loader: Any, settings: Settings, workers: int, step_s: float) -> tuple[float, float, float]:
    """Iterate once; return samples a second, the share of time that was waited, and CPU microseconds a batch.

    The last one is of the thread that trains: with workers it is what isn't done beside the steps.
    """
    rows = iter(loader)
    for _ in range(4 + 4 * workers):  # workers have started, and what they had fetched meanwhile is gone
        batch = next(rows)
    waited = 0.0
    begin, cpu = time.perf_counter(), time.thread_time()
    for _ in range(settings.batches):
        since = time.perf_counter()
        batch = next(rows)  # kept until the next one is there, as training does
        waited += time.perf_counter() - since
        if step_s:
            time.sleep(step_s)
    took, cpu = time.perf_counter() - begin, time.thread_time() - cpu
    assert batch
    return settings.batches * settings.batch_size / took, waited / took, 1e6 * cpu / settings.batches


def measure(settings: Settings) -> dict[str, Any]:
    """Return for each kind of data and number of workers what each loader gave.

    Raises:
        SystemExit: torchdata or pillow isn't installed.
    """
    for package in ("torchdata", "PIL"):
        if find_spec(package) is None:
            raise SystemExit(f"{package} isn't installed: pip install 'lightning-framework[bench]'.")
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    report: dict[str, Any] = {}
    for kind, workers in told(
        product(("tokens", "pictures"), settings.workers), lambda case: "{}, {} workers".format(*case)
    ):
        with tempfile.TemporaryDirectory() as folder:
            data, collate = make(kind, settings, Path(folder))
            one = partial(build, data=data, collate=collate, workers=workers, settings=settings)
            report[f"{kind}, {workers} workers"] = _compare(one, settings, workers, Path(folder))
    return report


def _compare(one: Any, settings: Settings, workers: int, folder: Path) -> dict[str, Any]:
    """Return each loader's medians over the rounds."""
    names = [PLAIN, STATEFUL, OURS]
    speeds: dict[str, list[float]] = {name: [] for name in names}
    waits: dict[str, list[float]] = {name: [] for name in names}
    costs: dict[str, list[float]] = {name: [] for name in names}
    for number in range(settings.rounds + 1):
        random.Random(number).shuffle(names)
        for name in names:
            speed, _, cost = run(one(name, folder=folder), settings, workers, 0.0)
            _, wait, _ = run(one(name, folder=folder), settings, workers, settings.step_ms / 1000)
            if number:  # the first one warms caches
                speeds[name].append(speed)
                waits[name].append(wait)
                costs[name].append(cost)
    return {
        name: {
            "samples_per_s": median(speeds[name]),
            "ratio": median(mine / plain for mine, plain in zip(speeds[name], speeds[PLAIN], strict=True)),
            "data_wait": median(waits[name]),
            "cpu_us": median(costs[name]),
        }
        for name in (PLAIN, STATEFUL, OURS)
    }


def table(report: Mapping[str, Any]) -> Any:
    """Return speeds beside the bar."""
    from rich.table import Table

    shown = Table(title=f"Loaders: ours should reach {100 * BAR:g} % of torch's own")
    for name in ("data", "loader", "samples/s", "ratio", "data wait", "CPU us/batch", ""):
        shown.add_column(name, justify="left" if name in ("data", "loader", "") else "right")
    for case, loaders in report.items():
        for name, figures in loaders.items():
            verdict = ("within" if figures["ratio"] >= BAR else "[red]below[/red]") if name == OURS else ""
            shown.add_row(
                case if name == PLAIN else "",
                name,
                f"{figures['samples_per_s']:.0f}",
                f"{figures['ratio']:.3f}",
                f"{100 * figures['data_wait']:.1f} %",
                f"{figures['cpu_us']:.0f}",
                verdict,
                end_section=name == OURS,
            )
    return shown
