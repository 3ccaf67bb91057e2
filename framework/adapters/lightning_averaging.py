"""Lightning's `WeightAveraging` and `EMAWeightAveraging` over a module in pieces; private names of Lightning.

The callback copies the module before a strategy has sharded it, and leaves the average in the module's place when
training ends. Here the copy is made of the pieces that each rank holds, once they have their final layout, and the
average comes into the module when the last checkpoint is written: a run that goes on from that one goes on from the
weights that were trained.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn

from framework.errors import UsageError
from framework.plan import RunPlan
from framework.state import clean


class Mirror(LightningModule):
    """The tensors of a module as they lie on this rank, under their names and in their order, without its code."""

    moves = False
    """Whether the user has named a device for the average."""

    @classmethod
    def of(cls, module: nn.Module) -> Mirror:
        """Return one that holds the module's own tensors; a copy of it is a copy of them."""
        mirror = cls()
        persistent = {clean(name) for name in module.state_dict(keep_vars=True)}
        for raw, _ in module.named_modules():  # in their order, in which Lightning pairs the tensors of both
            if raw:
                mirror._owner(clean(f"{raw}."))
        for raw, parameter in module.named_parameters(remove_duplicate=False):
            owner, leaf = mirror._owner(clean(raw))
            owner.register_parameter(leaf, parameter)
        for raw, buffer in module.named_buffers(remove_duplicate=False):
            owner, leaf = mirror._owner(clean(raw))
            owner.register_buffer(leaf, buffer, persistent=clean(raw) in persistent)
        return mirror

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        *path, leaf = name.split(".")
        owner: nn.Module = self
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]  # type: ignore[assignment]
        return owner, leaf

    def to(self, device: Any) -> Mirror:  # type: ignore[override]
        """Stay where the tensors are, unless the user has named a device: this module knows none of its own."""
        return super().to(device) if self.moves else self

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """As Lightning's, but tied tensors are one object under all their names."""
        found: dict[str, Tensor] = super().state_dict(prefix=prefix, keep_vars=True)
        once = {id(tensor): tensor if keep_vars else tensor.detach() for tensor in found.values()}
        result = {} if destination is None else destination
        result.update({name: once[id(tensor)] for name, tensor in found.items()})
        return result


class Average:
    """Stands between Lightning's loops and one averaging callback.

    Args:
        callback: the user's.

    Attributes:
        shown: whether the module holds the average now, and the callback the weights that are trained.
    """

    def __init__(self, callback: WeightAveraging) -> None:
        self.callback = callback
        self.shown = False
        self._trainer: Trainer | None = None
        callback.setup = self._setup  # type: ignore[method-assign]
        callback._swap_models = self._swap  # type: ignore[method-assign, assignment]
        callback._copy_average_to_current = self._keep  # type: ignore[method-assign, assignment]

    def _setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._trainer = trainer
        else:
            type(self.callback).setup(self.callback, trainer, pl_module, stage)

    def _swap(self, module: LightningModule) -> None:
        self.shown = not self.shown
        type(self.callback)._swap_models(self.callback, module)

    def _keep(self, module: LightningModule) -> None:
        """Training has ended, but its last checkpoint is still to come."""

    def build(self, module: LightningModule) -> None:
        """Copy the module, which has its final layout."""
        assert self._trainer is not None
        kwargs = self.callback._kwargs
        if not kwargs.get("avg_fn") and not kwargs.get("multi_avg_fn"):
            # torch's own takes all tensors at once, which may be sharded and whole ones
            self.callback._kwargs = {**kwargs, "avg_fn": running_mean}
        mirror = Mirror.of(module)
        mirror.moves = self.callback._device is not None
        self.shown = False
        type(self.callback).setup(self.callback, self._trainer, mirror, "fit")

    def show(self, module: LightningModule) -> None:
        """Put the average into the module, for good."""
        if not self.shown:
            self._swap(module)

    @contextmanager
    def aside(self, module: LightningModule) -> Generator[None, None, None]:
        """Inside, the module holds the weights that are trained."""
        shown = self.shown
        if shown:
            self._swap(module)
        try:
            yield
        finally:
            if shown:
                self._swap(module)


def running_mean(averaged: Tensor, current: Tensor, count: Tensor) -> Tensor:
    """Return the mean of one more; `count` are averaged already."""
    return averaged + (current - averaged) / (count + 1)


def averages_of(callbacks: Sequence[Any], plan: RunPlan, own_engine: bool) -> list[Average]:
    """Return what stands in for the averaging callbacks among a run's.

    Args:
        callbacks: of the run.
        plan: of the run.
        own_engine: whether the strategy's engine keeps the parameters for itself.

    Raises:
        UsageError: the weights can't be averaged.
    """
    mesh = plan.mesh
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, StochasticWeightAveraging) and max(mesh.dp_shard, mesh.tp, mesh.pp) > 1:
            raise UsageError(
                f"The callback {name} copies the whole module, of which each rank has a piece here; take "
                "lightning.pytorch.callbacks.WeightAveraging, which averages alike, or one rank or strategy=ddp."
            )
        if isinstance(callback, WeightAveraging) and own_engine:
            raise UsageError(
                f"The callback {name} averages the module's parameters, which strategy={plan.chosen('strategy')} keeps "
                "in its engine; type strategy=fsdp or strategy=ddp."
            )
    return [Average(callback) for callback in callbacks if isinstance(callback, WeightAveraging)]
