"""`Evaluation`: what `validation_step` and `test_step` log, counted once a sample over all ranks (P11)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule

from framework.adapters import lightning_private
from framework.errors import UsageError
from framework.metric_objects import untouched
from framework.metrics import Entry, Layout, Recorder, Totals, add_up
from framework.window import read_output

if TYPE_CHECKING:
    from framework.data import Loaders

Piece = tuple[Any, Mapping[str, Entry], Any]
"""Output, logged entries and batch of one forward."""


class Evaluation:
    """Collects the logged values of one evaluation and replays them, reduced, at its end.

    Args:
        module: being evaluated.
        recorder: catches its `self.log`.
        contributes: whether this rank's values count.
        device: of the reductions.
        pieces: whether a rank has pieces of sequences, so that only the module knows how many of its tokens count.
    """

    def __init__(
        self,
        module: LightningModule,
        recorder: Recorder,
        contributes: bool,
        device: torch.device,
        pieces: bool = False,
    ) -> None:
        self.module = module
        self.recorder = recorder
        self.contributes = contributes
        self.device = device
        self.pieces = pieces
        self.totals = Totals()
        self.at = (0, 0)
        """Number of the running batch and of its loader; set before each step, since step methods may not take them."""

    def step(
        self,
        run: Callable[..., Sequence[Piece]],
        method: str,
        loaders: Loaders | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run one batch; a filler batch (another rank still had samples) runs for its collectives but doesn't count."""
        batch_index, loader_index = self.at
        real = 1 if loaders is None else loaders.real(self.module.trainer, batch_index, loader_index)
        with nullcontext() if real else untouched(self.module):
            pieces = run(method, *args, **kwargs)
        for output, entries, batch in pieces:
            if real and self.contributes:
                _, weight, weighted = read_output(output if isinstance(output, Mapping) else None, batch, real)
                if self.pieces and not weighted:
                    self._check_means(method, entries)
                named = {self._name(name, entry, loader_index): entry for name, entry in entries.items()}
                self.totals.add(named, weight)
        outputs = [output for output, _, _ in pieces]
        return outputs[0] if len(outputs) == 1 else outputs or None

    @staticmethod
    def _check_means(method: str, entries: Mapping[str, Entry]) -> None:
        means = [name for name, entry in entries.items() if entry.reduction == "mean" and entry.batch_size is None]
        if means:
            raise UsageError(
                f"{method} logged the mean {means[0]} without its weight, and ranks of cp have different numbers of "
                'tokens that count: return {"weight": tokens}, or log with batch_size=tokens.'
            )

    def _name(self, name: str, entry: Entry, loader_index: int) -> str:
        """Name as Lightning would make it where there are several loaders."""
        loaders, sequential = lightning_private.evaluation_loaders(self.module.trainer)
        if sequential and len(loaders) > 1 and entry.options.get("add_dataloader_idx", True):
            return f"{name}/dataloader_idx_{loader_index}"
        return name

    def finish(self) -> None:
        """Reduce and replay; collective, called once at the end of each evaluation epoch."""
        self.totals.settle()
        layout = Layout()
        layout.agree(self.totals, self.contributes)
        if layout.options:
            payload = add_up(layout.pack(self.totals), self.device)
            for name, value, weight, options in layout.unpack(payload, self.totals, self.device):
                kept = {key: value for key, value in options.items() if key in ("prog_bar", "logger", "reduce_fx")}
                kept["add_dataloader_idx"] = False  # the name has it
                self.recorder.replay(name, value, kept, weight)
        self.totals.clear()
