"""Checkpoints of an engine's state, in the same form as of any other mix.

DeepSpeed holds pieces of flat buffers. For a checkpoint each parameter and each of its optimizer states is put
together, one at a time, and cut along dim 0 as FSDP2 does: every rank keeps its piece as a DTensor under the global
name. That is what `framework.checkpoint` saves and loads, so such a checkpoint fits any mix, and one of any mix fits
here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from framework.adapters import deepspeed_private
from framework.checkpoint import CheckpointError, load_checkpoint, load_module_state
from framework.optimizer_own import own_state
from framework.state import module_state, optimizer_state
from framework.state_keeper import StateKeeper

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from framework_plugins.strategy.deepspeed_strategy import DeepSpeedStrategy


class CutModule:
    """Stands for the user's module where its state is read or filled: parameters are cut, all else is the user's own.

    Args:
        module: the user's.
        cut: name -> what stands for the parameter.
    """

    def __init__(self, module: nn.Module, cut: Mapping[str, nn.Parameter]) -> None:
        self.module = module
        self.cut = cut
        self.of = {id(parameter): cut[name] for name, parameter in module.named_parameters()}

    def state_dict(self, keep_vars: bool = True) -> dict[str, Any]:
        """Return the user's state with the cut parameters in place of the engine's."""
        return {name: self.of.get(id(value), value) for name, value in self.module.state_dict(keep_vars=True).items()}

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the cut parameters, each once."""
        yield from self.cut.items()

    def get_submodule(self, target: str) -> nn.Module:
        """Return the user's."""
        return self.module.get_submodule(target)


def cut(tensor: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Return this rank's piece of a whole tensor that is equal on all ranks; one without dims stays whole."""
    piece = distribute_tensor(tensor.detach(), mesh, [Shard(0)], src_data_rank=None) if tensor.ndim else tensor.detach()
    return nn.Parameter(piece, requires_grad=False)


def whole(tensor: Tensor) -> Tensor:
    """Inverse of `cut`; collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def stand_in(optimizer: Optimizer, groups: Sequence[Sequence[nn.Parameter]]) -> Any:
    """Return an optimizer of the same class with the same settings and no state, over other parameters."""
    other = object.__new__(type(optimizer))
    other.state = defaultdict(dict)
    other.param_groups = [
        {**group, "params": list(held)} for group, held in zip(optimizer.param_groups, groups, strict=True)
    ]
    return other


def _keys(own: dict[str, Any]) -> list[str]:
    return sorted(str(key) for part in own.values() for key in part)


def copy(value: Any) -> Any:
    """Return a number of an optimizer's state as memory of its own: a checkpoint has one for each parameter."""
    return value.clone() if isinstance(value, Tensor) else value


class EngineState(StateKeeper):
    """Saves and loads what an engine of stages 1 to 3 holds."""

    strategy: DeepSpeedStrategy
    _loaded: Any = None

    @property
    def _zero(self) -> Any:
        return self.strategy.engine.optimizer

    def _cut(self, tensor: Tensor) -> nn.Parameter:
        return cut(tensor, self.strategy.mesh["dp_shard"])

    # -- saving --------------------------------------------------------------------------------------------------------
    def module_state(self) -> dict[str, Any]:
        """Return this rank's pieces by global name; collective."""
        pieces = {name: self._cut(self.strategy.whole(p)) for name, p in self.module.named_parameters()}
        module: Any = CutModule(self.module, pieces)
        state = module_state(module)
        return {**state.detached(), **state.extra}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this rank's pieces of the optimizer's state by global name; collective."""
        module, other = self._empty(optimizer)
        if own := own_state(optimizer):
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps state beside the slots of its parameters ({', '.join(_keys(own))}),"
                " which isn't carried under DeepSpeed: type strategy=fsdp"
            )
        for flat, parameters in deepspeed_private.flat_groups(self._zero):
            for key, value in optimizer.state.get(flat, {}).items():
                for parameter in parameters:
                    a_slot = isinstance(value, Tensor) and value.shape == flat.shape
                    one = self._cut(self.strategy.whole(parameter, key)).detach() if a_slot else copy(value)
                    other.state[module.of[id(parameter)]][key] = one
        return optimizer_state(module, other)

    def _empty(self, optimizer: Optimizer) -> tuple[Any, Any]:
        """Return stand-ins for module and optimizer, with memory but no values."""
        pieces = {}
        for name, parameter in self.module.named_parameters():
            dtype = torch.float32 if self.strategy.trained(parameter) else parameter.dtype
            shape = getattr(parameter, "ds_shape", parameter.shape)
            pieces[name] = self._cut(torch.empty(shape, dtype=dtype, device=self.strategy.root_device))
        module = CutModule(self.module, pieces)
        groups = [[module.of[id(parameter)] for parameter in group] for group in self.strategy.groups]
        return module, stand_in(optimizer, groups)

    # -- loading -------------------------------------------------------------------------------------------------------
    def read(self, path: str, fitting: bool) -> dict[str, Any]:
        """Read a checkpoint and fill the engine's optimizer; `put_back` fills the weights. Collective."""
        optimizer = self.strategy.optimizers[0]
        self._loaded, other = self._empty(optimizer)
        result = load_checkpoint(
            self.store,
            path,
            self._loaded,
            [other] if fitting else None,
            mesh=self.strategy.plan.mesh,
            strict=self.module.strict_loading,
        )
        if fitting:
            self._fill_optimizer(optimizer, other)
        return result

    def put_back(self, checkpoint: Mapping[str, Any]) -> None:
        """Fill the engine's weights with what was loaded and what `on_load_checkpoint` made of it; collective."""
        load_module_state(self._loaded, checkpoint["state_dict"])
        for name, parameter in self.module.named_parameters():
            self.strategy.set_whole(parameter, whole(self._loaded.cut[name]))
        deepspeed_private.publish_masters(self._zero)
        self._loaded = None

    def _fill_optimizer(self, optimizer: Optimizer, other: Any) -> None:
        """Put loaded states into the flat ones, loaded settings into the groups."""
        for group, loaded in zip(optimizer.param_groups, other.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        slots: list[tuple[nn.Parameter, str, Tensor]] = []
        for flat, parameters in deepspeed_private.flat_groups(self._zero):
            optimizer.state.pop(flat, None)
            for parameter in parameters:
                stands = self._loaded.of[id(parameter)]
                for key, value in other.state.get(stands, {}).items():
                    if isinstance(value, Tensor) and value.shape == stands.shape and key != "step":
                        slots.append((parameter, key, value))
                        optimizer.state[flat].setdefault(key, torch.zeros_like(flat, requires_grad=False))
                    else:
                        optimizer.state[flat][key] = copy(value)
        deepspeed_private.link_states(self._zero)
        for parameter, key, value in slots:
            self.strategy.set_whole(parameter, whole(value), key)
