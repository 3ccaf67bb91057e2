"""What a rank does for `verify`: train the plan's own model and data for a few steps, and keep what is compared."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from framework import dropout, objects
from framework.adapters.torch_private import tree_map
from framework.errors import RunFailedError
from framework.plan import RunPlan
from framework.trainer import Trainer, as_module, build_model
from framework.verify import pieces, reference
from framework.verify.pieces import Norms, Piece
from framework.verify.reference import Result
from framework.window import batch_size

MOMENTUM = 0.9
UNKNOWN = (*dropout.KINDS, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""Modules that drop; what `framework.dropout` doesn't know of them is switched off."""


@dataclass
class Seen:
    """What one rank saw of a mix; tensors in pieces (`framework.verify.pieces`).

    Attributes:
        losses: of each optimizer step.
        norms: of each optimizer step: for each gradient, where this rank's piece of it is and the norm of that.
        order: of these norms, 2 or infinity.
        gradients: the first of each parameter.
        initial: parameters at the start.
        final: parameters at the end.
        buffers: those at the end.
        initial_buffers: those at the start.
        stages: the pipeline stage of each of its parameters.
        by_rank: modules whose dropout depends on the mix.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[Norms] = field(default_factory=list)
    order: float = 2.0
    gradients: dict[str, Piece] = field(default_factory=dict)
    initial: dict[str, Piece] = field(default_factory=dict)
    final: dict[str, Piece] = field(default_factory=dict)
    buffers: dict[str, Piece] = field(default_factory=dict)
    initial_buffers: dict[str, Piece] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)
    by_rank: set[str] = field(default_factory=set)


@dataclass
class Outcome:
    """What a mix showed, put together from what its ranks saw.

    Attributes:
        result: losses, gradient norms, first gradients, updates.
        initial: whole initial parameters by name.
        buffers: whole buffers at the end by name.
        initial_buffers: those at the start.
        apart: relative distances of what two ranks have and should be equal, by name.
        stages: which pipeline stage has which parameter.
    """

    result: Result
    initial: dict[str, Tensor]
    buffers: dict[str, Tensor]
    initial_buffers: dict[str, Tensor] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)


def together(seen: Sequence[Seen]) -> Outcome:
    """Put together what all ranks of a mix saw, by rank."""
    made: dict[str, dict[str, Tensor]] = {}
    apart: dict[str, float] = {}
    for kind in ("initial", "initial_buffers", "gradients", "final", "buffers"):
        made[kind], distances = pieces.whole([getattr(one, kind) for one in seen])
        apart |= {f"{kind.replace('_', ' ')} {name}": distance for name, distance in distances.items()}
    for rank, one in enumerate(seen):
        if one.losses != seen[0].losses:
            apart[f"losses on rank {rank}"] = float("inf")
    steps = [[one.norms[step] for one in seen] for step in range(len(seen[0].norms))]
    norms = [pieces.global_norm(everyone, seen[0].order) for everyone in steps]
    updates = {name: made["final"][name].double() - start.double() for name, start in made["initial"].items()}
    result = Result(seen[0].losses, norms, made["gradients"], updates)
    stages = {name: index for one in seen for name, index in one.stages.items()}
    return Outcome(result, made["initial"], made["buffers"], made["initial_buffers"], apart, stages)


def sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return the hash of named tensors: names, shapes, dtypes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.ndim else repr(tensor.item()).encode())
    return digest.hexdigest()


class LocalSGD(torch.optim.SGD):
    """SGD with momentum, as torch's, on this rank's own pieces of the parameters.

    It works element by element, so it needs no rules of DTensor; to find these for a mesh of three axes takes seconds.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Call `closure` (forward and backward), then move what has a gradient."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    gradient = _local(p.grad, p)
                    kept = self.state[p].get("momentum_buffer")
                    if kept is None:
                        velocity = gradient.clone()
                        self.state[p]["momentum_buffer"] = _laid_out(velocity, p)
                    else:
                        velocity = _local(kept, p).mul_(group["momentum"]).add_(gradient)
                    _local(p, p).add_(velocity, alpha=-group["lr"])
        return loss


def _local(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's piece of a parameter, or of its gradient cut as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    assert isinstance(parameter, DTensor)
    if tensor.placements != parameter.placements:
        tensor = tensor.redistribute(placements=parameter.placements)
    return tensor.to_local()


def _laid_out(piece: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's piece of an optimizer's state as a tensor cut as its parameter is."""
    if not isinstance(parameter, DTensor):
        return piece
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        piece, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def sgd(model: LightningModule, lr: float) -> LocalSGD:
    """SGD with momentum over what learns: AdamW would hide a wrong scale of the gradients."""
    return LocalSGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=MOMENTUM)


def quiet_dropout(model: nn.Module, by_rank: Collection[str]) -> None:
    """Switch off what would drop by rank: modules `by_rank`, and whatever keeps its rate in an attribute `dropout`."""
    for name, module in model.named_modules():
        if name in by_rank or (isinstance(module, UNKNOWN) and not dropout.known(module)):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0


class Watch(Callback):
    """Keeps what is compared; every moment is one of all ranks."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Keep the initial weights."""
        self.seen.initial = pieces.of(trainer.strategy.named_parameters())
        self.seen.initial_buffers = pieces.of(pl_module.named_buffers())
        if trainer.strategy.plan.trainer.get("gradient_clip_algorithm") == "inf_norm":
            self.seen.order = torch.inf
        stage = {parameter: part.index for part in trainer.strategy.parts for parameter in part.parameters()}
        self.seen.stages = {name: stage[p] for name, p in pl_module.named_parameters() if p in stage}

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Keep the norms of the gradients, before clipping, and the first of each parameter."""
        mine = pieces.of(trainer.strategy.named_gradients())
        self.seen.norms.append(pieces.norms(mine, self.seen.order))
        self.seen.gradients = mine | self.seen.gradients

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        """Keep the loss of an optimizer step."""
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.seen.losses.append(float(trainer.strategy.window.loss))

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Keep weights and buffers."""
        self.seen.final = pieces.of(trainer.strategy.named_parameters())
        self.seen.buffers = pieces.of(pl_module.named_buffers())
        masks = trainer.strategy.parts[0].masks
        self.seen.by_rank = masks.by_rank | masks.unused if masks is not None else set()


def train(plan: RunPlan, lr: float, by_rank: Collection[str] = (), mutant: str = "") -> Seen:
    """Train under the plan's mix, with a planted fault if one is named; called on every rank.

    `by_rank`: modules whose dropout is switched off, since it depends on the mix.
    """
    from framework.verify.mutants import by_name

    with by_name(mutant) if mutant else nullcontext():
        return _train(plan, lr, by_rank)[0]


def begin(plan: RunPlan, steps: int) -> tuple[Outcome, list[Any], set[str]]:
    """Make one step of one process that changes nothing.

    Returns:
        What it showed, the global batches of the first `steps` steps, and the modules that drop by rank.

    The batches are read from the user's own dataset with the user's own collation, without a sampler or loader of ours.
    """
    seen, trainer = _train(plan, 0.0)
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
    of_steps = [rows[at : at + size] for at in range(0, count, size)]
    batches = [loader.collate_fn(some if stream else _samples(dataset, some)) for some in of_steps]
    return together([seen]), batches, seen.by_rank


def _samples(dataset: Any, indices: Iterable[int]) -> Any:
    """Read samples as torch's loader does: at once, where the dataset has a method for that."""
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(list(indices))
    return [dataset[index] for index in indices]


def _train(plan: RunPlan, lr: float, by_rank: Collection[str] = ()) -> tuple[Seen, Trainer]:
    model = build_model(plan)
    quiet_dropout(model, by_rank)
    # on the instance: the user's class stays as it is
    model.configure_optimizers = partial(sgd, model, lr)  # type: ignore[method-assign]
    if "sync_every" in (plan.components.get("pp") or {}):  # every step's loss is compared
        plan = plan.with_(components={**plan.components, "pp": {**plan.components["pp"], "sync_every": 1}})
    watch = Watch()
    trainer = Trainer(plan, callbacks=[watch], logger=False)
    data = objects.build(plan.components["data"])
    data.train_dataloader = partial(_of_any_size, data.train_dataloader)
    trainer.fit(model, datamodule=data)
    return watch.seen, trainer


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
    by_rank: Collection[str],
    seed: int,
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
        by_rank: modules whose dropout is switched off.
        seed: of dropout.
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
    quiet_dropout(model, by_rank)
    masks = dropout.install(model, seed)
    _load(model, start)
    for name in ("log", "log_dict"):
        setattr(model, name, _log_nothing)
    takes_index = len(inspect.signature(model.training_step).parameters) > 1
    number = iter(range(len(batches)))

    def loss_of(module: Any, batch: Any) -> tuple[Tensor, float]:
        step = next(number)
        if masks is not None:
            masks.begin(step, range(batch_size(batch)))
        output = module.training_step(batch, *([step] if takes_index else []))
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
