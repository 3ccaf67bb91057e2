"""The reference and its comparison against plain torch DDP and FSDP2: equal when right, each planted fault flagged."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from framework.verify.reference import Bounds, Result, disagreements, global_norm, train

SAMPLES, TOKENS, CLASSES, STEPS, LR, MOMENTUM = 8, 6, 7, 6, 0.1, 0.9


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(CLASSES, 8)
        self.hidden = nn.Linear(8, 16)
        self.head = nn.Linear(16, CLASSES)
        self.double()

    def forward(self, ids):
        return self.head(torch.tanh(self.hidden(self.embed(ids))))


def batches():
    """STEPS global batches; sample i has between 1 and TOKENS valid tokens, so a wrong weighting shows."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for _ in range(STEPS):
        ids = torch.randint(0, CLASSES, (SAMPLES, TOKENS + 1), generator=generator)
        targets = ids[:, 1:].clone()
        for sample, keep in enumerate(torch.randint(1, TOKENS + 1, (SAMPLES,), generator=generator)):
            targets[sample, keep:] = -100
        result.append((ids[:, :-1], targets))
    return result


def mean_loss(model, batch):
    ids, targets = batch
    return cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-100), int((targets != -100).sum())


def cut(batch, pieces):
    return list(zip(*(tensor.chunk(pieces) for tensor in batch), strict=True))


def by_hand(wrap: str, fault: str, accumulate: int) -> Result:
    """A hand-written data-parallel loop, right unless `fault` says otherwise."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Tiny()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    if wrap == "ddp":
        run = DistributedDataParallel(model)
        if fault == "no all-reduce":
            run = model
    else:
        run = fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    result = Result()
    for batch in batches():
        pieces = cut(cut(batch, world)[rank], accumulate)
        counted = pieces[:-1] if fault == "last micro-batch skipped" else pieces
        total = torch.tensor(sum(int((t != -100).sum()) for _, t in pieces), dtype=torch.float64)
        dist.all_reduce(total)
        logged = torch.zeros((), dtype=torch.float64)
        optimizer.zero_grad()
        for piece in counted:
            loss, weight = mean_loss(run, piece)
            scale = 1 / accumulate if fault == "mean of means" else weight / total * world
            if fault == "sum of ranks":
                scale = scale * world
            (loss * scale).backward()
            logged += loss.detach() * weight / total
        dist.all_reduce(logged)
        grads = {name: full(p.grad).clone() for name, p in model.named_parameters()}
        result.first_gradients = result.first_gradients or grads
        result.losses.append(logged.item())
        result.grad_norms.append(global_norm(grads.values()))
        optimizer.step()
    result.updates = {name: full(p.detach()) - start[name] for name, p in model.named_parameters()}
    return result


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.fixture(scope="module")
def want():
    return train(Tiny(), [[batch] for batch in batches()], mean_loss, lr=LR, momentum=MOMENTUM)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_torchs_own_data_parallelism_equals_the_reference(pool, want, wrap, accumulate):
    for got in pool.run(by_hand, 2, wrap, "", accumulate):
        assert disagreements(got, want, Bounds()) == []


@pytest.mark.parametrize("fault", ["sum of ranks", "no all-reduce", "last micro-batch skipped", "mean of means"])
def test_each_planted_fault_is_flagged_even_with_a_low_precision_bound(pool, want, fault):
    loose = Bounds(loss=0.05, gradient=0.05, update=0.05)
    for got in pool.run(by_hand, 2, "ddp", fault, 2):
        lines = disagreements(got, want, loose)
        assert [line for line in lines if line.startswith("first gradient")]
        assert [line for line in lines if line.startswith("update")]


def test_adamw_would_not_have_seen_a_wrong_scale():
    """Why parity uses SGD: with AdamW a gradient that is twice too large gives the same weights."""
    weights = []
    for scale in (1.0, 2.0):
        model = Tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-16)
        for batch in batches():
            optimizer.zero_grad()
            (mean_loss(model, batch)[0] * scale).backward()
            optimizer.step()
        weights.append(global_norm(p.detach() for p in model.parameters()))
    assert weights[0] == pytest.approx(weights[1], rel=1e-9)


def test_cutting_a_batch_into_pieces_changes_only_rounding(want):
    got = train(Tiny(), [cut(batch, 4) for batch in batches()], mean_loss, lr=LR, momentum=MOMENTUM)
    assert disagreements(got, want, Bounds(1e-12, 1e-12, 1e-12)) == []


@pytest.mark.parametrize("algorithm", ["norm", "inf_norm", "value"])
def test_clipping_and_schedule_are_torchs(algorithm):
    clip = 0.05
    got = train(
        Tiny(),
        [[batch] for batch in batches()],
        mean_loss,
        lr=LR,
        momentum=MOMENTUM,
        clip=clip,
        clip_algorithm=algorithm,
        schedule=lambda t: 0.5**t,
    )
    model = Tiny()
    start = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)
    for batch in batches():
        optimizer.zero_grad()
        mean_loss(model, batch)[0].backward()
        if algorithm == "value":
            nn.utils.clip_grad_value_(model.parameters(), clip)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), clip, norm_type=2 if algorithm == "norm" else torch.inf)
        optimizer.step()
        schedule.step()
    for (name, p), q in zip(model.named_parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(got.updates[name], (p - q).detach(), rtol=1e-12, atol=1e-15)


def test_a_parameter_that_does_not_move_proves_nothing(want):
    still = Result(
        want.losses, want.grad_norms, want.first_gradients, dict(want.updates, **{"head.bias": torch.zeros(7)})
    )
    assert [line for line in disagreements(still, still, Bounds()) if "head.bias" in line and "proves nothing" in line]
