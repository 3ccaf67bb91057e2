"""Bytes a rank by arithmetic, against sums done by hand; `tools/bench.py memory` holds them against real tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from framework.memory import NoOptimizerError, RankBytes, bytes_per_rank, chunk, held_bytes, optimizers_of, probe
from framework.plan import MeshSpec, RunPlan
from framework_plugins.model.gpt import GPT

FSDP = {"_target_": "framework_plugins.strategy.fsdp.FSDP", "option": "fsdp"}
DDP = {"_target_": "framework_plugins.strategy.ddp.DDP", "option": "ddp"}
GPIPE = {"_target_": "framework_plugins.pp.schedules.Schedule", "option": "gpipe"}
FORMATS = "framework_plugins.precision.formats.Formats"


class Chain(LightningModule):
    """Embedding 10 x 8, four 8 x 8 layers with bias, head 10 x 8 with bias: 80 + 4 * 72 + 90 = 458 parameters."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 10)
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        if self.optimizer == "trainer":
            return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.estimated_stepping_batches)
        if self.optimizer == "sgd":
            return {"optimizer": torch.optim.SGD(self.parameters(), lr=0.1)}
        if self.optimizer == "momentum":
            return [torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)], []
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def meta(optimizer: str = "adamw") -> Chain:
    with torch.device("meta"):
        return Chain(optimizer)


def plan(mesh: MeshSpec, precision: str = "fp32", **components: Any) -> RunPlan:
    formats = {"fp32": {}, "bf16-true": {"param_dtype": "bfloat16"}}[precision]
    components["precision"] = {"_target_": FORMATS, "option": precision, **formats}
    return RunPlan(run_id="r", run_dir="/nowhere", mesh=mesh, components=components)


def adamw(elements: int, tensors: int, gathered: int = 0, size: int = 4) -> RankBytes:
    """What `elements` in `tensors` tensors take with AdamW, whose step count is one fp32 number a tensor."""
    return RankBytes(elements, elements * size, elements * size, 2 * elements * size + 4 * tensors, gathered)


def test_one_replica_and_ddp_hold_everything() -> None:
    assert bytes_per_rank(plan(MeshSpec()), meta()) == [adamw(458, 11)]
    assert bytes_per_rank(plan(MeshSpec(dp_replicate=2), strategy=DDP), meta()) == [adamw(458, 11)] * 2


def test_bf16_halves_everything_but_the_step_count() -> None:
    assert bytes_per_rank(plan(MeshSpec(), "bf16-true"), meta()) == [adamw(458, 11, size=2)]


def test_fsdp_cuts_dim_0_and_the_last_rank_gets_less() -> None:
    # Over 4 ranks 10 rows are 3 + 3 + 3 + 1, 8 rows are 2 each; a bias is cut like a weight.
    most, least = 3 * 8 + 4 * (2 * 8 + 2) + 3 * 8 + 3, 8 + 4 * (2 * 8 + 2) + 8 + 1
    held = bytes_per_rank(plan(MeshSpec(dp_shard=4), strategy={**FSDP, "sharding": "shard_grad_op"}), meta())
    assert held == [adamw(most, 11, 458 * 4)] * 3 + [adamw(least, 11, 458 * 4)]


def test_full_shard_gathers_the_root_and_two_blocks() -> None:
    held = bytes_per_rank(plan(MeshSpec(dp_shard=2), strategy=FSDP), meta())
    assert {rank.gathered_bytes for rank in held} == {(80 + 90 + 2 * 72) * 4}


def test_hybrid_sharding_repeats_the_shards() -> None:
    held = bytes_per_rank(plan(MeshSpec(dp_replicate=2, dp_shard=2), strategy=FSDP), meta())
    assert [rank.parameters for rank in held] == [229] * 4


def test_stages_hold_their_own_blocks_on_top_of_their_ends() -> None:
    held = bytes_per_rank(plan(MeshSpec(pp=2), pp=GPIPE), meta())
    assert held == [adamw(80 + 2 * 72, 5), adamw(2 * 72 + 90, 6)]
    v_shaped = {**GPIPE, "schedule": "zbv", "stages_per_rank": 2}
    held = bytes_per_rank(plan(MeshSpec(pp=2), pp=v_shaped), meta())
    assert [rank.parameters for rank in held] == [80 + 2 * 72 + 90, 2 * 72]


def test_pipeline_times_fsdp() -> None:
    held = bytes_per_rank(plan(MeshSpec(pp=2, dp_shard=2), pp=GPIPE, strategy=FSDP), meta())
    assert [rank.parameters for rank in held] == [112, 112, 117, 117]
    assert [rank.gathered_bytes for rank in held] == [224 * 4] * 2 + [234 * 4] * 2


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    model = meta()
    model.embedding.weight.requires_grad_(False)
    (held,) = bytes_per_rank(plan(MeshSpec()), model)
    assert (held.parameters, held.gradient_bytes) == (458, 378 * 4)


@pytest.mark.parametrize(("optimizer", "per_element"), [("sgd", 0), ("momentum", 4), ("adamw", 8)])
def test_optimizer_state_is_found_out_by_one_small_step(optimizer: str, per_element: int) -> None:
    (held,) = bytes_per_rank(plan(MeshSpec()), meta(optimizer))
    assert held.optimizer_bytes == 458 * per_element + (11 * 4 if optimizer == "adamw" else 0)


def test_amsgrad_keeps_a_third_tensor() -> None:
    optimizer = torch.optim.Adam(meta().parameters(), lr=0.1, amsgrad=True)
    assert probe(optimizer, optimizer.param_groups[0], torch.float32) == (12, 4)


def test_an_optimizer_may_say_itself_what_its_state_takes() -> None:
    option = {"_target_": "framework_plugins.optimizer.adamw8bit.AdamW8bit", "option": "adamw8bit"}
    with torch.device("meta"):
        model = GPT(vocab_size=64, width=64, layers=2, heads=2, hidden=128)
    shards = MeshSpec(dp_shard=4)
    held = bytes_per_rank(plan(shards, strategy=FSDP, optimizer=option), model)
    small, large = 0, 0
    for parameter in model.parameters():
        piece = -(-parameter.shape[0] // 4) * (parameter.numel() // parameter.shape[0])
        if piece < 4096:
            small += 2 * 4 * piece + 4
        else:
            large += 2 * (piece + piece // 64 + 1024) + 4
    assert held[0].optimizer_bytes == small + large
    assert small
    assert large == 0 or held[0].optimizer_bytes < 8 * held[0].parameters


def test_bytes_of_a_tensor_that_is_made_of_others() -> None:
    from torchao.optim.subclass_8bit import OptimState8bit

    assert held_bytes(torch.zeros(3, 5, dtype=torch.float64)) == 120
    assert held_bytes(OptimState8bit.zeros((16, 256))) == 16 * 256 + 16 * 4 + 256 * 4


def test_an_optimizer_that_needs_a_trainer_is_unknown() -> None:
    with pytest.raises(NoOptimizerError, match="without a Trainer"):
        optimizers_of(plan(MeshSpec()), meta("trainer"))
    (held,) = bytes_per_rank(plan(MeshSpec()), meta("trainer"))
    assert held.optimizer_bytes is None
    assert held.total == 2 * 458 * 4


def test_the_model_is_left_alone() -> None:
    model = meta()
    before = {name: (parameter.shape, id(parameter)) for name, parameter in model.named_parameters()}
    bytes_per_rank(plan(MeshSpec(pp=2, dp_shard=2), pp=GPIPE, strategy=FSDP), model)
    assert {name: (parameter.shape, id(parameter)) for name, parameter in model.named_parameters()} == before


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 10])
@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
def test_chunk_is_torch_chunk(rows: int, pieces: int) -> None:
    whole = torch.empty(rows, 5)
    expected = [tuple(piece.shape) for piece in whole.chunk(pieces)]
    expected += [(0, 5)] * (pieces - len(expected))
    assert [chunk((rows, 5), pieces, index) for index in range(pieces)] == expected
