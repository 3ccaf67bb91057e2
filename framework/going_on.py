"""What Lightning forgets of a run that is stopped within an epoch: logged metrics, and parameters frozen or thawed.

`Metrics` holds on to the values that schedules and callbacks watch and to the sums of the epoch's means, `Trained` to
which parameters are trained and by which optimizer, as far as that was changed since the run began.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.optim import Optimizer

from framework.adapters import lightning_private
from framework.agreement import ranks
from framework.state import parameter_names

log = logging.getLogger(__name__)


class Metrics:
    """Of one trainer: what was logged so far, into a checkpoint and back."""

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] = {}
        self._sums: lightning_private.Sums = {}
        """Of the epoch's values, from the part of it that was trained before."""
        self._ended: tuple[int, lightning_private.Sums] = (-1, {})
        """The step at which an epoch, or training within one, ended, and its sums: Lightning has cleared them."""

    def state(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        sums, others = lightning_private.epoch_sums(trainer)
        step, ended = self._ended
        return {
            "last": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "sums": ended if step == trainer.global_step else lightning_private.joined(sums, self._sums),
            "others": others,
            "pending": lightning_private.before_plateaus(trainer),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Hold on to what `state` returned."""
        self._loaded = saved

    def resume(self, trainer: pl.Trainer) -> None:
        """When training starts: give back the values, and do what was still to be done for the step that was saved."""
        saved, self._loaded = self._loaded, {}
        self._sums, self._ended = {}, (-1, {})
        if not saved:
            return
        lightning_private.give_metrics(trainer, saved["last"])
        if lightning_private.at_last_batch(trainer):
            return  # the next epoch begins
        self._sums = saved["sums"]
        if saved["others"] and ranks()[0] == 0:
            log.warning(
                "This epoch's %s will be of its rest alone, as checkpoints don't hold the states of torchmetrics.",
                ", ".join(saved["others"]),
            )
        if saved["pending"]:
            lightning_private.update_plateaus(trainer)

    def end_epoch(self, trainer: pl.Trainer) -> None:
        """Before anybody asks for the epoch's values: make them those of the whole epoch."""
        lightning_private.add_epoch_sums(trainer, self._sums)
        self._sums = {}
        self._ended = trainer.global_step, lightning_private.epoch_sums(trainer)[0]
        lightning_private.resumed_epoch_ends(trainer)


Changes = dict[str, Any]
"""`requires_grad`: parameter name -> what it is now; `added`: for each optimizer the names it was given."""


class Trained:
    """Which parameters are trained, by which optimizer: what was changed since the run began, and that again.

    Args:
        module: of the run, when it has its final layout.
        optimizers: of the run.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._module = module
        self._optimizers = list(optimizers)
        self._flags = self._now()
        self._held = [self._names(optimizer) for optimizer in self._optimizers]
        self._groups = [len(optimizer.param_groups) for optimizer in self._optimizers]

    def _now(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for parameter, name in parameter_names(self._module).items()}

    def _names(self, optimizer: Optimizer) -> list[str]:
        names = parameter_names(self._module)
        return [names[p] for group in optimizer.param_groups for p in group["params"] if p in names]

    def changes(self) -> Changes:
        """Return what was changed on this rank."""
        now = self._now()
        flags = {name: flag for name, flag in now.items() if flag != self._flags.get(name, flag)}
        pairs = zip(self._optimizers, self._held, strict=True)
        return {
            "requires_grad": flags,
            "added": [[name for name in self._names(optimizer) if name not in held] for optimizer, held in pairs],
        }

    def again(self, saved: Changes, groups: Sequence[Sequence[Sequence[str]]]) -> None:
        """Change what the run that saved had changed.

        Args:
            saved: its changes.
            groups: parameter names of each group of each optimizer that was saved.
        """
        for optimizer, count in zip(self._optimizers, self._groups, strict=True):
            del optimizer.param_groups[count:]  # of a checkpoint that turned out to be damaged
        by_name = {name: parameter for parameter, name in parameter_names(self._module).items()}
        for name, parameter in by_name.items():
            parameter.requires_grad_(saved["requires_grad"].get(name, self._flags[name]))
        for optimizer, added, theirs in zip(self._optimizers, saved["added"], groups, strict=False):
            here = set(self._names(optimizer))
            for names in theirs:
                given = [by_name[name] for name in names if name in added and name in by_name and name not in here]
                given = [parameter for parameter in given if not parameter.is_meta]  # another stage's
                if given:
                    optimizer.add_param_group({"params": given})
        told = sorted({*saved["requires_grad"], *(name for added in saved["added"] for name in added)})
        if told and ranks()[0] == 0:
            log.warning("Frozen, trained or given to an optimizer as when it was saved: %s", ", ".join(told))


def merged(everyone: Sequence[Changes]) -> Changes:
    """Join the changes of all ranks: stages hold different parameters."""
    optimizers = max((len(changes["added"]) for changes in everyone), default=0)
    return {
        "requires_grad": {name: flag for changes in everyone for name, flag in changes["requires_grad"].items()},
        "added": [
            sorted({name for changes in everyone for names in changes["added"][number : number + 1] for name in names})
            for number in range(optimizers)
        ],
    }
