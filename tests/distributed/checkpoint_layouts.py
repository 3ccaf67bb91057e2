"""One small model laid out in every way that a mix can: what the checkpoint tests save and load."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from framework.checkpoint import load_checkpoint, save_checkpoint
from framework.plan import MeshSpec
from framework.state import full_state_dict, module_state, optimizer_state
from framework_plugins.checkpoint.store import ShardedStore


class Block(nn.Module):
    """Sizes that no number of ranks divides; `gain` is empty on most shards."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)
        self.gain = nn.Parameter(torch.randn(1))
        self.norm = nn.BatchNorm1d(5)  # persistent buffers, one of them 0-dim int64
        self.register_buffer("scratch", torch.ones(3), persistent=False)


class Net(LightningModule):
    """Four blocks, tied embedding and head, a frozen layer and one that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.low = nn.Linear(5, 3, bias=False, dtype=torch.bfloat16)
        self.high = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(3, 2).requires_grad_(False)
        self.unused = nn.Linear(3, 2)


def build(layout: str, seed: int) -> tuple[Net, list[torch.optim.Optimizer]]:
    """Return the model in a layout, and its two optimizers (AdamW in two groups; SGD with momentum)."""
    torch.manual_seed(seed)
    net = Net()
    for name, buffer in net.named_buffers():
        if name.endswith("num_batches_tracked"):
            buffer.fill_(seed)
    mesh = _mesh(layout)
    if "pp" in layout:
        _cut(net)
    if "tp" in layout:
        for block in net.blocks:
            if not block.up.weight.is_meta:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "fsdp" in layout or "hsdp" in layout:
        data = mesh["replicate", "dp"] if layout == "hsdp" else mesh["dp"]
        for child in (*net.blocks, net.embed, net.low, net.high, net.frozen, net.unused):
            if not any(parameter.is_meta for parameter in child.parameters()):
                # Tied weights have to be in one group.
                fully_shard([child, net.head] if child is net.embed else child, mesh=data)
    return net, optimizers(net)


def _cut(net: Net) -> None:
    """Leave the first half on the first half of the ranks; the rest goes to the meta device, as in a pipeline."""
    first = dist.get_rank() < dist.get_world_size() // 2
    foreign = [*net.blocks[2:], net.high, net.unused, net.frozen] if first else [*net.blocks[:2], net.embed, net.low]
    for module in foreign:
        module.to("meta")
    if not first:
        net.head.to("meta")


def _mesh(layout: str) -> Any:
    """Return the layout's mesh; rows are stages or data, columns tp or (inner) data."""
    names = {
        "fsdp": ("dp",),
        "tp": ("tp",),
        "hsdp": ("replicate", "dp"),
        "fsdp-tp": ("dp", "tp"),
        "pp-fsdp": ("pp", "dp"),
        "pp-tp": ("pp", "tp"),
    }.get(layout)
    if names is None:
        return {}
    size = dist.get_world_size()
    return init_device_mesh("cpu", (size,) if len(names) == 1 else (2, size // 2), mesh_dim_names=names)


LAYOUTS = ("replica", "fsdp", "hsdp", "tp", "fsdp-tp", "pp", "pp-fsdp", "pp-tp")


def optimizers(net: Net) -> list[torch.optim.Optimizer]:
    """AdamW over all but `high`, with another group for what has one dimension; SGD over `high`."""
    held = [p for n, p in net.named_parameters() if not p.is_meta and not n.startswith(("high", "frozen"))]
    frozen = [p for n, p in net.named_parameters() if not p.is_meta and n.startswith("frozen")]
    groups = [
        {"params": [p for p in held if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in held if p.ndim == 1] + frozen, "betas": (0.8, 0.7)},
    ]
    double = [p for n, p in net.named_parameters() if not p.is_meta and n.startswith("high")]
    sgd = [{"params": double}]
    return [torch.optim.AdamW(groups, lr=0.05), torch.optim.SGD(sgd, lr=0.5, momentum=0.9)]


def step(net: Net, made: list[torch.optim.Optimizer], number: int) -> None:
    """Take one optimizer step with gradients that are a function of each element alone: the same in every layout."""
    for name, parameter in net.named_parameters():
        if parameter.requires_grad and not parameter.is_meta and not name.startswith("unused"):
            parameter.grad = torch.sin(parameter.detach() * 3 + number)
    for optimizer in made:
        if optimizer.param_groups[0]["params"]:  # a stage may hold nothing of an optimizer
            optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


def checkpoint(net: Net, made: list[torch.optim.Optimizer], steps: int) -> dict[str, Any]:
    """Return what Lightning would hand to the strategy."""
    return {
        "global_step": steps,
        "state_dict": module_state(net).detached(),
        "optimizer_states": [optimizer_state(net, optimizer) for optimizer in made],
        "note": ("kept", float("nan"), {1: torch.arange(3)}),
    }


def whole(net: Net, made: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return what this rank can see of all state, sharded tensors gathered: names -> tensor or number."""
    tensors: dict[str, Any] = {name: _full(tensor) for name, tensor in module_state(net).all_names().items()}
    for number, optimizer in enumerate(made):
        state = optimizer_state(net, optimizer)
        for name, values in sorted(state["state"].items()):
            tensors |= {f"{number}.{name}.{key}": _full(value) for key, value in values.items()}
        for group in state["param_groups"]:
            for name in group["params"]:
                tensors |= {f"{number}.{name}.{key}": value for key, value in group.items() if key != "params"}
    return tensors


def _full(value: Any) -> Any:
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone() if isinstance(value, Tensor) else value


def save_all(folder: str, layouts: tuple[str, ...]) -> None:
    """Train three steps in each layout and save."""
    for layout in layouts:
        net, made = build(layout, seed=1)
        for number in range(3):
            step(net, made, number)
        save_checkpoint(ShardedStore(), checkpoint(net, made, 3), f"{folder}/{layout}", MeshSpec())


def load_all(folder: str, saved: tuple[str, ...], layouts: tuple[str, ...]) -> dict[str, list[str]]:
    """Load each into each layout, go one step on; `saved to layout` -> what differs from never having stopped."""
    bad = {}
    for layout in layouts:
        reference, reference_made = build(layout, seed=1)
        for number in range(3):
            step(reference, reference_made, number)
        before = whole(reference, reference_made)
        step(reference, reference_made, 3)
        after = whole(reference, reference_made)
        for origin in saved:
            net, made = build(layout, seed=2)
            result = load_checkpoint(ShardedStore(), f"{folder}/{origin}", net, made, mesh=MeshSpec())
            problems = differences(before, whole(net, made))
            step(net, made, 3)
            problems += [f"one step later: {text}" for text in differences(after, whole(net, made))]
            if net.head.weight is not net.embed.weight and not net.head.weight.is_meta:
                problems.append("the tie is gone")
            if result["note"][0] != "kept" or not torch.equal(result["note"][2][1], torch.arange(3)):
                problems.append(f"note: {result['note']}")
            bad[f"{origin} to {layout}"] = problems
        bad[layout] = gathering_problems(net, after)
    return bad


def gathering_problems(net: Net, expected: dict[str, Any]) -> list[str]:
    """Gather the model on rank 0; returns what is wrong with it (or with getting anything elsewhere)."""
    gathered = full_state_dict(net)
    if dist.is_initialized() and dist.get_rank() != 0:
        return sorted(gathered)
    known = {
        name: tensor for name, tensor in expected.items() if name in gathered
    }  # what another stage holds isn't known
    missing = sorted(Net().state_dict().keys() ^ gathered.keys())
    return missing + differences(known, {name: gathered[name] for name in known})


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """Return names whose values aren't equal, bit for bit."""
    names = [f"only on one side: {name}" for name in expected.keys() ^ actual.keys()]
    for name in expected.keys() & actual.keys():
        one, other = expected[name], actual[name]
        same = torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, Tensor) else one == other
        if not same:
            names.append(f"{name}: {one} expected, {other} found")
    return sorted(names)
