"""`DeepSpeedStrategy`: the mesh strategy with DeepSpeed's engine doing backward, reduction, clipping and step.

What differs from the other data-parallel options is only what the engine owns. An optimizer step's gradient has its
true denominator at the end of its window (`framework.window`), when DeepSpeed holds gradients in buffers of its own.
The factor that is due then goes into the loss scale, by which the engine divides in its step: norm, clipping and all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from framework.adapters import deepspeed_private, torch_private
from framework.errors import RunFailedError, UsageError
from framework.strategy import MeshStrategy
from framework_plugins.strategy.deepspeed_config import ZERO
from framework_plugins.strategy.deepspeed_state import EngineState

if TYPE_CHECKING:
    from lightning.pytorch import Trainer as LightningTrainer
    from pluggy import PluginManager

    from framework.plan import RunPlan

log = logging.getLogger(__name__)

NOT_ON_PIECES = ("LBFGS", "Adafactor", "Muon", "SparseAdam")
"""Optimizers of torch that look at a parameter as a whole; ZeRO hands out flat pieces."""


def sharder(config: Mapping[str, Any]) -> Callable[[nn.Parameter], None]:
    """Return what shards a parameter over all ranks, so that no rank holds more than one whole one at a time."""
    import deepspeed

    device = (config[ZERO].get("offload_param") or {}).get("device")
    init = deepspeed.zero.Init(config_dict_or_path=dict(config), remote_device="nvme" if device == "nvme" else None)

    def shard(parameter: nn.Parameter) -> None:
        deepspeed_private.partition(init, parameter)

    return shard


class DeepSpeedStrategy(MeshStrategy):
    """Runs a LightningModule in DeepSpeed's engine.

    Args:
        plan: the run.
        manager: as in `MeshStrategy`.
        spawn: as in `MeshStrategy`.
        config: DeepSpeed's JSON, complete.
        build: whether DeepSpeed may compile operators.
    """

    def __init__(
        self, plan: RunPlan, manager: PluginManager | None, spawn: bool, *, config: Mapping[str, Any], build: bool
    ) -> None:
        super().__init__(plan, manager, spawn)
        self.config = config
        self.stage = int(config[ZERO]["stage"])
        self.build = build
        self.engine: Any = None
        self.groups: list[list[nn.Parameter]] = []
        """The parameters in each of the optimizer's groups, which hold flat pieces once the engine is there."""
        self._factor = 1.0
        self._dropped = False
        self._trained: set[int] = set()

    # -- building ------------------------------------------------------------------------------------------------------
    def _building(self) -> Any:
        def say(text: str) -> None:
            if self.global_rank == 0:
                print(text, flush=True)

        return deepspeed_private.building(self.build, say)

    def setup_environment(self) -> None:
        """Connect the processes, then tell DeepSpeed that they are."""
        super().setup_environment()
        import deepspeed

        deepspeed_private.forget_earlier_runs()
        with self._building():
            deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=None, verbose=False)

    def setup(self, trainer: LightningTrainer) -> None:
        """Build module and optimizer as for any mix, then hand both to the engine."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self.engine is not None:
            raise UsageError(
                "DeepSpeed's engine trains a module once: build another Trainer and module to train again."
            )
        # without an engine nobody would gather sharded parameters
        self.plan = self.plan.with_(command="fit" if fitting else "validate")
        with self._building():
            super().setup(trainer)
            if fitting:
                self.engine = self._make_engine()
                self._own_step()
        if self.engine is not None:
            self.model = self.engine
            if self.stage:
                self.state = EngineState(self, self._module)

    def _make_engine(self) -> Any:
        import deepspeed

        if len(self.optimizers) != 1:
            raise UsageError(f"DeepSpeed's engine has one optimizer, and the module has {len(self.optimizers)}.")
        optimizer = self.optimizers[0]
        kind = type(optimizer).__name__
        if self.stage and kind in NOT_ON_PIECES:
            raise UsageError(
                f"{kind} looks at whole parameters, and ZeRO updates flat pieces of them: type strategy=fsdp, or use "
                "an optimizer that treats each element alone (SGD, AdamW)."
            )
        if self.stage and kind == "Adagrad":
            raise UsageError("DeepSpeed replaces Adagrad by one that no schedule reaches: type strategy=fsdp.")
        self.groups = [list(group["params"]) for group in optimizer.param_groups if group["params"]]
        engine, *_ = deepspeed.initialize(
            model=self._module, optimizer=optimizer, config=dict(self.config), dist_init_required=False
        )
        return engine

    def _own_step(self) -> None:
        """Have the engine clip and step where the precision would."""
        self._precision.engine_step = self._engine_step
        self._precision.drop_step = self._take_drop
        if self.stage:
            groups = deepspeed_private.flat_groups(self.engine.optimizer)
            self._trained = {id(parameter) for _, group in groups for parameter in group}
            deepspeed_private.set_loss_scale(self.engine.optimizer, 1.0)
            self._precision.clip = _leave_to_the_engine
            self.optimizers[0].zero_grad = _leave_to_the_engine  # type: ignore[method-assign]

    # -- steps ---------------------------------------------------------------------------------------------------------
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward of one micro-step in the engine; at the last one of a window note what its step must divide by."""
        module, precision, window = self._module, self._precision, self.window
        assert window is not None
        loss = precision.pre_backward(window.weigh(closure_loss), module)
        self.engine.set_gradient_accumulation_boundary(window.last)
        if not window.dropping:
            self._check_used(loss)
            with window.guarded(loss), self._contexts():
                self.engine.backward(loss, scale_wrt_gas=False)
        if window.last:
            if self.stage:
                self._factor = window.close()
            else:
                window.normalise(module.parameters())
        return precision.post_backward(loss, module)

    def _check_used(self, loss: Tensor) -> None:
        """Stop before a backward in which ranks would reduce the gradients of different parameters (P23).

        ZeRO pairs gradients by the order in which they come: one that is missing on a rank aborts the process, or is
        paired with another of its size. One that is missing everywhere would count as zero, and its weight decay.
        """
        leaves = torch_private.leaves_of(loss) if self.stage else None
        if leaves is not None and not self._trained <= leaves:
            names = [name for name, p in self._module.named_parameters() if id(p) in self._trained - leaves]
            raise RunFailedError(
                f"{', '.join(names)} got no gradient on rank {self.global_rank}, and ZeRO needs one of every parameter "
                "that is trained, in each backward: freeze or remove what isn't used, or type strategy=ddp "
                "strategy.find_unused_parameters=true."
            )

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """All micro-steps of a window but the last: what stays on the rank is the stage's business."""
        assert self.window is not None
        with self.window.accumulating():
            yield

    def _take_drop(self) -> bool:
        assert self.window is not None
        self._dropped = self.window.take_drop()
        return self._dropped

    def _scale(self) -> float:
        """Return what gradients have to be divided by: the loss scale, and the window's weight."""
        scale = self._precision.scale
        return (1.0 if scale is None else scale.scale) / self._factor

    def _engine_step(self, drop: bool) -> bool:
        engine = self.engine
        if not self.stage:
            if not drop:
                engine.step()
            return False
        optimizer = engine.optimizer
        deepspeed_private.set_loss_scale(optimizer, self._scale())
        with deepspeed_private.discarding(optimizer) if drop else nullcontext():
            engine.step()
        deepspeed_private.set_loss_scale(optimizer, 1.0)
        self._factor = 1.0
        overflow = bool(optimizer.overflow) and not drop
        if self.plan.trainer.get("gradient_clip_val") and not (drop or overflow):
            self.grad_norm = torch.as_tensor(engine.get_global_grad_norm()).detach().clone()
        return overflow

    # -- what the engine holds -----------------------------------------------------------------------------------------
    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole parameter; collective."""
        if self.engine is None or not self.stage:
            yield from super().named_parameters()
            return
        for name, parameter in self._module.named_parameters():
            yield name, self.whole(parameter)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and whole gradient of each trained parameter, nothing of a step that is dropped; collective."""
        if not self.stage or self._dropped:
            yield from super().named_gradients()
            return
        from deepspeed.utils import safe_get_full_grad

        for name, parameter in self._module.named_parameters():
            if self.trained(parameter):
                yield name, safe_get_full_grad(parameter) / self._scale()

    def trained(self, parameter: nn.Parameter) -> bool:
        """Whether the engine's optimizer has the parameter."""
        return id(parameter) in self._trained

    def whole(self, parameter: nn.Parameter, key: str | None = None) -> Tensor:
        """Return a whole parameter (of a trained one the master weights), or its optimizer state `key`; collective."""
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if key is not None:
            state: Tensor = safe_get_full_optimizer_state(parameter, key)
            return state
        if self.trained(parameter):
            master: Tensor = safe_get_full_fp32_param(parameter)
            return master
        if self.stage < 3:
            return parameter.detach()
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def set_whole(self, parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        """Inverse of `whole`; `publish_masters` makes the model compute with new master weights. Collective."""
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if key is not None:
            safe_set_full_optimizer_state(parameter, value, key)
        elif self.trained(parameter):
            safe_set_full_fp32_param(parameter, value)
        elif self.stage < 3:
            parameter.data.copy_(value)
        else:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(value)

    def teardown(self) -> None:
        """Undo what was put on instances."""
        super().teardown()
        self._precision.engine_step = None


def _leave_to_the_engine(*args: Any, **kwargs: Any) -> None:
    """The engine does it in its step."""
