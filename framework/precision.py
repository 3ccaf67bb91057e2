"""`Precision`: number formats of weights, compute and gradients, and the loss scale of fp16.

One class serves all precisions, so that unscale, clip and step always happen in the same order (P33):
closure (forward, backward, normalisation) -> unscale once -> `on_before_optimizer_step` -> clip -> step or skip.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision as LightningPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from framework.adapters.torch_private import foreach_mul_, foreach_norm, tree_map

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from torch.optim import Optimizer


def together(contexts: Sequence[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Return one context for all; it costs nothing where there are none, as is usual."""
    if len(contexts) < 2:
        return contexts[0] if contexts else nullcontext()
    return _nested(contexts)


@contextmanager
def _nested(contexts: Sequence[AbstractContextManager[Any]]) -> Generator[None, None, None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def local(tensor: Tensor) -> Tensor:
    """Return this rank's piece of a DTensor, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


log = logging.getLogger(__name__)


def _keep() -> bool:
    """No step is dropped; a module's function, so that it pickles into spawned ranks."""
    return False


class LossScale:
    """Dynamic loss scale (Micikevicius et al., 2018), agreed on by all ranks.

    `torch.amp.GradScaler` looks at this rank's gradients only and refuses mixes of DTensor and plain tensors; here the
    finding is reduced over the world before anybody decides.

    Args:
        init_scale: first scale.
        growth_factor: factor after `growth_interval` steps without overflow.
        backoff_factor: factor after an overflow on any rank.
        growth_interval: steps.
    """

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.scale = init_scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.good_steps = 0

    def unscale_(self, gradients: Iterable[Tensor]) -> bool:
        """Divide gradients by the scale in place; return whether any rank holds a value that isn't finite."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            by_dtype.setdefault(gradient.dtype, []).append(local(gradient))
        device = next(iter(by_dtype.values()))[0].device if by_dtype else torch.device("cpu")
        if dist.is_initialized() and dist.get_backend() == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        overflow = torch.zeros((), device=device)
        for group in by_dtype.values():
            filled = [gradient for gradient in group if gradient.numel()]
            if filled:
                foreach_mul_(filled, 1.0 / self.scale)
                norms = torch.stack(foreach_norm(filled, float("inf")))
                overflow = torch.maximum(overflow, (~torch.isfinite(norms)).any().to(overflow))
        if dist.is_initialized():
            dist.all_reduce(overflow, dist.ReduceOp.MAX)
        return bool(overflow.item())

    def update(self, overflow: bool) -> None:
        """Adapt the scale after one optimizer step."""
        if overflow:
            self.scale *= self.backoff_factor
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= self.growth_factor
            self.good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """Plain numbers for the checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])


class Precision(LightningPrecision):
    """Number formats of a run.

    Args:
        name: as shown to users (`bf16-mixed`).
        param_dtype: of the stored weights and so of the optimizer's state.
        compute_dtype: of matrix products under autocast; None = `param_dtype`, without autocast.
        scale: loss scale; None = none.
        device_type: `cpu` or `cuda`.
    """

    def __init__(
        self,
        name: str,
        param_dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
        scale: LossScale | None = None,
        device_type: str = "cpu",
    ) -> None:
        super().__init__()
        self.name = name
        self.param_dtype = param_dtype
        self.compute_dtype = compute_dtype
        self.scale = scale
        self.device_type = device_type
        self.skipped_steps = 0
        self.last_step_skipped = False
        self.clip: Callable[[Any, float, str], None] | None = None
        """Set by the strategy: clips the gradients of an optimizer over all axes."""
        self.drop_step: Callable[[], bool] = _keep
        """Set by the strategy: whether all ranks agreed to drop this optimizer step (a loss wasn't finite)."""
        self.engine_step: Callable[[bool], bool] | None = None
        """Set by the strategy of an engine that clips and steps itself: (drop) -> whether it found an overflow."""

    # -- formats ---------------------------------------------------------------------------------------------------
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert weights to `param_dtype`; on the meta device too."""
        return module.to(self.param_dtype) if self.param_dtype is not torch.float32 else module

    def convert_input(self, data: Any) -> Any:
        """Convert floating-point inputs to `param_dtype`."""
        if self.param_dtype is torch.float32:
            return data
        return tree_map(
            lambda leaf: leaf.to(self.param_dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf,
            data,
        )

    @contextmanager
    def _default_dtype(self) -> Generator[None, None, None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.param_dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Tensors created inside are `param_dtype` by default."""
        return self._default_dtype()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Modules built inside are `param_dtype` by default."""
        return self._default_dtype()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Around every forward: autocast for mixed precisions, the default dtype for true ones."""
        contexts: list[AbstractContextManager[Any]] = []
        if self.param_dtype is not torch.float32:
            contexts.append(self._default_dtype())
        if self.compute_dtype:
            contexts.append(torch.autocast(self.device_type, self.compute_dtype))
        return together(contexts)

    def train_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Around `training_step`; Lightning's own wraps `forward_context` in one more generator."""
        return self.forward_context()

    # -- steps -----------------------------------------------------------------------------------------------------
    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale."""
        return loss if self.scale is None else loss * self.scale.scale

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss, then call `on_before_backward` hooks with it, as Lightning's mixed precision does."""
        if module.automatic_optimization:
            tensor = self.scale_loss(tensor)
        return super().pre_backward(tensor, module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run forward and backward, then step, or skip the step where all ranks agree that it must be skipped."""
        if not model.automatic_optimization:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            # it evaluates the closure several times, which leaves no moment for skipping
            lbfgs: Any = optimizer
            return lbfgs.step(closure=partial(self._wrap_closure, model, lbfgs, closure), **kwargs)
        result = closure()
        drop = self.drop_step()
        overflow = False
        if self.scale is not None and not drop and self.engine_step is None:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            drop = overflow = self.scale.unscale_(gradients)
            self.scale.update(overflow)
        self._after_closure(model, optimizer)
        if self.engine_step is not None:
            overflow = self.engine_step(drop)
            if self.scale is not None and not drop:
                self.scale.update(overflow)
            drop = drop or overflow
        self.last_step_skipped = drop
        if drop:
            self.skipped_steps += 1
            scale = "" if self.scale is None else f"; scale {self.scale.scale:g}"
            why = f"overflow{scale}" if overflow else "a loss wasn't finite"
            log.warning("Optimizer step %d skipped on all ranks: %s.", model.trainer.global_step, why)
            optimizer.zero_grad(set_to_none=True)
            return result
        if self.engine_step is None:
            optimizer.step(**kwargs)
        return result

    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Clip over all axes: one global norm, each logical element counted once."""
        if clip_val > 0:
            assert self.clip is not None, "the strategy sets `clip` in its setup"
            self.clip(optimizer, clip_val, str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)))

    def state_dict(self) -> dict[str, Any]:
        """Loss scale and count of skipped steps."""
        state: dict[str, Any] = {"skipped_steps": self.skipped_steps}
        return state | ({} if self.scale is None else {"scale": self.scale.state_dict()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of `state_dict`; a scale of another precision is ignored, one that is absent starts afresh."""
        self.skipped_steps = int(state_dict.get("skipped_steps", 0))
        if self.scale is not None and "scale" in state_dict:
            self.scale.load_state_dict(state_dict["scale"])
