"""P09, P10: one norm over stages, shards and replicas; each logical element counts once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fitting import fit
from lightning.pytorch import LightningModule
from plans import make_plan
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from user_modules import Rows

from framework.clipping import clip_
from framework.mesh import Mesh
from framework.plan import MeshSpec


class Add(nn.Module):
    """x + factor * w: the gradient of `w` is `factor`."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.factor = factor

    def forward(self, x):
        return x + self.factor * self.w


class ThreeFour(LightningModule):
    """Two blocks whose gradients are 3 and 4."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Add(3.0), Add(4.0)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch, batch_idx):
        loss = self(batch["x"]).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


MIXES = {
    "one process": (1, {}),
    "gpipe": (2, {"pp": "gpipe", "microbatches": 2}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "gpipe x fsdp": (4, {"pp": "gpipe", "microbatches": 2, "strategy": "fsdp"}),
    "gpipe x ddp": (4, {"pp": "gpipe", "microbatches": 2, "strategy": "ddp"}),
}
CLIPS = {"norm": (5.0, [0.6, 0.8]), "inf_norm": (4.0, [0.75, 1.0]), "value": (5.0, [1.0, 1.0])}


@pytest.mark.parametrize("algorithm", list(CLIPS))
@pytest.mark.parametrize("mix", list(MIXES))
def test_p09_one_norm_over_all_axes(pool, mix, algorithm):
    ranks, options = MIXES[mix]
    clip = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": algorithm}
    plan = make_plan(ranks, **options, trainer=clip)
    norm, clipped = CLIPS[algorithm]
    samples = plan.batch.global_batch_size
    for probe in pool.run(fit, ranks, plan, ThreeFour, Rows(x=torch.ones(samples, 1)), process_group=False):
        assert [probe.gradients[0][f"layers.{i}.w"].item() for i in (0, 1)] == pytest.approx([3.0, 4.0])
        assert probe.grad_norm == pytest.approx(norm)
        steps = [-probe.final[f"layers.{i}.w"].item() for i in (0, 1)]  # learning rate 1: the clipped gradient itself
        assert steps == pytest.approx(clipped, rel=1e-5)


def clip_sharded_and_plain(plain: bool, order: float) -> tuple[float, list[float], float]:
    """P10's gradients: a weight split over tp with 3 on rank 0 and 0 on rank 1; a bias of 4 that both ranks hold."""
    mesh = Mesh(MeshSpec(tp=2))
    rank = dist.get_rank()
    weight = nn.Parameter(DTensor.from_local(torch.zeros(1), mesh["tp"], [Shard(0)]))
    weight.grad = DTensor.from_local(torch.tensor([3.0 if rank == 0 else 0.0]), mesh["tp"], [Shard(0)])
    value = torch.tensor([4.0])
    bias = nn.Parameter(torch.zeros(1) if plain else DTensor.from_local(torch.zeros(1), mesh["tp"], [Replicate()]))
    bias.grad = value if plain else DTensor.from_local(value, mesh["tp"], [Replicate()])
    norm = clip_([weight, bias], mesh, 1.0, norm_type=order)
    local = bias.grad if plain else bias.grad.to_local()
    return float(norm), weight.grad.full_tensor().tolist(), local.item()


@pytest.mark.parametrize("plain", [True, False], ids=["plain bias", "replicated DTensor bias"])
def test_p10_sharded_and_replicated_parameters(pool, plain):
    for norm, weight, bias in pool.run(clip_sharded_and_plain, 2, plain, 2.0):
        assert norm == pytest.approx(5.0)  # replicas counted twice: 6.403; local only: 5 and 4
        assert weight == pytest.approx([0.6, 0.0])
        assert bias == pytest.approx(0.8)
    for norm, weight, bias in pool.run(clip_sharded_and_plain, 2, plain, float("inf")):
        assert (norm, weight, bias) == (4.0, pytest.approx([0.75, 0.0]), pytest.approx(1.0))


def test_p10_the_wrong_norms_would_be_seen(pool, monkeypatch):
    """Guard: with each rank's copies counted as its own, the norm is 6.403, which the case above refuses."""
    norms = [norm for norm, _, _ in pool.run(with_copies_counted, 2)]
    assert norms == pytest.approx([6.403, 6.403], abs=1e-3)


def with_copies_counted():
    from framework import clipping

    original, clipping._copies = clipping._copies, lambda parameter, mesh: 1
    try:
        return clip_sharded_and_plain(True, 2.0)
    finally:
        clipping._copies = original
