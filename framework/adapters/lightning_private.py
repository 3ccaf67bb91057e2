"""Private names of Lightning, each with the reason; `tests/contract/test_private_apis.py` notices when one moves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from framework.leaving import leave
from framework.process_groups import lasting_port

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment

    from framework.strategy import MeshStrategy


def forward_redirection() -> Any:
    """Return Lightning's way of calling a step method through a wrapper's `forward`, so that its hooks fire."""
    return _ForwardRedirection()


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """Whether calling the module does more than its `forward` (FSDP2 acts through such hooks). Private to torch."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def set_rank_zero(rank: int) -> None:
    """Tell Lightning's `rank_zero_only` functions which rank this is; strategies are expected to."""
    for function in (rank_zero_only, fabric_rank_zero_only):
        setattr(function, "rank", rank)  # noqa: B010 - an attribute that its type doesn't know


def init_process_group(environment: ClusterEnvironment, backend: str, timeout_s: float) -> None:
    """Connect processes that Lightning's own launcher started; Lightning has no public function for it."""
    _init_dist_connection(environment, backend, timeout=timedelta(seconds=timeout_s))


class SpawnLauncher(_MultiProcessingLauncher):
    """Lightning's spawn launcher, which takes the module's local state dict for the whole: gather it instead.

    It also lets the system choose a port, which whoever connects somewhere may get in the seconds until rank 0 has
    imported everything and listens; here it is one that the system gives to nobody. The variable is put back.
    """

    def launch(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Start the ranks; see Lightning's."""
        given = os.environ.get("MASTER_PORT")
        os.environ["MASTER_PORT"] = given or str(lasting_port())
        try:
            return super().launch(function, *args, **kwargs)
        finally:
            if given is None:
                os.environ.pop("MASTER_PORT", None)

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        super()._wrapping_function(*args, **kwargs)
        if dist.is_initialized():  # a process that leaves while gloo's threads still run may abort
            dist.destroy_process_group()
        leave(0)

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        from framework.state import full_state_dict  # it needs this package

        module: LightningModule = trainer.lightning_module
        state = full_state_dict(module)  # collective
        module.state_dict = lambda: state  # type: ignore[method-assign, assignment]
        trainer.strategy.checkpoint_io = _TorchFile()
        return super()._collect_rank_zero_results(trainer, results)

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        trainer.strategy.checkpoint_io = _TorchFile()
        super()._recover_results_in_main_process(worker_output, trainer)


def spawn_launcher(strategy: MeshStrategy) -> Any:
    """Return a launcher that starts the ranks with multiprocessing's `spawn`, as `strategy="ddp_spawn"` does."""
    return SpawnLauncher(strategy, start_method="spawn")


class _TorchFile:
    """Carries the final weights from rank 0 to the main process through a temporary file, loaded without code."""

    def save_checkpoint(self, checkpoint: dict[str, Tensor], path: str) -> None:
        torch.save(checkpoint, path)

    def load_checkpoint(self, path: str) -> dict[str, Tensor]:
        loaded: dict[str, Tensor] = torch.load(path, weights_only=True)
        return loaded

    def remove_checkpoint(self, path: str) -> None:
        import os

        os.remove(path)


def finished_epochs(trainer: Any) -> int:
    """Return how many training epochs are done: the number that Lightning gives to `set_epoch`."""
    return int(trainer.fit_loop.epoch_progress.current.processed)


def begun_batches(trainer: Any) -> int:
    """Return how many training batches of the run were begun; may be asked from any thread."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def resume_from(trainer: Any, path: str) -> None:
    """Tell a trainer that is loading a checkpoint that it is another one; its public setter is for users, and warns."""
    trainer._checkpoint_connector._ckpt_path = path


def completed_steps(trainer: Any) -> int:
    """Return how many optimizer steps of the run are done; under manual optimization how many batches."""
    module = trainer.lightning_module
    if module is not None and not module.automatic_optimization:
        return int(trainer.fit_loop.epoch_loop.batch_progress.total.processed)
    return int(trainer.global_step)


def move_to_batch(trainer: Any, saved: int, now: int, length: int | None) -> None:
    """Tell a restored training epoch that it goes on after `now` batches instead of `saved`.

    Lightning counts batches of a rank, and another mix has others. A checkpoint from the middle of an accumulation
    window also counts the batches of that window, which is trained anew. Lightning's counters run ready, started,
    processed, completed; a checkpoint made in a callback of the last batch has the last one of them still to come.

    Args:
        trainer: whose loops were restored from a checkpoint.
        saved: batches before the position, as the run that saved counted them.
        now: the same as this run counts them.
        length: batches of the epoch in this run; None = not known.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    current, total = progress.current, progress.total
    at_end_of_window = current.ready == saved
    if at_end_of_window and saved == now:
        return
    earlier_epochs = total.ready - current.ready
    ready = current.ready
    for counter in ("ready", "started", "processed", "completed"):
        behind = ready - getattr(current, counter) if at_end_of_window else 0
        setattr(current, counter, now - behind)
        setattr(total, counter, earlier_epochs + now - behind)
    progress.is_last_batch = length is not None and now >= length


def expect_batches(trainer: Any, length: int) -> None:
    """Tell Lightning how many batches the training epoch that begins has, those before its position included.

    It asks once a run, and an epoch that was begun under another global batch has fewer than the others. To be called
    when the epoch's iterator is made.
    """
    loop = trainer.fit_loop
    loader = loop._combined_loader
    if loader is None:
        return
    loop.max_batches = min([length, *(limit for limit in loader.limits or () if limit is not None)])
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_interval <= 1.0:
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))


def count_batches(trainer: Any) -> None:
    """Under manual optimization, have `global_step` count batches in which an optimizer stepped, not calls (P24).

    Lightning counts every call of every optimizer, so with two of them `max_steps`, checkpoints and logs come twice as
    early. The calls stay available as `trainer.strategy.optimizer_calls`.
    """
    loop = trainer.fit_loop.epoch_loop.manual_optimization
    profiler, progress, end = trainer.profiler, loop.optim_step_progress, loop.on_run_end
    calls = [0]

    def after() -> None:
        profiler.stop("optimizer_step")
        calls[0] += 1

    def on_run_end() -> Any:
        if calls[0]:
            progress.increment_ready()
            progress.increment_completed()
            trainer.strategy.optimizer_calls += calls[0]
            calls[0] = 0
        return end()

    loop._on_before_step = lambda: profiler.start("optimizer_step")
    loop._on_after_step = after
    loop.on_run_end = on_run_end


def goes_on_within_an_epoch(trainer: Any) -> bool:
    """Return whether a fit that begins was restored from a checkpoint of the middle of an epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return bool(trainer.ckpt_path and progress.current.ready and not progress.is_last_batch)


def at_last_batch(trainer: Any) -> bool:
    """Return whether the batch that is trained (or was trained last) is the last of its epoch."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def has_wrapped(strategy: Any, optimizers: Sequence[Any]) -> bool:
    """Return whether just these optimizers are in Lightning's wrappers; not after a fit, nor in a copy."""
    return [id(wrapper.optimizer) for wrapper in strategy._lightning_optimizers] == [*map(id, optimizers)]


class _NoSignals:
    """Stands in for Lightning's signal connector, whose SIGTERM handler enters a collective on one rank alone."""

    received_sigterm = False

    def register_signal_handlers(self) -> None:
        """Leave the handlers as they are."""

    def teardown(self) -> None:
        """Nothing was changed."""


def leave_signals_alone(trainer: Any) -> None:
    """Keep Lightning from installing signal handlers for this trainer; it has no switch for that.

    Without them nothing sets the flag that Lightning (2.6.6) broadcasts from rank 0 before each batch, micro-batches of
    an accumulation too: a collective and a host sync, which make the stages of a pipeline wait for one another.
    """
    trainer._signal_connector = _NoSignals()
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing


def _nothing() -> None:
    """Stands in for a method whose work is done elsewhere."""


def resume_cleanly(trainer: Any) -> None:
    """Make the restore of the training loop, which is to come, right for a checkpoint of any moment.

    Lightning restores the counters as they were in the callback that saved, and guesses the moment from them. At the
    ends of epochs and of training it guesses wrong: `on_train_epoch_start` isn't called, a second resume trains an
    epoch too many, batches are counted on into the next epoch (seen with 2.6.6).
    """
    loop = trainer.fit_loop
    original = loop.load_state_dict

    def load_state_dict(*args: Any, **kwargs: Any) -> None:
        del loop.load_state_dict
        original(*args, **kwargs)
        _settle(loop)
        # made before the restore by who asked for `estimated_stepping_batches`: Lightning wouldn't restore its position
        loop._combined_loader = None

    loop.load_state_dict = load_state_dict


def _settle(loop: Any) -> None:
    """Bring restored counters (ready, started, processed, completed) into a state that Lightning understands."""
    epochs, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
    current, total = batches.current, batches.total
    begun = epochs.total.started
    if current.ready == 0 or current.processed != current.ready:
        return  # nothing was trained, or the checkpoint was made within a batch
    ended = epochs.total.processed == begun  # hooks of the epoch's end have run
    if batches.is_last_batch:  # the epoch is over, whether or not its last hooks have run: begin the next one
        for counter in ("ready", "started", "processed", "completed"):
            setattr(epochs.current, counter, begun)
            setattr(epochs.total, counter, begun)
        total.completed = total.ready
        loop.epoch_loop._batches_that_stepped += 0 if ended else 1
        # not the loop's own setter, which says True whenever `max_steps` is set
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
    elif ended:  # training ended within the epoch: as it was in the callback of the last batch
        for progress in (epochs.current, epochs.total):
            progress.processed = progress.completed = begun - 1
        for progress in (current, total):
            progress.completed = progress.ready - 1
        loop.epoch_loop._batches_that_stepped -= 1
        loop.restarting = True


def evaluation_loaders(trainer: Any) -> tuple[list[Any], bool]:
    """Return the loaders of the running evaluation, and whether they are read one after the other.

    The public `val_dataloaders` are those of the last fit, also in a `validate` after it.
    """
    combined = trainer._evaluation_loop._combined_loader
    return combined.flattened, combined._mode == "sequential"


Sums = dict[str, list[float]]
"""Key of a logged value -> its sum (or extreme) over the epoch so far, the weight of that sum, and -1, 0 or 1 for the
least, a sum, or the largest."""


def epoch_sums(trainer: Any) -> tuple[Sums, list[str]]:
    """Return what the values logged with `on_epoch` have come to in this epoch, and the names of torchmetrics.

    Lightning's checkpoints leave them out, so the values of a resumed epoch are those of its rest (2.6.6).
    """
    sums: Sums = {}
    others = []
    for key, result in trainer.fit_loop.epoch_loop._results.items():
        if result.has_reset or not result.meta.on_epoch:
            continue
        if not result.is_tensor:
            others.append(result.meta.name)
            continue
        meta = result.meta
        weight = float(result.cumulated_batch_size) if meta.is_mean_reduction else 0.0
        sums[key] = [float(result.value), weight, float(meta.is_max_reduction) - float(meta.is_min_reduction)]
    return sums, others


def joined(sums: Sums, more: Sums) -> Sums:
    """Return the sums over two parts of an epoch."""
    both = dict(sums)
    for key, (value, weight, side) in more.items():
        if key not in both:
            both[key] = [value, weight, side]
            continue
        here, own, _ = both[key]
        both[key] = [
            here + value if side == 0 else max(here, value) if side > 0 else min(here, value),
            own + weight,
            side,
        ]
    return both


def add_epoch_sums(trainer: Any, sums: Sums) -> None:
    """Add the sums of an earlier part of the epoch to what was logged in this one."""
    own, _ = epoch_sums(trainer)
    for key, (value, weight, _) in joined(own, sums).items():
        if key in own and key in sums:
            result = trainer.fit_loop.epoch_loop._results[key]
            result.value = torch.full_like(result.value, value)
            if result.meta.is_mean_reduction:
                result.cumulated_batch_size = torch.full_like(result.cumulated_batch_size, weight)
            result._computed = None


def give_metrics(trainer: Any, values: dict[str, float]) -> None:
    """Give `callback_metrics` values of before: schedules and callbacks may watch one that isn't logged each step."""
    device = trainer.strategy.root_device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    given = {name: torch.tensor(value, dtype=dtype, device=device) for name, value in values.items()}
    trainer._logger_connector._callback_metrics.update(given)


def before_plateaus(trainer: Any) -> bool:
    """Whether a step is done, but for the schedules that watch a metric, which come after `on_train_batch_end`."""
    loop = trainer.fit_loop.epoch_loop
    current = loop.batch_progress.current
    return bool(current.completed < current.processed == current.ready) and not loop._should_accumulate()


def update_plateaus(trainer: Any) -> None:
    """Ask them now."""
    trainer.fit_loop.epoch_loop._update_learning_rates(interval="step", update_plateau_schedulers=True)


def resumed_epoch_ends(trainer: Any) -> None:
    """Have schedules that watch a metric be asked at the end of a resumed epoch as at that of any other.

    Lightning (2.6.6) leaves them out for as long as its loop is restarting, for want of the metrics; under `max_steps`
    that is until training ends.
    """
    trainer.fit_loop._restarting = False


def loader_source(trainer: Any) -> Any:
    """Return the training (in an evaluation its own) loaders as the user made them, before the run sets its data up."""
    loop = trainer.fit_loop if trainer.state.fn == "fit" else trainer._evaluation_loop
    return loop._data_source.dataloader()


def moved(trainer: Any, module: LightningModule, batch: Any, device: torch.device) -> Any:
    """Return a batch as a step method gets it: in the run's precision, after the hooks around the transfer."""
    converted = trainer.precision_plugin.convert_input(batch)
    return module._apply_batch_transfer_handler(converted, device=device, dataloader_idx=0)
