"""Tokens to the ranks that hold their experts, and back (dispatch and combine of GShard; Lepikhin et al., 2020).

A module of experts is called with tokens grouped by expert, and how many each expert gets. Spread over ranks, its
`forward` sends each group to the rank that holds the expert, calls the module's own `forward` there with the tokens of
all ranks for the experts it has, and sends the results back. No token is dropped or padded: pieces are uneven, and an
expert may get none.

Gradients: a rank's experts see the samples of all ranks of their ep group, so the gradient of their weights is a sum
over the group. It is divided by the group's size: a mean over the group, as every other parameter's gradient is one
over the rank's samples. The data-parallel wrap then averages over the ranks that hold the same experts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from framework.adapters.torch_private import swapped_parameters
from framework.errors import RunFailedError


class Exchange(torch.autograd.Function):
    """All-to-all of rows, as many to each rank as it is told; collective over the group, its backward too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
        """Send `sends[r]` of the rows [n, ...] to rank r of the group, in order; return those received, by rank."""
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        ctx.crosses_ranks = True  # for `zero_leaf_gradients`
        return _all_to_all(rows, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Send the gradients of received rows back."""
        return _all_to_all(gradient, ctx.receives, ctx.sends, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sends: list[int], receives: list[int], group: Any) -> Tensor:
    received = rows.new_empty(sum(receives), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
    return received


class _Mean(torch.autograd.Function):
    """Identity whose gradient is divided."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int) -> Tensor:
        ctx.size = size
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.size, None


def spread_(module: nn.Module, mesh: DeviceMesh) -> None:
    """Leave this rank its experts of `module`, in place; parameters become DTensors, split along their first dimension.

    Args:
        module: its parameters are plain, on the meta device or equal on all ranks.
        mesh: of axis ep.
    """
    for holder in module.modules():
        for name, parameter in list(holder.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                raise RunFailedError(f"Experts can't be spread: {name} of {type(holder).__name__} is split already.")
            tensor = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            holder.register_parameter(name, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
    inner = type(module).forward

    def forward(self: nn.Module, tokens: Tensor, counts: Tensor) -> Tensor:
        return run(self, inner, mesh, tokens, counts)

    module.forward = MethodType(forward, module)


def run(module: nn.Module, forward: Any, mesh: DeviceMesh, tokens: Tensor, counts: Tensor) -> Tensor:
    """Return what all experts make of this rank's tokens; collective over the mesh.

    Args:
        module: holds this rank's experts.
        forward: of its class.
        mesh: of axis ep.
        tokens: [n, ...], grouped by expert.
        counts: how many each expert gets, int64, [experts].
    """
    group, size = mesh.get_group(), mesh.size()
    sent = counts.view(size, -1)
    received = torch.empty_like(sent)  # [rank that sends, expert of mine]
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    sends, receives = torch.stack((sent.sum(1), received.sum(1))).tolist()  # the one wait for the device
    exchange: Any = Exchange.apply
    arrived = exchange(tokens, sends, receives, group)
    expert = torch.arange(received.shape[1], device=counts.device).repeat(size)
    order = expert.repeat_interleave(received.flatten(), output_size=sum(receives)).argsort(stable=True)
    with _local(module, size):
        y = forward(module, arrived[order], received.sum(0))
    back: Tensor = exchange(y[order.argsort()], receives, sends, group)
    return back


def _local(module: nn.Module, size: int) -> AbstractContextManager[Any]:
    """Inside, the module's parameters are this rank's pieces."""
    mean: Any = _Mean.apply
    stack = ExitStack()
    for holder in module.modules():
        pieces = {
            name: mean(parameter.to_local(), size) if isinstance(parameter, DTensor) else parameter
            for name, parameter in holder.named_parameters(recurse=False)
        }
        stack.enter_context(swapped_parameters(holder, pieces))
    return stack
