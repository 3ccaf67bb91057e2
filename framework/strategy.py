"""`MeshStrategy`: the one Lightning strategy over the mesh.

All axes need the same mesh, data coordinates, reductions, clipping and checkpoint code, mixes are products, and
Lightning takes exactly one strategy; so the options act inside this one, through hooks, at build time. Only Lightning's
public seams are used: the methods below are those of `lightning.pytorch.strategies.Strategy`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from framework import preemption, process_groups
from framework.adapters import lightning_private, torch_private
from framework.adapters.torch_private import tree_map
from framework.clipping import clip_
from framework.data import Loaders
from framework.empty_stage import forget, placeholder
from framework.errors import PlanError, RunFailedError, UsageError
from framework.evaluation import Evaluation, Piece
from framework.going_on import Trained
from framework.mesh import Mesh
from framework.mesh_collectives import MeshCollectives
from framework.metric_objects import untouched
from framework.parallelize import parallelize
from framework.parts import ModelPart
from framework.plan import AXES, RunPlan
from framework.plugin_manager import manager_for
from framework.precision import Precision, together
from framework.randomness import MicroStepSeeds
from framework.replaced import REPLACED, drain_before_validation, hold_schedule_on_skipped_steps
from framework.roll_call import RollCall, attend
from framework.shared_weights import SharedWeights
from framework.state_keeper import StateKeeper
from framework.window import Window, batch_size

if TYPE_CHECKING:
    from pluggy import PluginManager

    from framework.adapters.lightning_averaging import Average
    from framework.pipeline import Pipeline

log = logging.getLogger(__name__)


class MeshStrategy(MeshCollectives):
    """Runs a LightningModule over the mesh of a plan.

    Args:
        plan: the run.
        manager: its components, as the Trainer has them; None = each process builds them when they are first asked for.
        spawn: start workers through Lightning's own spawn launcher; False: this process is a worker already.
    """

    def __init__(self, plan: RunPlan, manager: PluginManager | None = None, spawn: bool = False) -> None:
        super().__init__()
        self.plan = plan
        self.num_nodes = plan.num_nodes
        self._spawn = spawn
        self._manager = manager
        self._mesh: Mesh | None = None
        self.parts: list[ModelPart] = []
        self.pipeline: Pipeline | None = None
        self.shared: SharedWeights | None = None
        self.window: Window | None = None
        self.evaluation: Evaluation | None = None
        self.loaders: Loaders | None = None
        self.state: StateKeeper | None = None
        self.grad_norm: Tensor | None = None
        """Norm before clipping of the last optimizer step, 0-dim; None without clipping."""
        self.optimizer_calls = 0
        """Steps of all optimizers of this process under manual optimization, where `global_step` counts batches."""
        self.roll_call: RollCall | None = None
        self.averages: Sequence[Average] = ()
        """What stands in for the user's averaging callbacks; the Trainer sets it."""
        self._batch_index = 0
        self._nothing_to_move = False
        self._forward_redirection = lightning_private.forward_redirection()

    # -- where we are ----------------------------------------------------------------------------------------------
    @property
    def manager(self) -> PluginManager:
        """The chosen components."""
        if self._manager is None:
            self._manager = manager_for(self.plan)
        return self._manager

    @property
    def is_distributed(self) -> bool:
        """Lightning asks custom strategies this before it gives a loader a sampler; ours come from `framework.data`."""
        return True

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return self.plan.local_world_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Data coordinates: ranks that differ only on tp, pp or cp read the same samples."""
        return {"num_replicas": self.plan.mesh.data_ranks, "rank": self.plan.mesh.data_rank(self.global_rank)}

    @property
    def optimizers(self) -> list[Optimizer]:
        """The same ones, set again, keep Lightning's wrappers: with a wrapper `__del__` of the optimizer would run."""
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        if not lightning_private.has_wrapped(self, optimizers):
            MeshCollectives.optimizers.__set__(self, optimizers)  # type: ignore[attr-defined]  # a property

    def set_world_ranks(self) -> None:
        """Tell the cluster environment (and with it `rank_zero_only`) which rank this is."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.plan.world_size)
        lightning_private.set_rank_zero(self.global_rank)

    def _configure_launcher(self) -> None:
        if self._spawn:
            self._launcher = lightning_private.spawn_launcher(self)

    def setup_environment(self) -> None:
        """Connect the processes (unless the worker did) and build the mesh."""
        super().setup_environment()
        self.set_world_ranks()
        if not dist.is_initialized():  # Lightning's own launcher started this process
            assert self.cluster_environment is not None
            process_groups.use_timeout(timedelta(seconds=self.plan.timeout_s))
            backend = process_groups.backend_for(self.plan.accelerator)
            lightning_private.init_process_group(self.cluster_environment, backend, self.plan.timeout_s)
        if self._mesh is None:
            self._mesh = Mesh(self.plan.mesh, self.plan.accelerator)
        groups = [dist.group.WORLD, *(self.mesh.group(axis) for axis in AXES if axis != "pp")]
        self.roll_call = attend([group for group in groups if group is not None], self.plan.timeout_s)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_manager": None, "roll_call": None}

    def connect(self, model: LightningModule) -> None:
        """Take the module; if it has no `configure_optimizers`, the chosen optimizer stands in for it."""
        super().connect(model)
        if self.plan.chosen("optimizer") and not is_overridden("configure_optimizers", model):
            model.configure_optimizers = self._configure_optimizers  # type: ignore[method-assign]

    def _configure_optimizers(self) -> Any:
        return self.manager.hook.make_optimizer(module=self._module, plan=self.plan)

    # -- building --------------------------------------------------------------------------------------------------
    def setup(self, trainer: LightningTrainer) -> None:
        """Turn the module into this rank's parts, then build optimizer and schedule."""
        module, precision = self._module, self._precision
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if self.roll_call is not None:
            self.roll_call.batches = partial(lightning_private.begun_batches, trainer)
        self._check_module(module, trainer)
        self._seed = MicroStepSeeds(self.plan, self.global_rank)
        users = [user for user in (module, getattr(trainer, "datamodule", None)) if user is not None]
        hooks = ("transfer_batch_to_device", "on_after_batch_transfer")
        self._nothing_to_move = self.root_device.type == "cpu" and not any(
            is_overridden(hook, user) for hook in hooks for user in users
        )
        if not self.parts or self.parts[0].root is not module:
            self.parts = parallelize(module, self.manager.hook, self.mesh, self.plan, precision, self.root_device)
            self.pipeline = self.manager.hook.make_schedule(parts=self.parts, mesh=self.mesh, plan=self.plan)
            if self.pipeline is not None:
                self.shared = SharedWeights(self.parts, self.mesh, self.pipeline.places())
        self.model = self.parts[0].module if self.pipeline is None else module
        last = self.parts[-1].index == self.parts[-1].stages - 1
        contributes = last and self.mesh.rank("tp") == 0
        self.window = Window(module, self.plan, contributes, self.root_device)
        self.evaluation = Evaluation(module, self.window.recorder, contributes, self.root_device, self.plan.mesh.cp > 1)
        self.window.recorder.install(self.mesh)
        if self.pipeline is not None:
            self.pipeline.recording = self.window.recorder.recording
            if self.pipeline.delayed:
                drain_before_validation(module, self.drain)
        precision.clip = self._clip
        precision.drop_step = self.window.take_drop
        self.state = StateKeeper(self, module)
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            with ExitStack() as stack:
                # a frozen stage builds the same optimizer, over nothing
                filler = stack.enter_context(placeholder(module)) if self.plan.mesh.pp > 1 else None
                self.setup_optimizers(trainer)
                forget(filler, self.optimizers)
            hold_schedule_on_skipped_steps(module, trainer, precision)
            if not module.automatic_optimization:
                lightning_private.count_batches(trainer)
            for average in self.averages:
                average.build(module)
            self.state.trained = Trained(module, self.optimizers)
        self.setup_precision_plugin()
        self.barrier("setup")

    def _check_module(self, module: LightningModule, trainer: LightningTrainer) -> None:
        problems = [
            problem for problems in self.manager.hook.check_model(plan=self.plan, model=module) for problem in problems
        ]
        if problems and trainer.state.fn == TrainerFn.FITTING:
            raise PlanError(problems)

    def drain(self) -> None:
        """Apply the gradients of all batches on their way; before validation, each checkpoint, and the end. Collective.

        The steps are optimizer steps like others (hooks, clipping), at the learning rate of the moment; `global_step`
        counts batches, so it stays.
        """
        if self.pipeline is None or not self.pipeline.in_flight:
            return

        def step(gradients: Callable[[], None]) -> None:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
                self._precision.optimizer_step(optimizer, self._module, gradients)
                optimizer.zero_grad()

        with torch.inference_mode(False), torch.enable_grad():  # Lightning's validation has switched them already
            self.pipeline.drain(step)

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _precision(self) -> Precision:
        assert isinstance(self.precision_plugin, Precision)
        return self.precision_plugin

    def process_dataloader(self, dataloader: object) -> object:
        """Give each loader the batches of this data rank."""
        if self.loaders is None:
            self.loaders = Loaders(self.plan, self.manager, self.mesh.data_rank)
        return self.loaders.process(dataloader, self._module.trainer)

    # -- steps -----------------------------------------------------------------------------------------------------
    def _contexts(self) -> AbstractContextManager[Any]:
        return together([context() for part in self.parts for context in part.contexts])

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch; without a device there is nothing to move, unless the user has a hook of their own for it."""
        if self.loaders is not None and self._module.trainer.training:
            self.loaders.tray.claim(batch)
        if self._nothing_to_move:
            return tree_map(lambda leaf: leaf, batch)  # a module may change what it is given, not what the loader keeps
        return super().batch_to_device(batch, device, dataloader_idx)

    def _cut(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a step with this rank's pieces of the batch, which is the first."""
        for part in self.parts:
            for cut in part.cuts:
                args = (cut(args[0]), *args[1:])
        return args

    def _run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a step method of the module so that hooks of its data-parallel wrap fire."""
        module = self._module
        if self.model is not None and (self.model is not module or lightning_private.has_forward_hooks(module)):
            return self._forward_redirection(self.model, module, method, *args, **kwargs)
        return getattr(module, method)(*args, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note the number of the batch (the module's `training_step` may not take it); give it its random numbers."""
        self._batch_index = batch_idx
        step = self._module.trainer.global_step
        self._seed(step, batch_idx % self.plan.batch.accumulation)
        if self.loaders is not None:
            self.loaders.tray.begin(batch_idx)
            if (masks := self.parts[0].masks) is not None:
                places = self.loaders.numbers(batch_idx)
                masks.begin(step, places[: batch_size(batch, len(places))])

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-step: the module's `training_step`, then the agreement of all ranks on its outcome."""
        args = self._cut(args)
        with self._precision.train_step_context(), self._contexts():
            assert self.window is not None
            if self.pipeline is not None:
                return self.pipeline.training_step(self.window, self._precision, *args, **kwargs)
            real = 1 if self.loaders is None else self.loaders.real(self._module.trainer, self._batch_index)
            with nullcontext() if real else untouched(self._module), self.window.recorder.recording() as entries:
                output = self._run("training_step", *args, **kwargs)
            stop = preemption.requested()
            if self._module.automatic_optimization:
                return self.window.close_micro_step(output, entries, args[0], real, stop)
            if any(getattr(part.reduction, "unreduced", False) for part in self.parts):
                raise RunFailedError(
                    "training_step called loss.backward(), so its gradients weren't averaged over the ranks; with "
                    "manual optimization call self.manual_backward(loss)."
                )
            return self.window.close_manual_step(output, entries, args[0], real, stop)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward of one micro-step; at the last one of a window divide by the true weight of the whole window."""
        module, precision = self._module, self._precision
        if not module.automatic_optimization:
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
            self._finish_reductions()
            return loss
        window = self.window
        assert window is not None
        weighed = closure_loss if self.pipeline is not None else window.weigh(closure_loss)
        loss = precision.pre_backward(weighed, module)
        if self.pipeline is not None:
            self.pipeline.merge_gradients()
        else:
            with window.guarded(loss), self._contexts():
                precision.backward(loss, module, optimizer, *args, **kwargs)
        if window.last and not (self.pipeline is not None and self.pipeline.delayed):
            self._finish_reductions(window.dropping and self.pipeline is None)
            if self.shared is not None:
                self.shared.add_up()
            window.normalise(dict.fromkeys(p for part in self.parts for p in part.parameters()))
        return precision.post_backward(loss, module)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and parameter as this rank holds it, between steps; `full_tensor()` of a DTensor is the whole.

        Collective where an engine of its own holds them in pieces: all ranks go through all of them.
        """
        yield from self._module.named_parameters()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and gradient of each parameter that has one, before an optimizer step; as `named_parameters`."""
        yield from ((name, p.grad) for name, p in self._module.named_parameters() if p.grad is not None)

    def _finish_reductions(self, dropped: bool = False) -> None:
        """Wait for the gradients' averages; stop before a step without them (P23), naming what had no gradient."""
        missing: list[str] = []
        for part in self.parts:
            if part.reduction is not None:
                missing += part.reduction.finish(dropped)
        model: Any = self.model
        wrapped = isinstance(model, DistributedDataParallel) and self._module.automatic_optimization
        if wrapped and not torch_private.reduction_finished(model):
            missing = [name for name, p in self._module.named_parameters() if p.requires_grad and p.grad is None]
            missing = missing or ["A parameter that was used before in this step"]
        if missing:
            raise RunFailedError(
                f"{', '.join(missing)} got no gradient on rank {self.global_rank}, so gradients weren't reduced; type "
                "strategy.find_unused_parameters=true, or freeze or remove what isn't used."
            )

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """All micro-steps of a window but the last: gradients stay on the rank."""
        assert self.window is not None
        with ExitStack() as stack:
            stack.enter_context(self.window.accumulating())
            model: Any = self.model
            if isinstance(model, DistributedDataParallel):
                stack.enter_context(model.no_sync())
            for part in self.parts:
                if part.reduction is not None:
                    stack.enter_context(part.reduction.no_sync())
            if self.pipeline is None and isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(False)
                stack.callback(model.set_requires_gradient_sync, True)
            yield

    def _clip(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        algorithm = str(self.plan.trainer.get("gradient_clip_algorithm", algorithm))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.grad_norm = clip_(
            parameters,
            self.mesh,
            value,
            norm_type=float("inf") if algorithm == "inf_norm" else 2.0,
            algorithm="value" if algorithm == "value" else "norm",
            holders=self.shared.holders if self.shared is not None else None,
        )

    def _evaluate(self, method: str, *args: Any, **kwargs: Any) -> Any:
        assert self.evaluation is not None
        args = self._cut(args)
        with self._precision.val_step_context(), self._contexts():
            run = self._evaluate_whole if self.pipeline is None else self.pipeline.evaluation_step
            return self.evaluation.step(run, method, self.loaders, *args, **kwargs)

    def _evaluate_whole(self, method: str, *args: Any, **kwargs: Any) -> list[Piece]:
        assert self.window is not None
        with self.window.recorder.recording() as entries:
            output = self._run(method, *args, **kwargs)
        return [(output, entries, args[0])]

    def before_evaluation_batch(self, batch_index: int, loader_index: int) -> None:
        """Note which batch of which loader comes."""
        assert self.evaluation is not None
        self.evaluation.at = (batch_index, loader_index)

    def finish_evaluation(self) -> None:
        """Make the metrics of an evaluation epoch global; collective."""
        assert self.evaluation is not None
        self.evaluation.finish()
        for part in self.parts:  # forwards without a backward leave parameters gathered
            for module in part.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `validation_step`; what it logs is counted once a sample over all ranks."""
        return self._evaluate("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `test_step`."""
        return self._evaluate("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `predict_step`."""
        if self.plan.mesh.cp > 1:
            raise UsageError("predict would return pieces of sequences under context parallelism: type cp=none.")
        with self._precision.predict_step_context(), self._contexts():
            return self._run("predict_step", *args, **kwargs)

    def model_to_device(self) -> None:
        """Nothing to do: `parallelize` puts each shard on its device."""

    # -- state -----------------------------------------------------------------------------------------------------
    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """State is loaded into the shards, so they have to exist."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """`StateKeeper` restores optimizers by parameter name."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's shards by global name."""
        assert self.state is not None
        if self.pipeline is not None and self.pipeline.in_flight:
            raise RunFailedError("Weights were asked for with batches on their way; use trainer.save_checkpoint.")
        return self.state.module_state()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this rank's shards of one optimizer's state by global name."""
        assert self.state is not None
        return self.state.optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint; collective."""
        assert self.state is not None
        self.state.save(checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint into the shards; collective. Returns what Lightning restores itself."""
        assert self.state is not None
        return self.state.load(checkpoint_path)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Take over what the module's `on_load_checkpoint` replaced; `load_checkpoint` filled the shards."""
        assert self.state is not None
        self.state.put_back(checkpoint)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Nothing to do: `load_checkpoint` filled the optimizers."""

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint; rank 0 does it."""
        assert self.state is not None
        self.state.remove(filepath)

    def teardown(self) -> None:
        """Undo what was put on the module's instance."""
        if self.window is not None:
            self.window.recorder.remove()
            for name in ("configure_optimizers", *REPLACED):
                self._module.__dict__.pop(name, None)
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
