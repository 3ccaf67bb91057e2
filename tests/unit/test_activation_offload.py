"""Activation offloading: same gradients to the bit, the tensors are really elsewhere, nothing is left behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_activation import BLOCKS, WIDTH, Block, Model, made_storages
from torch import Tensor, nn

from framework.adapters.torch_memory import is_weight, memory_tracker
from framework.parts import whole
from framework.plan import RunPlan
from framework_plugins.activation import away
from framework_plugins.activation.away import Disk, Host, OffloadError, offload_
from framework_plugins.activation.offload import Offload

BOUNDARY = 4 * 16 * WIDTH * 4  # bytes of one block's output


def plan(folder: Path | str = "/nowhere", **fields: Any) -> RunPlan:
    return RunPlan(run_id="r", run_dir=str(folder), **fields)


def in_files() -> int:
    """Bytes of nameless files that this process has mapped."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if ".activation-" in line]
    assert all(line.endswith("(deleted)") for line in lines)
    return sum(int(end, 16) - int(begin, 16) for begin, end in (line.split()[0].split("-") for line in lines))


def gradients(option: Offload | None, folder: Path, dropout: float = 0.0) -> tuple[dict[str, Tensor], int, int]:
    """Return gradients by name, and bytes in memory and in files between forward and backward."""
    model = Model(dropout)
    if option is not None:
        option.apply_activation_checkpointing(part=whole(model), plan=plan(folder))
    x = torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    torch.manual_seed(7)
    with made_storages() as storages:
        loss = model(x)
    held, mapped = storages.alive(model), in_files()
    assert not os.listdir(folder)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}, held, mapped  # type: ignore[dict-item]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "option", [Offload(to="disk", min_bytes=0), Offload(to="disk", min_bytes=20000), Offload(to="disk", every=2)]
)
def test_same_gradients_to_the_bit(option: Offload, dropout: float, tmp_path: Path) -> None:
    Block.calls = 0
    want, _, _ = gradients(None, tmp_path, dropout)
    got, _, _ = gradients(option, tmp_path, dropout)
    assert Block.calls == 2 * BLOCKS  # nothing is computed again
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name


def test_it_is_in_files_and_not_in_memory_and_gone_after_backward(tmp_path: Path) -> None:
    _, plain, none = gradients(None, tmp_path)
    _, held, mapped = gradients(Offload(to="disk", min_bytes=0), tmp_path)
    _, second, half = gradients(Offload(to="disk", min_bytes=0, every=2), tmp_path)
    _, large, _ = gradients(Offload(to="disk", min_bytes=BOUNDARY + 1), tmp_path)
    assert none == 0
    assert held <= 2 * BOUNDARY + 64, (held, plain)  # the model's input, which the test holds, and its output
    assert second == pytest.approx((plain + held) / 2, rel=0.05)
    assert held < large < plain
    assert mapped >= plain - held  # by whole pages
    assert half == mapped / 2
    gc.collect()
    assert in_files() == 0
    assert not os.listdir(tmp_path)


def test_a_storage_is_written_once_and_views_of_it_stay_views(tmp_path: Path) -> None:
    written = []

    class Counting(Disk):
        def put(self, content: Tensor) -> Tensor:
            written.append(content.numel())
            return super().put(content)

    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            one, other = y.t().chunk(2)
            return one.sin() * other.sin()

    block = Views()
    offload_(block, Counting(tmp_path), 0)
    x = torch.randn(6, 8, requires_grad=True)
    block(x).sum().backward()
    (want,) = torch.autograd.grad(Views()(x).sum(), x)
    assert torch.equal(x.grad, want)  # type: ignore[arg-type]
    assert written == [6 * 8 * 4, 4 * 6 * 4, 4 * 6 * 4]  # y, and two sines


def test_weights_and_masks_stay(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("scale", torch.ones(64, 64))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.linear(x) * self.scale * mask

    block, x = Masked(), torch.randn(64, 64, requires_grad=True)
    offload_(block, Disk(tmp_path), 0)
    plain = block(x, torch.ones(64, 64))
    assert in_files() == 64 * 64 * 4  # x, for the gradient of the weight
    with torch.autocast("cpu", torch.bfloat16):
        low = block(x, torch.ones(64, 64))
    weight, experts, leaf = block.linear.weight, nn.Parameter(torch.ones(4, 8, 8)), torch.ones(2, requires_grad=True)
    assert all(is_weight(one, ()) for one in (weight, weight.bfloat16().t(), (experts * 0.5).unbind()[1].t()))
    hidden = torch.exp(weight)  # not of this block's
    assert not any(is_weight(one, {hidden.grad_fn}) for one in (low, leaf, leaf * 2, hidden, hidden * weight, x[0]))
    assert in_files() == 64 * 64 * (4 + 2)  # x in bf16; the weight in bf16 isn't there
    (plain.sum() + low.sum()).backward()


def test_written_into_after_it_was_put_away(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            z = y.detach()  # counts writes with y
            first = torch.special.expm1(x) * z
            z.mul_(2)
            return first + x.sin() * z

    def of(block: nn.Module) -> Tensor:
        x = torch.linspace(-1, 1, 100).requires_grad_()
        block(x).sum().backward()
        assert x.grad is not None
        return x.grad

    block = InPlace()
    offload_(block, Disk(tmp_path), 0)
    x = torch.linspace(-1, 1, 100)
    want = x.exp() * x.exp() + x.cos() * 2 * x.exp()
    torch.testing.assert_close(of(block), want)


def test_the_hosts_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no device here: that the copies are made and used is shown with a tier that takes from anywhere."""
    monkeypatch.setattr(Host, "takes", lambda self, device: True)
    block, twin, made = Block(0.0), Block(0.0), []
    twin.load_state_dict(block.state_dict())
    put = Host.put
    monkeypatch.setattr(Host, "put", lambda self, content: made.append(put(self, content)) or made[-1])
    offload_(block, Host(), 0)
    x = torch.randn(2, 4, WIDTH)
    block(x.requires_grad_()).sum().backward()
    got, x.grad = x.grad, None
    twin(x).sum().backward()
    assert torch.equal(got, x.grad)  # type: ignore[arg-type]
    for copy in made:
        copy.zero_()
    x.grad = None
    out = block(x).sum()
    for copy in made:
        copy.zero_()
    out.backward()
    assert not torch.equal(got, x.grad)  # type: ignore[arg-type]


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(away.os, "posix_fallocate", full)
    block = Block(0.0)
    offload_(block, Disk(tmp_path), 0)
    with pytest.raises(
        OffloadError, match=r"bytes can't be written to .* \(No space left on device\); type activation"
    ):
        block(torch.randn(2, 4, WIDTH, requires_grad=True))
    assert not os.listdir(tmp_path)


def test_nothing_is_put_away_without_gradients(tmp_path: Path) -> None:
    block = Block(0.0)
    offload_(block, Disk(tmp_path / "not made"), 0)
    with torch.no_grad():
        block(torch.randn(2, 4, WIDTH))
    assert not os.listdir(tmp_path)


def test_mistakes() -> None:
    for wrong, message in (
        ({"to": "tape"}, r"activation\.to=tape is unknown; choose one of host, disk"),
        ({"every": 0}, r"activation\.every=0 must be at least 1"),
        ({"min_bytes": -1}, r"activation\.min_bytes=-1 must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            Offload(**wrong)
    (problem,) = Offload().check_plan(plan=plan())
    assert "no device: its activations are in the host's memory already" in problem.reason
    assert not Offload().check_plan(plan=plan(accelerator="cuda"))
    assert not Offload(to="disk").check_plan(plan=plan())
    (problem,) = Offload(folder="/scratch").check_plan(plan=plan(accelerator="cuda"))
    assert "activation.folder=/scratch" in str(problem)
    (problem,) = Offload(to="disk").check_plan(plan=plan(components={"compile": {"option": "block"}}))
    assert "compiler" in problem.reason


def test_the_benchmarks_tracker_counts_files_for_themselves(tmp_path: Path) -> None:
    """What is mapped is no memory, also where backward reads it in place."""
    tracker = memory_tracker()
    with tracker:
        one = Disk(tmp_path).put(torch.zeros(4096, dtype=torch.uint8))
        two = Disk(tmp_path).put(torch.zeros(4096, dtype=torch.uint8))
        there = torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage(), 0, (64, 64), (64, 1))
        del one, two
        three = Disk(tmp_path).put(torch.zeros(1000, dtype=torch.uint8))
        now = tracker.get_tracker_snapshot("current")
        (most,) = tracker.get_tracker_snapshot("peak").values()
    assert there.sum() + three.sum() == 0
    assert not now
    assert most["Total"] == 4096  # what was copied from
    assert tracker.most_mapped == 8192
