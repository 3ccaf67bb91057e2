"""Every hook, in the order in which a run calls them.

The verb tells how a hook is called:

* `make_*`: builds one thing. The first result that isn't None wins; None means "not mine".
* `apply_*`: changes the model in place. All implementations are called.
* `on_*`: a notification. All implementations are called.
* a noun: data. The core merges all results; a conflict is an error that names both plugins.

The whole run::

    launcher process                                   worker process (one a rank)
    ----------------                                   ---------------------------
    config_roots, config_groups, commands              on_worker_start
    (Hydra composes)                                   make_precision, make_checkpoint_io, make_strategy
    mesh_axes -> mesh                                  make_loggers, make_callbacks
    requirements, check_plan, check_model              Trainer.fit:
    plan_notes, split_dims, process_env                    make_stages                     (model on the meta device)
    make_launcher, make_restart_policy, fetch_checkpoint   each stage:
    start workers ------------------------------------>        apply_tensor_parallel
    on_worker_failure <---------------- a rank died            apply_expert_parallel
    newest_complete, start again                               apply_context_parallel
    on_run_end                                                 apply_activation_checkpointing
                                                               apply_compile
                                                               apply_data_parallel
                                                           materialise, initialise
                                                           make_optimizer, load checkpoint
                                                           make_schedule
                                                           each loader: make_sampler | shard_iterable
                                                           steps ... on_checkpoint_saved
                                                       on_run_end

pluggy decides at build time only. Nothing here is called inside a step: for that there are Lightning callbacks.
An implementation may take any subset of the arguments, so adding one is compatible; renaming or removing is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from framework.plan import Checkpoint, Failure, Requirements, RunPlan

if TYPE_CHECKING:
    from framework.errors import Problem

PROJECT = "framework"
API_VERSION = 1
"""Raised when a hook is renamed, removed or changes meaning; a package plugin may state `REQUIRES_API = n`."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


def takes_words(command: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
    """Decorate the function of a command that reads its words itself; see `PackageSpecs.commands`."""
    command.__dict__["takes_words"] = True
    return command


class PackageSpecs:
    """Hooks of a package plugin: a module behind an entry point of group `framework.plugins`; it imports no torch."""

    @hookspec
    def config_roots(self) -> Sequence[str]:
        """Folders of YAML options, as `pkg://their_package.conf`."""
        raise AssertionError("a specification")

    @hookspec
    def config_groups(self) -> Mapping[str, str]:
        """Concerns that the package adds: slot name -> one line of help. They become slots like the core's."""
        raise AssertionError("a specification")

    @hookspec
    def add_hookspecs(self, manager: pluggy.PluginManager) -> None:
        """Add hook specifications for a concern of the package's own."""

    @hookspec
    def commands(self) -> Mapping[str, str]:
        """Commands that the package adds: name -> `module:function`, called with the composed `RunPlan`.

        A function under `takes_words` is called with the words after the name instead; nothing is composed.
        """
        raise AssertionError("a specification")


class PlanSpecs:
    """Hooks of component plugins in the launcher, before any process is started."""

    @hookspec
    def mesh_axes(self) -> Mapping[str, int | None]:
        """Axes that the option uses: name -> size. None = what `devices` leaves (2 with `devices=auto` on CPU)."""
        raise AssertionError("a specification")

    @hookspec
    def requirements(self) -> Requirements:
        """What the option needs, gives and excludes: data, from which the nearest legal mixes are found too."""
        raise AssertionError("a specification")

    @hookspec
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """All complaints about this plan that need no model."""
        raise AssertionError("a specification")

    @hookspec
    def check_model(self, plan: RunPlan, model: Any) -> Sequence[Problem]:
        """All complaints about the LightningModule `model` (parameters on the meta device where it allows that)."""
        raise AssertionError("a specification")

    @hookspec
    def plan_notes(self, plan: RunPlan) -> Sequence[str]:
        """Lines for the start screen, of a legal plan, that only the option knows (a schedule's bubble, say)."""
        raise AssertionError("a specification")

    @hookspec
    def split_dims(self, plan: RunPlan, model: Any) -> Mapping[str, int]:
        """Which dim of which parameter the option will cut over axis `tp`: global name -> dim; others stay whole.

        Asked for the start screen's bytes a rank; `model` may lie on the meta device and must not be changed.
        """
        raise AssertionError("a specification")

    @hookspec
    def process_env(self, plan: RunPlan) -> Mapping[str, str]:
        """Environment variables for the workers. A variable that the user exported wins, and that is logged."""
        raise AssertionError("a specification")


class LaunchSpecs:
    """Hooks around the life of the worker processes, called in the launcher process."""

    @hookspec(firstresult=True)
    def make_launcher(self, plan: RunPlan) -> Any:
        """Return a `framework.launch.Launcher`."""

    @hookspec(firstresult=True)
    def make_restart_policy(self, plan: RunPlan) -> Any:
        """Return a `framework.launch.RestartPolicy`; None = no restart."""

    @hookspec
    def on_worker_failure(self, plan: RunPlan, failure: Failure, attempt: int) -> None:
        """A worker of attempt `attempt` (from 0) died; the others were ended."""

    @hookspec(firstresult=True)
    def newest_complete(self, plan: RunPlan) -> Checkpoint | None:
        """Return the newest complete checkpoint of this run (not of the user's `ckpt_path`), or None."""

    @hookspec(firstresult=True)
    def fetch_checkpoint(self, plan: RunPlan, url: str) -> Checkpoint | None:
        """Bring what `ckpt_path=url` means (`://` is in it) where it can be read; None = not mine."""

    @hookspec
    def on_run_end(self, plan: RunPlan, error: BaseException | None) -> None:
        """Always called last: in the launcher, and in each worker that could still run code."""


class BuildSpecs:
    """Hooks in a worker, while the Trainer is built."""

    @hookspec
    def on_worker_start(self, plan: RunPlan, rank: int) -> None:
        """First of all in a worker, before the process group and the Trainer; `rank` is the global rank."""

    @hookspec(firstresult=True)
    def make_precision(self, plan: RunPlan) -> Any:
        """Return a `framework.precision.Precision`."""

    @hookspec(firstresult=True)
    def make_checkpoint_io(self, plan: RunPlan) -> Any:
        """Return a `framework.checkpoint.CheckpointStore`."""

    @hookspec(firstresult=True)
    def make_strategy(self, plan: RunPlan, manager: pluggy.PluginManager | None, spawn: bool) -> Any:
        """Return a Lightning Strategy of one's own; only for engines that own optimizer and backward.

        `manager` and `spawn` are for a subclass of `framework.strategy.MeshStrategy`, as its arguments.
        """

    @hookspec
    def make_loggers(self, plan: RunPlan) -> Sequence[Any]:
        """Lightning loggers to add."""
        raise AssertionError("a specification")

    @hookspec
    def make_callbacks(self, plan: RunPlan) -> Sequence[Any]:
        """Lightning callbacks to add: the way to act at each step."""
        raise AssertionError("a specification")


class ModelSpecs:
    """Hooks in a worker, in `Trainer.fit`: model surgery in this order, then optimizer, schedule and loaders."""

    @hookspec(firstresult=True)
    def make_stages(self, module: Any, mesh: Any, plan: RunPlan) -> Any:
        """Cut the LightningModule; return this rank's `framework.parts.ModelPart`s, first to last. None = uncut."""

    @hookspec
    def apply_tensor_parallel(self, part: Any, mesh: Any, plan: RunPlan) -> None:
        """Split layers of the `ModelPart` over axis `tp`."""

    @hookspec
    def apply_expert_parallel(self, part: Any, mesh: Any, plan: RunPlan) -> None:
        """Spread experts of the `ModelPart` over axis `ep`."""

    @hookspec
    def apply_context_parallel(self, part: Any, mesh: Any, plan: RunPlan) -> None:
        """Split sequences over axis `cp`."""

    @hookspec
    def apply_activation_checkpointing(self, part: Any, mesh: Any, plan: RunPlan) -> None:
        """Recompute activations of `part.blocks` in backward. Parameter names must not change."""

    @hookspec
    def apply_compile(self, part: Any, mesh: Any, plan: RunPlan) -> None:
        """Compile `part.blocks`."""

    @hookspec
    def apply_data_parallel(self, part: Any, mesh: Any, plan: RunPlan) -> None:
        """Replicate or shard the `ModelPart` over the data axes; last, so that it sees the final parameters."""

    @hookspec(firstresult=True)
    def make_schedule(self, parts: Any, mesh: Any, plan: RunPlan) -> Any:
        """Return a `framework.pipeline.Pipeline`, which runs a batch through all stages; None = no pipeline."""

    @hookspec(firstresult=True)
    def make_optimizer(self, module: Any, plan: RunPlan) -> Any:
        """Return what `configure_optimizers` may return, over the parameters of this rank; None = the module's own."""

    @hookspec(firstresult=True)
    def make_sampler(
        self,
        dataset: Any,
        plan: RunPlan,
        data_rank: int,
        shuffle: bool,
        train: bool,
        batch_size: int,
        balanced: bool,
        order: Callable[[int], Sequence[int]] | None,
    ) -> Any:
        """Return a `framework.data.BatchPlan` for a map-style dataset: a batch sampler with an exact position.

        `shuffle` is what the user's loader asks for, `order` (epoch -> indices) that of a sampler of the user's own.
        `balanced`: all data ranks need the same number of batches, since their forwards wait for one another.
        """

    @hookspec(firstresult=True)
    def shard_iterable(self, dataset: Any, plan: RunPlan, data_rank: int, train: bool) -> Any:
        """Return an iterable dataset that yields only the samples of `data_rank`; None = all, where there is one.

        With an attribute `whole_steps` that is true, training leaves out what doesn't fill an optimizer step.
        Samples are pairs of their number in the stream and the sample, to be passed on as they are: take them by
        iterating over `dataset`.
        """

    @hookspec
    def on_checkpoint_saved(self, path: str, step: int) -> None:
        """A checkpoint is complete; called on global rank 0.

        At once where the save is waited for; else at the next save, or at the end. For those in memory too.
        """


SPECS = (PackageSpecs, PlanSpecs, LaunchSpecs, BuildSpecs, ModelSpecs)

Hook = Callable[..., Any]
