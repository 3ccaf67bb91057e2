"""What a rank does for `verify`: train the plan's own model and data for a few steps, and keep what is compared."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from framework import objects
from framework.adapters.torch_private import tree_map
from framework.agreement import gather
from framework.errors import RunFailedError
from framework.plan import RunPlan
from framework.trainer import Trainer, as_module, build_model
from framework.verify import reference
from framework.verify.reference import Result

MOMENTUM = 0.9
SAME = 1e-9
"""Relative distance up to which two copies of one tensor are equal."""
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass
class Outcome:
    """What a mix showed; the same on all ranks, or the run failed.

    Attributes:
        result: losses, gradient norms, first gradients, updates.
        initial: whole initial parameters by name.
        buffers: whole buffers at the end by name.
        initial_buffers: those at the start.
        apart: relative distances of what two ranks hold and should be equal, by name.
        stages: which pipeline stage has which parameter.
    """

    result: Result
    initial: dict[str, Tensor]
    buffers: dict[str, Tensor]
    initial_buffers: dict[str, Tensor] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)


def sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return the hash of named tensors: names, shapes, dtypes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.ndim else repr(tensor.item()).encode())
    return digest.hexdigest()


def sgd(model: LightningModule, lr: float) -> Any:
    """SGD with momentum over what learns: AdamW would hide a wrong scale of the gradients."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=MOMENTUM)


def quiet_dropout(model: nn.Module) -> None:
    """Switch dropout off, in modules of torch's and in whatever keeps its rate in an attribute `dropout`."""
    for module in model.modules():
        if isinstance(module, DROPOUT):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # type: ignore[assignment]


class Watch(Callback):
    """Keeps on every rank what is compared; every moment is a collective."""

    def __init__(self) -> None:
        self.initial: dict[str, Tensor] = {}
        self.initial_buffers: dict[str, Tensor] = {}
        self.final: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.norms: list[float] = []
        self.losses: list[float] = []
        self.apart: dict[str, float] = {}
        self.stages: dict[str, int] = {}
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Keep the initial weights."""
        self.initial = self._gathered("initial", trainer.strategy.named_parameters())
        self.initial_buffers = self._gathered("initial buffer", pl_module.named_buffers())
        stage = {parameter: part.index for part in trainer.strategy.parts for parameter in part.parameters()}
        mine = {name: stage[parameter] for name, parameter in pl_module.named_parameters() if parameter in stage}
        self.stages = {name: index for theirs in gather(mine) for name, index in theirs.items()}

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Keep the norm of the gradients, before clipping, and the first of each parameter."""
        whole = self._gathered("gradient", trainer.strategy.named_gradients())
        self.norms.append(reference.global_norm(whole.values()))
        for name, gradient in whole.items():
            self.gradients.setdefault(name, gradient)

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        """Keep the loss of an optimizer step."""
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.losses.append(float(trainer.strategy.window.loss))

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Keep weights and buffers."""
        self.final = self._gathered("final", trainer.strategy.named_parameters())
        self.buffers = self._gathered("buffer", pl_module.named_buffers())

    def _gathered(self, kind: str, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        whole, apart = gathered(named)
        for name, distance in apart.items():
            self.apart.setdefault(f"{kind} {name}", distance)
        return whole


def train(plan: RunPlan, lr: float, mutant: str = "") -> Outcome | None:
    """Train under the plan's mix, with a planted fault if one is named; called on every rank, rank 0 returns."""
    from framework.verify.mutants import by_name

    with by_name(mutant) if mutant else nullcontext():
        outcome, trainer = _train(plan, lr)
    return outcome if trainer.global_rank == 0 else None  # all have the same, whole


def begin(plan: RunPlan, steps: int) -> tuple[Outcome, list[Any]]:
    """Make one step of one process that changes nothing; return it and the global batches of the first `steps` steps.

    The batches are read from the user's own dataset with the user's own collation, without a sampler or loader of ours.
    """
    outcome, trainer = _train(plan, 0.0)
    loader: Any = trainer.train_dataloader
    size = plan.batch.global_batch_size
    dataset, count = loader.dataset, steps * size
    stream = isinstance(dataset, IterableDataset)
    if stream:
        rows: Any = list(islice(iter(dataset), count))
    else:  # of a sampler of the user's own, its order
        own = loader.batches.order(0) if getattr(loader.batches, "how", "") == "own sampler" else range(len(dataset))
        rows = own[:count]
    if len(rows) < count:
        raise RunFailedError(f"{steps} steps of {size} samples need {count}, and the training data has {len(rows)}.")
    pieces = [rows[at : at + size] for at in range(0, count, size)]
    return outcome, [loader.collate_fn(piece if stream else _samples(dataset, piece)) for piece in pieces]


def _samples(dataset: Any, indices: Iterable[int]) -> Any:
    """Read samples as torch's loader does: at once, where the dataset has a method for that."""
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(list(indices))
    return [dataset[index] for index in indices]


def _train(plan: RunPlan, lr: float) -> tuple[Outcome, Trainer]:
    model = build_model(plan)
    quiet_dropout(model)
    # on the instance: the user's class stays as it is
    model.configure_optimizers = partial(sgd, model, lr)  # type: ignore[method-assign]
    if "sync_every" in (plan.components.get("pp") or {}):  # every step's loss is compared
        plan = plan.with_(components={**plan.components, "pp": {**plan.components["pp"], "sync_every": 1}})
    watch = Watch()
    trainer = Trainer(plan, callbacks=[watch], logger=False)
    data = objects.build(plan.components["data"])
    data.train_dataloader = partial(_of_any_size, data.train_dataloader)
    trainer.fit(model, datamodule=data)
    updates = {name: watch.final[name].double() - start.double() for name, start in watch.initial.items()}
    result = Result(watch.losses, watch.norms, watch.gradients, updates)
    outcome = Outcome(result, watch.initial, watch.buffers, watch.initial_buffers, watch.apart, watch.stages)
    return outcome, trainer


def _of_any_size(train_dataloader: Callable[[], Any]) -> Any:
    """Return the user's loader as if it had no batch size: the one that it has fits one number of ranks only."""
    loader = train_dataloader()
    if isinstance(loader, DataLoader) and loader.batch_size is not None:
        vars(loader)["batch_size"] = 1  # torch refuses to set it; the framework reads it and makes a loader of its own
    return loader


def alone(
    spec: Mapping[str, Any],
    start: Outcome,
    batches: list[Any],
    lr: float,
    clip: float | None,
    by: str,
    delays: Mapping[str, int] | None = None,
    vertical_sync: bool = False,
) -> Outcome:
    """Train in one process without a Trainer: the truth that mixes are held against.

    Args:
        spec: of the model.
        start: has its initial weights and buffers.
        batches: one global batch a step.
        lr: learning rate.
        clip: bound of the gradient; None = none.
        by: what is bounded: `norm`, `inf_norm` or `value`.
        delays: as in `reference.train`, of a mix whose gradients are delayed.
        vertical_sync: as there.
    """
    torch.set_default_dtype(torch.float64)  # what a step method makes anew is as wide as under precision=fp64
    model = as_module(objects.build(spec), spec)
    model.configure_model()
    model.setup("fit")
    model.double()
    quiet_dropout(model)
    _load(model, start)
    for name in ("log", "log_dict"):
        setattr(model, name, _log_nothing)
    takes_index = len(inspect.signature(model.training_step).parameters) > 1
    number = iter(range(len(batches)))

    def loss_of(module: Any, batch: Any) -> tuple[Tensor, float]:
        output = module.training_step(batch, *([next(number)] if takes_index else []))
        if not isinstance(output, Mapping):
            return output, 1.0
        weight = output.get("weight")
        return output["loss"], 1.0 if weight is None else float(weight)

    steps = [[tree_map(_wide, batch)] for batch in batches]
    result = reference.train(
        model, steps, loss_of, lr=lr, momentum=MOMENTUM, clip=clip, clip_algorithm=by,
        delays=delays, vertical_sync=vertical_sync,
    )  # fmt: skip
    return Outcome(result, start.initial, {name: buffer.clone() for name, buffer in model.named_buffers()})


def _load(model: nn.Module, start: Outcome) -> None:
    """Give `model` the weights and buffers of `start`."""
    with torch.no_grad():
        for named, values in (
            (dict(model.named_parameters()), start.initial),
            (dict(model.named_buffers()), start.initial_buffers),
        ):
            if set(named) != set(values):
                raise RunFailedError(
                    f"Built without a Trainer the model has {sorted(set(named) ^ set(values))} too many or too few, so "
                    "it can't be verified."
                )
            for name, tensor in named.items():
                tensor.copy_(values[name])


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for `self.log` where there is no Trainer."""


def _wide(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def gathered(named: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return whole tensors by name, from whichever ranks have them, and how far copies of one are apart; collective.

    The first rank that has a tensor sends it to all, and who has one too compares: the model crosses the wire once.
    """
    mine = {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu().clone()
        for name, tensor in named
        if not tensor.is_meta
    }
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine, {}
    kinds = _of_everyone({name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()})
    owners = {name: rank for rank in reversed(range(len(kinds))) for name in kinds[rank]}
    whole: dict[str, Tensor] = {}
    for rank, dtype in sorted({(owner, kinds[owner][name][1]) for name, owner in owners.items()}, key=str):
        sent = {name: kinds[rank][name] for name, owner in owners.items() if owner == rank}
        shapes = {name: shape for name, (shape, its_dtype) in sorted(sent.items()) if its_dtype == dtype}
        sizes = [shape.numel() for shape in shapes.values()]
        own = (
            [mine[name].flatten() for name in shapes]
            if rank == dist.get_rank()
            else [torch.empty(sum(sizes), dtype=dtype)]
        )
        flat = torch.cat(own)
        dist.broadcast(flat, rank)
        pieces = zip(shapes.items(), torch.split(flat, sizes), strict=True)
        whole |= {name: piece.view(shape) for (name, shape), piece in pieces}
    apart = {name: _apart(whole[name], tensor) for name, tensor in mine.items() if not torch.equal(whole[name], tensor)}
    found: dict[str, float] = {}
    for rank, theirs in enumerate(_of_everyone(apart)):
        for name, distance in theirs.items():
            if not distance <= SAME:
                found.setdefault(f"{name} on rank {rank}", distance)
    return whole, found


def _of_everyone(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _apart(first: Tensor, other: Tensor) -> float:
    """Return the relative distance of two copies; infinite if they aren't even of one shape."""
    if first.shape != other.shape or first.dtype != other.dtype:
        return math.inf
    return float((first.double() - other.double()).norm() / first.double().norm().clamp(min=1e-12))
