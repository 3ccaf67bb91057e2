"""A pipeline stage of an unchanged LightningModule, however it was cut: what torch's schedules call and look at.

`framework/block_stages.py` cuts between the blocks of a list, `framework/traced_stages.py` wherever a weight is used.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from framework.adapters import torch_private
from framework.dropout import Masks

Caller = Callable[[Callable[[], Any]], Any]
"""Runs the step method that it is given and returns its result."""


class Stage(nn.Module):
    """One pipeline stage: what `torch.distributed.pipelining.PipelineStage` calls.

    Args:
        root: the user's module.
        view: what it looks like to this stage.
    """

    def __init__(self, root: LightningModule, view: AbstractContextManager[None]) -> None:
        super().__init__()
        self.root = root
        self.view = view
        self.run: Callable[[int, Caller], Any] = self._not_running
        """Set by `Pipeline` for the length of a step: micro-batch number -> result of the user's step method, which is
        called through the second argument."""
        self.rehearsing = False
        """Whether the next forward is only asked for shapes: torch's schedules run one when they first step."""
        self.masks: Masks | None = None
        """Of dropout; set by `Pipeline`."""

    @staticmethod
    def _not_running(micro: int, call: Caller) -> Any:
        raise AssertionError("a stage runs only inside Pipeline.training_step or evaluation_step")

    def watch(self) -> None:
        """Begin to follow what the stage needs to see; called after all wrapping."""
        raise NotImplementedError

    def learn(self, micro: int, method: str, shapes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prepare for micro-batch `micro`, which step method `method` will be called for with these arguments."""

    def forward(self, *received: Tensor, micro: Tensor) -> Any:
        """Run one micro-batch; returns the tensors to send on, or on the last stage what the step method returned."""
        raise NotImplementedError

    # A stage is looked at (by FSDP2, by torch's schedules) only through its view.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.view:
            if not self.rehearsing:
                return super().__call__(*args, **kwargs)
            self.rehearsing = False
            with _nothing_happened(self.root):
                return super().__call__(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """As nn.Module, through the view."""
        with self.view:
            found = list(super().named_modules(*args, **kwargs))
        yield from found

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """As nn.Module, through the view, without other stages' parameters (which lie on the meta device)."""
        with self.view:
            found = [(name, p) for name, p in super().named_parameters(*args, **kwargs) if not p.is_meta]
        yield from found


@contextmanager
def _nothing_happened(root: nn.Module) -> Iterator[None]:
    """Put buffers (running statistics) and random numbers back to what they were."""
    buffers = [(buffer, buffer.clone()) for buffer in root.buffers() if not buffer.is_meta]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    for buffer, before in buffers:
        buffer.data.copy_(before)  # unseen by autograd: the backward of what happened is still to come


def sendable(tensor: Tensor) -> Tensor:
    """Return a tensor that can be an output of a stage: laid out in order, differentiable, computed there."""
    tensor = _differentiable(tensor).contiguous()
    # schedules that split the backward detach it in place, which a view forbids; what only passes through would have no
    # place in their graph
    return tensor.clone() if tensor.requires_grad and (tensor.is_leaf or torch_private.is_view(tensor)) else tensor


def _differentiable(tensor: Tensor) -> Tensor:
    """Return a tensor that the next stage gets a gradient for, though all of this stage is frozen.

    Schedules that split the backward find a stage's weight gradients by way of its inputs' gradients: where no input
    asks for one they drop the weights' in silence.
    """
    if tensor.requires_grad or not tensor.is_floating_point() or not torch.is_grad_enabled():
        return tensor
    return tensor.detach().requires_grad_()
