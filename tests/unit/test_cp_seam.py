"""What stands in for attention while a step runs, and what it refuses; a loss whose weight isn't known."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_before

from framework.errors import UsageError
from framework.evaluation import Evaluation
from framework.metrics import Entry
from framework.plan import MeshSpec, RunPlan
from framework.testing.conformance import check_option
from framework.window import Window
from framework_plugins.cp.attention import SplitAttention
from framework_plugins.cp.exchange import HeadsAttention
from framework_plugins.cp.ring_attention import RingAttention
from framework_plugins.cp.sequences import BatchCut, Pieces

DIMS = {"inputs": 1, "positions": 1}
PIECES = Pieces(1, 2, False)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
    """Stands for an exchange."""
    return torch.full_like(query, 7.0)


class Seam:
    """A mode whose last batch had 8 tokens, 4 of which are here."""

    def __init__(self, stand_in: Any = attend, whole: bool = True) -> None:
        self.cut = BatchCut(PIECES, DIMS, "ring")
        self.mode = SplitAttention(stand_in, self.cut, whole)
        self.batch = self.cut({"inputs": torch.zeros(2, 8, dtype=torch.int64)})

    def step(self, function: Callable[[Tensor], Any]) -> Any:
        with self.mode:
            return function(self.batch["positions"])


def qkv(length: int = 4, heads: int = 2, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    k = torch.randn(2, kv_heads, length, 6)
    return torch.randn(2, heads, length, 6), k, k


def reads(positions: Tensor) -> Tensor:
    return positions[..., None].float() * 2


@pytest.mark.parametrize("function", [F.scaled_dot_product_attention, imported_before], ids=["by module", "by name"])
def test_attention_is_replaced_inside_a_step_only(function: Any) -> None:
    seam = Seam()
    q, k, v = qkv()
    assert (seam.step(lambda p: (reads(p), function(q, k, v, is_causal=True))[1]) == 7).all()
    assert not (function(q, k, v, is_causal=True) == 7).any()


def test_a_block_of_another_stage_only_has_shapes() -> None:
    q, k, v = (tensor.to("meta") for tensor in qkv(3))
    found = Seam(whole=False).step(lambda p: (reads(p), F.scaled_dot_product_attention(q, k, v, is_causal=True))[1])
    assert found.is_meta


Q = qkv()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: F.scaled_dot_product_attention(*Q), "attention without is_causal=True"),
        (lambda p: F.scaled_dot_product_attention(*Q, attn_mask=torch.ones(4, 4).bool()), "attention with a mask"),
        (lambda p: F.scaled_dot_product_attention(*qkv(3), is_causal=True), "the 4 tokens that this rank has"),
        (lambda p: F.scaled_dot_product_attention(*qkv(4, 4, 2), is_causal=True), "grouped queries need enable_gqa"),
        (lambda p: nn.MultiheadAttention(8, 2)(*[torch.randn(4, 2, 8)] * 3), "can't look into multi_head_attention"),
        (lambda p: F.scaled_dot_product_attention(*Q, is_causal=True), 'doesn\'t read batch["positions"]'),
        (lambda p: (p.shape, p[0], p.size(0), F.scaled_dot_product_attention(*Q, is_causal=True)), "doesn't read"),
        (reads, "never called torch.nn.functional.scaled_dot_product_attention"),
    ],
)
def test_what_would_be_silently_wrong(call: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("[", r"\[")):
        Seam().step(call)


def test_only_the_first_step_that_learns_is_watched() -> None:
    seam = Seam()
    with torch.no_grad():
        seam.step(lambda p: None)  # a validation step need not attend
    seam.step(lambda p: (reads(p), F.scaled_dot_product_attention(*Q, is_causal=True)))
    seam.step(lambda p: None)


def test_attention_without_a_mode_of_its_own_weights() -> None:
    with pytest.raises(UsageError, match="can't drop attention weights"):
        RingAttention(PIECES, None)(*Q, None, 0.1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="can't share 3 heads"):
        HeadsAttention(PIECES, None)(*qkv(4, 3, 3), None, 0.0)  # type: ignore[arg-type]


def test_autocast_reaches_the_stand_in() -> None:
    seen = []
    seam = Seam(lambda q, k, v, *_: seen.append(q.dtype) or q)
    with torch.autocast("cpu", torch.bfloat16):
        seam.step(lambda p: (reads(p), F.scaled_dot_product_attention(*Q, is_causal=True)))
    assert seen == [torch.bfloat16]


def test_a_loss_of_pieces_needs_its_weight() -> None:
    plan = RunPlan(run_id="r", run_dir="/nowhere", mesh=MeshSpec(cp=2))
    window = Window(LightningModule(), plan, True, torch.device("cpu"))
    with pytest.raises(UsageError, match="a loss without its weight"):
        window.agree(1.0, 2.0, False, stop=False)


@pytest.mark.parametrize(
    ("size", "reduction", "refused"), [(None, "mean", True), (3, "mean", False), (None, "sum", False)]
)
def test_a_logged_mean_of_pieces_needs_its_weight(size: Any, reduction: str, refused: bool) -> None:
    loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[], _mode="sequential"))
    module: Any = SimpleNamespace(trainer=SimpleNamespace(testing=False, _evaluation_loop=loop))
    evaluation = Evaluation(module, None, True, torch.device("cpu"), True)  # type: ignore[arg-type]
    entries = {"loss": Entry(1.0, reduction, size)}

    def step() -> None:
        evaluation.step(lambda method: [(None, entries, {"x": torch.ones(2)})], "validation_step", None)

    if not refused:
        step()
        return
    with pytest.raises(UsageError, match="validation_step logged the mean loss without its weight"):
        step()


@pytest.mark.parametrize("name", ["ring", "allgather", "ulysses"])
def test_the_options_conform(name: str) -> None:
    assert check_option("cp", name) == []
