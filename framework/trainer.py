"""`Trainer`: Lightning's Trainer, built from a plan."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from pluggy import PluginManager

from framework import objects, preemption
from framework.adapters import lightning_private
from framework.adapters.lightning_averaging import averages_of
from framework.checkpoint_files import folder_of
from framework.errors import PlanError, PreemptedError, Problem, UsageError
from framework.going_on import Metrics
from framework.ledger.writer import Ledger
from framework.plan import RunPlan
from framework.plugin_manager import manager_for
from framework.precision import Precision
from framework.progress import watch
from framework.quiet import quiet
from framework.schema import TrainerSettings
from framework.strategy import MeshStrategy

LOGGED = "logged"
"""Key of Lightning's checkpoint dict for what was logged."""


class MeshCallback(Callback):
    """The moments of a run at which the strategy has to act; first in the list, so that others see its results.

    Args:
        plan: of the run.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.metrics = Metrics()
        self.ledger = Ledger(plan)  # no callback of its own: Lightning would call a dozen empty hooks of it a step

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the ledger. Collective, as saving is."""
        self.ledger.sync()
        return {"chain": self.ledger.chain}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hold on to the chain of the run that saved."""
        self.ledger.chain = state_dict["chain"]

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Forget the chain, which `load_state_dict` gives back if the checkpoint has one; take the metrics."""
        self.ledger.chain = None
        self.metrics.load(checkpoint.get(LOGGED, {}))

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Add what was logged so far."""
        checkpoint[LOGGED] = self.metrics.state(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on with schedules and metrics where they were; begin to write the ledger."""
        self.metrics.resume(trainer)
        self.ledger.start(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make the epoch's values those of all of it; first of all callbacks."""
        self.metrics.end_epoch(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What other callbacks saved at the end is durable before `fit` returns; averages take their place."""
        strategy = strategy_of(trainer)
        if strategy.state is not None:
            strategy.state.wait()
        for average in strategy.averages:
            average.show(pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the ledger."""
        self.ledger.close()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log how many steps were skipped, once there is any; end with a validation, wherever in an epoch that is."""
        step = trainer.global_step
        done = step if pl_module.automatic_optimization else lightning_private.completed_steps(trainer)
        if done != self.ledger.step:
            self.ledger.batch_end(done)
        precision = trainer.precision_plugin
        if isinstance(precision, Precision) and precision.skipped_steps:
            pl_module.log("skipped_steps", float(precision.skipped_steps))
        if step == trainer.max_steps:
            trainer.should_stop = True  # upon which Lightning validates, and stops as it would anyway

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave weights to which every trained batch was applied."""
        strategy_of(trainer).drain()
        self.ledger.sync()

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Tell which batch comes."""
        strategy_of(trainer).before_evaluation_batch(batch_idx, dataloader_idx)

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Tell which batch comes."""
        strategy_of(trainer).before_evaluation_batch(batch_idx, dataloader_idx)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make validation metrics global before anybody reads them."""
        strategy_of(trainer).finish_evaluation()

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make test metrics global before anybody reads them."""
        strategy_of(trainer).finish_evaluation()


class NotProfiled(PassThroughProfiler):
    """Lightning's profiler that does nothing, without the generator that it makes for each of forty hooks a step."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Return a context that does nothing."""
        return _NOTHING


_NOTHING: AbstractContextManager[None] = nullcontext()


def strategy_of(trainer: pl.Trainer) -> MeshStrategy:
    """Return the trainer's strategy; TypeError if it isn't ours."""
    if not isinstance(trainer.strategy, MeshStrategy):
        raise TypeError(f"This needs framework.Trainer, not {type(trainer).__name__}.")
    return trainer.strategy


class Trainer(pl.Trainer):
    """Lightning's Trainer with everything chosen by a `RunPlan`.

    Any Lightning callback, logger and LightningModule works with it.

    Args:
        plan: the run, from `framework.compose` or `framework.testing.plan`.
        spawn: start the plan's ranks through Lightning's own spawn launcher (for tests in one Python process); False:
            this process already is one rank, as in `framework.worker` or under torchrun.
        callbacks: more Lightning callbacks, after those of the plan.
        logger: False = no logger, whatever the plan says.
        manager: the plan's components, where the process has them already; None = they are built here.
    """

    def __init__(
        self,
        plan: RunPlan,
        *,
        spawn: bool = False,
        callbacks: list[Callback] | None = None,
        logger: bool = True,
        manager: PluginManager | None = None,
    ) -> None:
        self.plan = plan
        check_settings(plan)
        quiet()
        manager = manager or manager_for(plan)
        hook = self._hook = manager.hook
        held = None if spawn else manager  # a manager doesn't pickle: spawned processes build their own
        strategy: Strategy = hook.make_strategy(plan=plan, manager=held, spawn=spawn) or MeshStrategy(plan, held, spawn)
        strategy.precision_plugin = hook.make_precision(plan=plan)
        settings = {key: value for key, value in plan.trainer.items() if value is not None}
        settings["accumulate_grad_batches"] = plan.batch.accumulation
        if settings.get("gradient_clip_algorithm") == "inf_norm":
            settings["gradient_clip_algorithm"] = "norm"  # Lightning knows two; `MeshStrategy` reads the plan's own
        if settings.get("gradient_clip_val") is None:
            settings.pop("gradient_clip_algorithm", None)
        made_callbacks: list[Callback] = [MeshCallback(plan)] if isinstance(strategy, MeshStrategy) else []
        made_callbacks += watch(plan)
        for more in hook.make_callbacks(plan=plan):
            made_callbacks += more
        made_callbacks += [objects.build(spec) for spec in (plan.components.get("callbacks") or {}).values()]
        loggers = [one for more in hook.make_loggers(plan=plan) for one in more]
        loggers += [objects.build(spec) for spec in (plan.components.get("logger") or {}).values()]
        super().__init__(
            accelerator=plan.accelerator,
            devices=plan.local_world_size,
            num_nodes=plan.num_nodes,
            strategy=strategy,
            callbacks=made_callbacks + (callbacks or []),
            logger=loggers if logger and loggers else False,
            profiler=NotProfiled(),
            default_root_dir=plan.run_dir,
            use_distributed_sampler=False,
            enable_checkpointing=any(is_checkpoint(callback) for callback in made_callbacks),
            enable_model_summary=False,
            **settings,
        )
        if isinstance(strategy, MeshStrategy):
            own_engine = type(strategy) is not MeshStrategy
            strategy.averages = averages_of(self.callbacks, plan, own_engine)  # type: ignore[attr-defined]
        lightning_private.leave_signals_alone(self)  # `framework.preemption` has its own way, which can't dead-lock

    def fit(  # type: ignore[override]
        self, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None, datamodule: Any = None,
        ckpt_path: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """As Lightning's; `ckpt_path` may be `last` or `auto`, of this run's folder, or another run's folder, too."""
        start = self._found(ckpt_path)
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, start, **kwargs)

    def validate(
        self, model: Any = None, dataloaders: Any = None, ckpt_path: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As Lightning's; `ckpt_path` as in `fit`."""
        return super().validate(model, dataloaders, self._found(ckpt_path), *args, **kwargs)

    def test(self, model: Any = None, dataloaders: Any = None, ckpt_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's; `ckpt_path` as in `fit`."""
        return super().test(model, dataloaders, self._found(ckpt_path), *args, **kwargs)

    def predict(  # type: ignore[override]
        self, model: Any = None, dataloaders: Any = None, datamodule: Any = None, return_predictions: Any = None,
        ckpt_path: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """As Lightning's; `ckpt_path` as in `fit`."""
        start = self._found(ckpt_path)
        return super().predict(model, dataloaders, datamodule, return_predictions, start, **kwargs)

    def _found(self, asked: Any) -> Any:
        """Return the checkpoint that is meant; Lightning asks its own callbacks alone, then trains from the start."""
        word = asked in ("last", "auto")
        if not asked or (not word and not folder_of(asked).is_dir()):
            return asked
        run_dir = self.plan.run_dir if word else str(Path(asked).resolve())
        newest = self._hook.newest_complete(plan=self.plan.with_(run_dir=run_dir))
        if newest is not None:
            return newest.path
        if asked == "auto":
            return None
        if word and any(isinstance(callback, ModelCheckpoint) for callback in self.checkpoint_callbacks):
            return asked
        raise UsageError(f"ckpt_path={asked}: there is no complete checkpoint in {run_dir}; type ckpt_path='auto'.")

    def __getstate__(self) -> dict[str, Any]:
        """What spawned ranks get: hooks don't pickle, and where to start from is known by then."""
        return {**self.__dict__, "_hook": None}

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As Lightning's; a delayed pipeline is drained first, so that a resumed run is the run that went on."""
        if isinstance(self.strategy, MeshStrategy):
            if self.strategy.roll_call is not None:
                self.strategy.roll_call.call("trainer.save_checkpoint")
            self.strategy.drain()
        with ExitStack() as stack:
            for average in getattr(self.strategy, "averages", ()):
                stack.enter_context(average.aside(self.lightning_module))
            super().save_checkpoint(*args, **kwargs)
        if isinstance(self.strategy, MeshStrategy) and self.strategy.state is not None and not self.training:
            self.strategy.state.wait()  # nobody will ask later


def check_settings(plan: RunPlan) -> None:
    """Refuse arguments that Lightning takes and ignores beside a strategy of our own, such as `sync_batchnorm`."""
    known = {field.name for field in fields(TrainerSettings)}
    reason = "Lightning's Trainer would take it and it would do nothing, or undo what the plan says"
    problems = [Problem(f"trainer.{name}={value}", reason) for name, value in plan.trainer.items() if name not in known]
    if problems:
        raise PlanError(problems)


def is_checkpoint(callback: Any) -> bool:
    """Whether Lightning counts a callback as a checkpoint callback."""
    from lightning.pytorch.callbacks import Checkpoint

    return isinstance(callback, Checkpoint)


def build_model(plan: RunPlan) -> pl.LightningModule:
    """Build the plan's LightningModule.

    A class with a method `init_weights` is built on the meta device and later materialised shard by shard; any other is
    built for real, under the plan's seed, so that all ranks hold equal weights.
    """
    spec = plan.components["model"]
    pl.seed_everything(plan.seed, workers=True, verbose=False)
    if hasattr(objects.locate(spec["_target_"]), "init_weights"):
        with torch.device("meta"):
            return as_module(objects.build(spec), spec)
    return as_module(objects.build(spec), spec)


def as_module(built: Any, spec: Any) -> pl.LightningModule:
    """Return `built`; UsageError if it isn't a LightningModule."""
    if not isinstance(built, pl.LightningModule):
        raise UsageError(f"model._target_={spec['_target_']} is no LightningModule; derive it from lightning's.")
    return built


def run(plan: RunPlan, manager: PluginManager) -> dict[str, Any]:
    """Run the plan's command as one of its ranks; called by `framework.worker`.

    Returns:
        The metrics at the end, plain numbers.

    Raises:
        PreemptedError: all ranks saved and stopped because one was asked to.
    """
    trainer = Trainer(plan, manager=manager)
    model = build_model(plan)
    data = objects.build(plan.components["data"])
    if plan.command == "validate":
        trainer.validate(model, datamodule=data, ckpt_path=plan.ckpt_path, verbose=False)
    else:
        trainer.fit(model, datamodule=data, ckpt_path=plan.ckpt_path)
    if preemption.agreed():
        raise PreemptedError(f"All ranks stopped at step {trainer.global_step}, because one was asked to.")
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
