"""The start screen tells the collectives of a real step: bytes gathered and reduced over the data axes, as counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from framework.compose import compose, model_on_meta
from framework.describe import collectives
from framework.plan import RunPlan
from framework.testing import WorkerPool

SMALL = (
    "model.layers=4 model.width=64 model.context=16 global_batch_size=16 trainer.max_steps=3 "
    "trainer.limit_val_batches=0 checkpoint=none recovery=none logs=none logger=[] trainer.enable_progress_bar=false"
)
MIXES = {
    "full_shard": "strategy=fsdp devices=2 micro_batch_size=4",
    "shard_grad_op": "strategy=fsdp strategy.sharding=shard_grad_op devices=2 micro_batch_size=4",
    "hybrid": "strategy=fsdp strategy.replicas=2 devices=4",
    "pipeline": "strategy=fsdp pp=gpipe devices=4 micro_batch_size=2 pp.microbatches=2",
    "tensor": "strategy=fsdp tp=dtensor devices=4",
}
KINDS = {"all-gather parameters": "gathered", "reduce-scatter gradients": "scattered"}


NAMES = {
    "gathered": ("all_gather_single", "all_gather_into_tensor"),
    "scattered": ("reduce_scatter_single", "reduce_scatter_tensor"),
}
"""Functions of torch.distributed that FSDP calls: those of torch 2.13, those of earlier versions."""


class Bytes(Callback):
    """Bytes of whole tensors that FSDP gathers and scatters."""

    def __init__(self) -> None:
        self.moved: Counter[str] = Counter()
        self.started = False
        self.original = {name: getattr(dist, name) for both in NAMES.values() for name in both if hasattr(dist, name)}

    def counting(self, kind: str, function: Any) -> Any:
        def call(*tensors: torch.Tensor, **kwargs: Any) -> Any:
            given = [*tensors[:2], *(value for value in kwargs.values() if isinstance(value, torch.Tensor))]
            self.moved[kind] += max(tensor.numel() * tensor.element_size() for tensor in given)
            return function(*tensors, **kwargs)

        return call

    def on_train_start(self, *args: Any) -> None:
        for kind, both in NAMES.items():
            for name in self.original.keys() & set(both):
                setattr(dist, name, self.counting(kind, self.original[name]))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 1 and not self.started:
            self.moved.clear()  # the first step also sets things up
            self.started = True

    def on_train_end(self, *args: Any) -> None:
        for name, function in self.original.items():
            setattr(dist, name, function)


def count(plan: dict[str, Any]) -> dict[str, float]:
    """Train three steps as one rank; return bytes moved in a later step."""
    import framework
    from framework.objects import build
    from framework.trainer import build_model

    frozen = RunPlan.from_dict(plan)
    counter = Bytes()
    framework.Trainer(frozen, callbacks=[counter]).fit(build_model(frozen), datamodule=build(frozen.components["data"]))
    return {kind: counter.moved[kind] / 2 for kind in KINDS.values()}


@pytest.fixture(scope="module")
def pool() -> Any:
    with WorkerPool() as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES)
def test_bytes_over_the_data_axes(mix: str, pool: WorkerPool, tmp_path: Path) -> None:
    plan = compose(f"{MIXES[mix]} {SMALL} run_dir={tmp_path}".split())
    model, _ = model_on_meta(plan.components["model"])
    told = {KINDS[what]: size for _, what, _, size in collectives(plan, model) if what in KINDS}
    counted = pool.run(count, plan.world_size, plan.to_dict(), timeout=120.0)
    for kind, size in told.items():
        most = max(rank[kind] for rank in counted)
        assert most == pytest.approx(size, rel=0.05), f"{kind}: {most} counted, {size} told"
