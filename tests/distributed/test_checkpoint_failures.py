"""One rank can't save or load: all ranks end together, in words, and what was there before is untouched (P15, P17)."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from framework import checkpoint_files as files
from framework.checkpoint import load_checkpoint, save_checkpoint
from framework.checkpoint_files import CheckpointError
from framework.plan import MeshSpec
from framework.state import module_state, optimizer_state
from framework_plugins.checkpoint import storage
from framework_plugins.checkpoint.store import ShardedStore

MESH = MeshSpec(dp_shard=2)


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)


def build(optimizer: type = torch.optim.AdamW, module: type = Small, **settings: Any) -> Any:
    torch.manual_seed(0)
    net = module()
    if dist.is_initialized():
        fully_shard(net.layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    made = optimizer(net.parameters(), lr=0.1, **settings)
    for parameter in net.parameters():
        parameter.grad = parameter.detach() + 1
    made.step()
    return net, made


def content(net: LightningModule, *made: torch.optim.Optimizer, step: int = 1, **more: Any) -> dict[str, Any]:
    states = [optimizer_state(net, one) for one in made]
    return {"global_step": step, "state_dict": module_state(net).detached(), "optimizer_states": states, **more}


def message(action: Any) -> str:
    """Run on all ranks; return the error's text, which must be a CheckpointError."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return ""


def full_disk_on_rank_1(run_dir: str) -> tuple[str, str]:
    net, made = build()
    folder = files.folder_of(run_dir)
    save_checkpoint(ShardedStore(), content(net, made, step=4), str(folder / "step-000004"), MESH)
    original = storage.write_tensors

    def no_space(path: Path, *args: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return original(path, *args)

    storage.write_tensors = no_space
    try:
        text = message(lambda: save_checkpoint(ShardedStore(), content(net, made), str(folder / "step-000006"), MESH))
    finally:
        storage.write_tensors = original
    dist.barrier()
    save_checkpoint(
        ShardedStore(), content(net, made, step=8), str(folder / "step-000008"), MESH
    )  # there is room again
    return text, "\n".join(sorted(os.listdir(folder)))


def test_p17_full_disk_on_one_rank(pool, tmp_path):
    for text, left in pool.run(full_disk_on_rank_1, 2, str(tmp_path), timeout=30):
        assert "rank 1" in text
        assert "No space left on device" in text
        assert "step-000006" in text
        assert left.split() == ["step-000004", "step-000008"]  # nothing half-written, nothing lost
    assert files.is_complete(tmp_path / "checkpoints" / "step-000004")


def unsaveable(run_dir: str) -> list[str]:
    net, made = build()
    path = f"{run_dir}/checkpoints/step-000001"

    def save(checkpoint: dict[str, Any]) -> None:
        save_checkpoint(ShardedStore(), checkpoint, path, MESH)

    foreign = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    lost = content(net)
    lost["state_dict"]["elsewhere"] = torch.empty(2, device="meta")
    listed = content(net, made)
    if dist.get_rank() == 1:
        next(iter(listed["optimizer_states"][0]["state"].values()))["history"] = [1, 2]
    return [
        message(lambda: save(content(net, callbacks={"mine": {"f": nn.ReLU()}}))),
        message(lambda: content(net, foreign)),
        message(lambda: save(lost)),
        message(lambda: save(listed)),
    ]


def test_what_cant_be_saved_is_named_on_all_ranks(pool, tmp_path):
    for unknown, foreign, lost, listed in pool.run(unsaveable, 2, str(tmp_path)):
        assert "rank 0: The checkpoint can't hold callbacks.mine.f: an object of type torch.nn" in unknown
        assert "parameter of shape (2,)" in foreign
        assert "No rank holds elsewhere" in lost
        assert "rank 1" in listed
        assert "'history' of" in listed
    assert not list(tmp_path.glob("checkpoints/step-*"))


class Wider(Small):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 7)
        self.norm = nn.BatchNorm1d(5)


class Deeper(Small):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


class Shallower(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)


def misfits(run_dir: str) -> list[str]:
    store, path = ShardedStore(), f"{run_dir}/checkpoints/step-000001"
    net, made = build()
    save_checkpoint(store, content(net, made), path, MESH)
    save_checkpoint(store, content(net), f"{path}-weights", MESH)

    def load(*arguments: Any, where: str = path, strict: bool = True, **settings: Any) -> str:
        net, made = build(*arguments, **settings)
        return message(lambda: load_checkpoint(store, where, net, [made], mesh=MESH, strict=strict))

    AdamW = torch.optim.AdamW
    return [
        load(AdamW, Wider),
        load(AdamW, Deeper),
        load(AdamW, Shallower),
        load(torch.optim.SGD),
        load(where=f"{path}-weights"),
        load(where=f"{run_dir}/nowhere"),
        load(AdamW, Deeper, strict=False),
        load(),
    ]


def test_p15_what_doesnt_fit_is_named_on_all_ranks(pool, tmp_path):
    for report in pool.run(misfits, 2, str(tmp_path)):
        wider, deeper, shallower, other, weights, nowhere, lenient, fits = report
        assert "layer.weight has shape [7, 3] here, but [5, 3] in the checkpoint" in wider
        assert "this run wants model.extra.bias, model.extra.weight, which the checkpoint doesn't have" in deeper
        assert "the checkpoint has " in shallower
        assert "model.norm.running_mean" in shallower
        assert "optimizer.0.norm.bias.exp_avg" in shallower
        assert "saved with the optimizers AdamW, but this run has SGD" in other
        assert "holds weights only" in weights
        assert "nowhere is not a checkpoint" in nowhere
        assert (lenient, fits) == ("", "")


def damaged_content(run_dir: str) -> list[str]:
    """Same size, other bytes: only reading finds it. Rank 0's file is damaged; rank 1 needs it too."""
    store, path = ShardedStore(), f"{run_dir}/checkpoints/step-000001"
    net, made = build()
    save_checkpoint(store, content(net, made), path, MESH)
    if dist.get_rank() == 0:
        shard = Path(path) / storage.file_name(0)
        shard.write_bytes(b"\xff" * 64 + shard.read_bytes()[64:])
    dist.barrier()
    return [message(lambda: load_checkpoint(store, path, net, [made], mesh=MESH))]


def test_p17_damage_that_only_reading_finds_is_an_ordinary_error(pool, tmp_path):
    """Torch's own exception here is no Exception, so `except Exception` would let it pass."""
    for (text,) in pool.run(damaged_content, 2, str(tmp_path)):
        assert "step-000001" in text
        assert "header" in text


def short_reads(run_dir: str) -> str:
    store, path = ShardedStore(), f"{run_dir}/checkpoints/step-000001"
    net, made = build()
    save_checkpoint(store, content(net, made), path, MESH)
    original = storage.ShardReader.read_data

    def lose_one(self: Any, plan: Any, planner: Any) -> Any:
        kept = [item for item in plan.items if item.dest_index.fqn != "optimizer.0.layer.weight.exp_avg"]
        plan.items[:] = kept
        return original(self, plan, planner)

    storage.ShardReader.read_data = lose_one
    try:
        return message(lambda: load_checkpoint(store, path, net, [made], mesh=MESH))
    finally:
        storage.ShardReader.read_data = original


def test_p15_a_shortfall_of_restored_entries_is_an_error(pool, tmp_path):
    for text in pool.run(short_reads, 2, str(tmp_path)):
        assert "optimizer.0.layer.weight.exp_avg (0 of" in text


def differing_replicas(run_dir: str) -> list[float]:
    net, _ = build()
    net.norm.running_mean.fill_(dist.get_rank() + 5)
    path = f"{run_dir}/checkpoints/step-000001"
    save_checkpoint(ShardedStore(), content(net), path, MESH)
    load_checkpoint(ShardedStore(), path, net, mesh=MESH)
    return net.norm.running_mean.tolist()


def test_of_replicas_that_differ_the_lowest_ranks_is_kept(pool, tmp_path):
    for values in pool.run(differing_replicas, 2, str(tmp_path)):
        assert values == [5.0] * 5


def settings_changed(run_dir: str) -> tuple[str, float, float]:
    import logging

    class Lines(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.text = ""

        def emit(self, record: logging.LogRecord) -> None:
            self.text += record.getMessage() + "\n"

    path = f"{run_dir}/checkpoints/step-000001"
    net, made = build(weight_decay=0.25)
    save_checkpoint(ShardedStore(), content(net, made), path, MESH)
    net, made = build(weight_decay=0.5)
    made.param_groups[0]["lr"] = 7.0
    lines = Lines()
    logging.getLogger("framework.checkpoint").addHandler(lines)
    load_checkpoint(ShardedStore(), path, net, [made], mesh=MESH)
    logging.getLogger("framework.checkpoint").removeHandler(lines)
    return lines.text, made.param_groups[0]["weight_decay"], made.param_groups[0]["lr"]


def test_p15_settings_come_from_the_checkpoint_and_that_is_said(pool, tmp_path):
    (text, decay, rate), (other, *_) = pool.run(settings_changed, 2, str(tmp_path))
    assert (decay, rate) == (0.25, 0.1)
    assert "weight_decay of group 0: 0.25 from the checkpoint, this run's settings say 0.5" in text
    assert other == ""


def per_rank(run_dir: str) -> list[Any]:
    path = f"{run_dir}/checkpoints/step-000001"
    net, made = build()
    own = {"noise": torch.tensor([dist.get_rank() * 10])}
    save_checkpoint(ShardedStore(), content(net, made, rank_state=own), path, MESH)
    same = load_checkpoint(ShardedStore(), path, net, [made], mesh=MESH)
    other = load_checkpoint(ShardedStore(), path, net, [made], mesh=MeshSpec(dp_replicate=2))
    return [same["rank_state"]["noise"].tolist(), "rank_state" in other]


def test_what_a_rank_has_for_itself_comes_back_under_the_same_mesh_only(pool, tmp_path):
    assert pool.run(per_rank, 2, str(tmp_path)) == [[[0], False], [[10], False]]


def test_no_pickle_is_written(pool, tmp_path):
    pool.run(per_rank, 2, str(tmp_path))
    written = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {".json", ".safetensors"}
