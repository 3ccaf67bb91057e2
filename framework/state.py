"""Named state: what a rank holds of model and optimizers, under names that don't depend on the mix.

A name is the one in the user's LightningModule (`model.layers.7.attention.wq.weight`), whichever stage, shard or
wrapper holds the tensor. A sharded tensor is a `DTensor` and knows its place in the whole; a rank simply passes what
it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from framework import roll_call
from framework.agreement import gather, ranks
from framework.checkpoint_files import CheckpointError
from framework.optimizer_own import own_state, restore_own

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Parts that torch.compile, activation checkpointing and FSDP1 put into names; they never reach a file."""

OptimizerState = dict[str, Any]
"""`{"class": name, "state": {parameter name: {key: value}}, "param_groups": [{..., "params": [parameter name]}]}`, and
`own` if the optimizer has any: see `framework.optimizer_own`."""


class OwnFormat(Protocol):
    """An optimizer whose state isn't made of plain tensors: it says itself what is saved of it.

    What is saved of a parameter are numbers, and tensors that are laid out like the parameter, element by element
    (DTensors where it is one), so that any other mix finds its own; names have no dot.
    """

    def saved_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return what is saved of one parameter."""

    def loaded_state(self, parameter: nn.Parameter, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of one parameter from what was saved of it, perhaps under another mix."""

    def state_bytes(self, elements: int, itemsize: int) -> int:
        """Return the bytes of state of a parameter of which a rank holds so many elements, of so many bytes each."""


def clean(name: str) -> str:
    """Take the wrappers' parts out of a name."""
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name


@dataclass
class ModuleState:
    """What this rank holds of a module.

    Attributes:
        tensors: name -> the module's own tensor (a parameter or a persistent buffer; loading into it loads the
            module). A tensor with several names (tied weights) is here once, under its first name.
        ties: further name -> first name.
        extra: name -> what a submodule's `get_extra_state` returned, if that isn't a tensor.
        absent: names of tensors on the meta device: another stage holds them.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)

    def all_names(self) -> dict[str, Tensor]:
        """Every name -> its tensor; tied names share one object."""
        return {**self.tensors, **{name: self.tensors[first] for name, first in self.ties.items()}}

    def detached(self) -> dict[str, Tensor]:
        """As `all_names`, without autograd: what Lightning's checkpoint dict holds. Nothing is copied."""
        tensors = {name: tensor.detach() for name, tensor in self.tensors.items()}
        return {**tensors, **{name: tensors[first] for name, first in self.ties.items()}}


def module_state(module: nn.Module) -> ModuleState:
    """Return what this rank holds of `module`; copies nothing.

    To be called between steps. Asking the module for its state makes FSDP put its shards back in place.
    """
    return state_of(module.state_dict(keep_vars=True))


def state_of(state_dict: Mapping[str, Any]) -> ModuleState:
    """Sort a state dict (of `module.state_dict(keep_vars=True)` or of Lightning's checkpoint) into `ModuleState`."""
    state = ModuleState()
    first: dict[int, str] = {}
    for raw, value in state_dict.items():
        name = clean(raw)
        if not isinstance(value, Tensor):
            state.extra[name] = value
        elif value.is_meta:
            state.absent.add(name)
        elif id(value) in first:
            state.ties[name] = first[id(value)]
        else:
            first[id(value)] = name
            state.tensors[name] = value
    return state


def parameter_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter of this rank -> its (first) name."""
    module.state_dict(keep_vars=True)  # FSDP puts the sharded parameters back into the modules
    names: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, clean(name))
    return names


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> OptimizerState:
    """Return an optimizer's state by parameter name; copies nothing.

    A parameter that never had a gradient has no entry in `state`: it hasn't started. That holds for frozen ones too.
    """
    names = parameter_names(module)
    state: dict[str, dict[str, Any]] = {}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        held = []
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    f"The optimizer {type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} in"
                    f" group {number} that is no part of the module: its state can't be saved by name"
                )
            held.append(names[parameter])
            if optimizer.state.get(parameter):
                described = getattr(optimizer, "saved_state", None)  # `OwnFormat`
                state[names[parameter]] = described(parameter) if described else dict(optimizer.state[parameter])
        groups.append({**{key: value for key, value in group.items() if key not in _NOT_SAVED}, "params": held})
    own = own_state(optimizer)
    return {
        "class": type(optimizer).__name__, "state": state, "param_groups": groups, **({"own": own} if own else {})
    }  # fmt: skip


_NOT_SAVED = ("params", "param_names")
_KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float}


def flatten_optimizer(state: OptimizerState, prefix: str) -> dict[str, Tensor]:
    """Return the state as tensors: `<prefix><parameter>.<key>`; a number's type is part of its name (`w.step:int`).

    Raises:
        CheckpointError: a value is neither tensor nor number nor None.
    """
    flat: dict[str, Tensor] = {}
    for name, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                flat[f"{prefix}{name}.{key}"] = value
            elif value is None:
                flat[f"{prefix}{name}.{key}:none"] = torch.empty(0, dtype=torch.uint8)
            elif type(value) in _KINDS.values():
                dtype = torch.float64 if isinstance(value, float) else torch.int64
                flat[f"{prefix}{name}.{key}:{type(value).__name__}"] = torch.tensor(value, dtype=dtype)
            else:
                raise CheckpointError(
                    f"The checkpoint can't hold the state of {state['class']}: '{key}' of {name} is of type"
                    f" {type(value).__name__}, neither tensor nor number"
                )
    return flat


Entries = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""What a checkpoint holds: name -> (dtype, global shape)."""


def optimizer_template(module: nn.Module, optimizer: Optimizer, prefix: str, entries: Entries) -> dict[str, Tensor]:
    """Return tensors to load an optimizer's state into, as the checkpoint has it: same names as `flatten_optimizer`.

    Built from the file and not from the optimizer, which has no slots before its first step. A tensor of the
    parameter's shape is laid out like the parameter; others are whole on each rank.
    """
    names = {name: parameter for parameter, name in parameter_names(module).items()}
    held = {name: names[name] for name in _held(module, optimizer)}
    template: dict[str, Tensor] = {}
    for entry, (dtype, shape) in entries.items():
        if not entry.startswith(prefix):
            continue
        name, _, key = entry.removeprefix(prefix).rpartition(".")
        if name in held:
            saved, _ = entries.get(f"model.{name}", (dtype, shape))
            template[entry] = _slot(
                held[name],
                key,
                dtype=dtype,
                shape=shape,
                saved_dtype=saved,
                group=_group_of(optimizer, held[name]),
            )
    return template


def _held(module: nn.Module, optimizer: Optimizer) -> list[str]:
    names = parameter_names(module)
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def _group_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    return next(group for group in optimizer.param_groups if any(parameter is other for other in group["params"]))


def _slot(
    parameter: nn.Parameter,
    key: str,
    *,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    saved_dtype: torch.dtype,
    group: Mapping[str, Any],
) -> Tensor:
    """Return an empty tensor for one entry.

    Where a slot had its parameter's dtype when saved, it has the parameter's dtype now. `step` stays on the CPU
    unless the optimizer is fused or capturable, as `Optimizer.load_state_dict` has it.
    """
    if ":" in key:
        return torch.zeros(shape, dtype=dtype)
    if key == "step":
        on_device = group.get("fused") or group.get("capturable")
        return torch.zeros(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
    dtype = parameter.dtype if dtype == saved_dtype and dtype.is_floating_point else dtype
    if shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    whole = torch.zeros(shape, dtype=dtype, device=parameter.device)
    if isinstance(parameter, DTensor) and shape:
        mesh = parameter.device_mesh
        return distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim)
    return whole


def restore_optimizer(
    module: nn.Module,
    optimizer: Optimizer,
    prefix: str,
    loaded: Mapping[str, Tensor],
    groups: Sequence[Mapping[str, Any]],
    own: Mapping[str, Any] | None = None,
) -> list[str]:
    """Give an optimizer the loaded slots and hyper-parameters; returns what differs from this run's settings, in words.

    Args:
        module: that holds the parameters.
        optimizer: to restore. A parameter without entries in `loaded` gets no state: not started.
        prefix: as in `optimizer_template`.
        loaded: filled template.
        groups: saved groups of all ranks, each with `values` and the parameters' `names`.
        own: what it kept beside them; None = nothing.
    """
    state: dict[str, dict[str, Any]] = {}
    for entry, tensor in loaded.items():
        if entry.startswith(prefix):
            name, _, key = entry.removeprefix(prefix).rpartition(".")
            key, _, kind = key.partition(":")
            value = tensor if not kind else None if kind == "none" else _KINDS[kind](tensor.item())
            state.setdefault(name, {})[key] = value
    names = parameter_names(module)
    optimizer.state.clear()
    restore_own(optimizer, own or {})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if names[parameter] in state:
                saved, understood = state[names[parameter]], getattr(optimizer, "loaded_state", None)
                optimizer.state[parameter] = understood(parameter, saved) if understood else saved
    return _restore_groups(optimizer, names, groups)


def _restore_groups(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], groups: Sequence[Mapping[str, Any]]
) -> list[str]:
    by_name = {name: group["values"] for group in groups for name in group["names"]}
    changes = []
    for number, group in enumerate(optimizer.param_groups):
        held = [names[parameter] for parameter in group["params"]]
        values = [by_name[name] for name in held if name in by_name]
        if not held and number < len(groups):  # a stage that holds nothing of this group still needs its settings
            values = [groups[number]["values"]]
        if any(not _same(other[key], values[0].get(key)) for other in values[1:] for key in other):
            raise CheckpointError(
                f"Group {number} of {type(optimizer).__name__} holds parameters that had different settings when the"
                f" checkpoint was saved ({', '.join(held[:3])}, ...): build the same groups as then"
            )
        for key, value in (values[0] if values else {}).items():
            scheduled = key == "lr" and "initial_lr" in group  # of a schedule, which says itself what is another
            if not scheduled and key in group and not _same(group[key], value):
                changes.append(
                    f"{key} of group {number}: {value} from the checkpoint, this run's settings say {group[key]}"
                )
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    return changes


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return bool(one == other)


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Gather a module whole on global rank 0: every name -> CPU tensor, tied names too. Other ranks get an empty dict.

    Collective. Tensors travel one at a time, so that no other rank holds more than one whole tensor.

    Raises:
        UsageError: in a run: another rank has gone on without the call.
    """
    roll_call.call("full_state_dict")
    state = module_state(module)
    rank, size = ranks()
    if size == 1 and not any(isinstance(tensor, DTensor) for tensor in state.tensors.values()):
        alone = {name: tensor.detach().cpu().clone() for name, tensor in state.tensors.items()}
        return {**alone, **{name: alone[first] for name, first in state.ties.items()}}
    held: dict[str, tuple[torch.dtype, torch.Size]] = {
        name: (tensor.dtype, tensor.shape) for name, tensor in state.tensors.items()
    }
    everyone = gather((held, state.ties))
    owners = {name: rank for rank in reversed(range(len(everyone))) for name in everyone[rank][0]}
    whole: dict[str, Tensor] = {}
    for name in sorted(owners):
        tensor = state.tensors[name].detach() if name in state.tensors else None
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if rank == 0:
            if tensor is None:
                dtype, shape = everyone[owners[name]][0][name]
                tensor = torch.empty(shape, dtype=dtype, device=_communication_device())
                dist.recv(tensor, src=owners[name])
            whole[name] = tensor.cpu().clone()
        elif rank == owners[name] and tensor is not None:
            dist.send(tensor.to(_communication_device()).contiguous(), dst=0)
    if rank == 0:
        whole |= {name: whole[first] for _, ties in everyone for name, first in ties.items()}
    roll_call.level()
    return whole


def _communication_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
