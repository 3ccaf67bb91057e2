"""`activation=offload`: what a block saves for backward waits in the host's memory or on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from framework import Problem, Requirements, RunPlan, hookimpl
from framework_plugins.activation.full import missing_blocks

if TYPE_CHECKING:
    from framework.parts import ModelPart

TIERS = ("host", "disk")


@dataclass(kw_only=True, eq=False)
class Offload:
    """Activation offloading (Rhu et al., 2016): nothing is computed again, saved tensors go away and come back.

    Weights, buffers and arguments without a gradient (masks, tables) stay, and what lies in little memory.

    Attributes:
        to: `host`, from a device to this host's pinned memory; `disk`, to files.
        folder: of those files, on a disk with room and not in memory; None = the run's folder. Each loses its name as
            soon as it is made, so nothing is left, however the run ends.
        min_bytes: tensors whose memory is smaller stay.
        every: of the blocks, counted over the whole model from 0, those that are offloaded: 1 = all, 2 = every second.
    """

    to: str = "host"
    folder: str | None = None
    min_bytes: int = 65536
    every: int = 1

    def __post_init__(self) -> None:
        if self.to not in TIERS:
            raise ValueError(f"activation.to={self.to} is unknown; choose one of {', '.join(TIERS)}.")
        if self.every < 1:
            raise ValueError(f"activation.every={self.every} must be at least 1.")
        if self.min_bytes < 0:
            raise ValueError(f"activation.min_bytes={self.min_bytes} must not be negative.")

    @hookimpl
    def requirements(self) -> Requirements:
        """To disk it is another mix."""
        return Requirements(variants=("to=disk",))

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """There must be a place to go to."""
        problems = []
        if self.to == "host" and plan.accelerator == "cpu":
            reason = "this run has no device: its activations are in the host's memory already"
            problems.append(Problem("activation=offload", reason, "activation.to=disk or activation=full"))
        if self.to == "host" and self.folder is not None:
            problems.append(
                Problem(f"activation.folder={self.folder}", "nothing is written to it", "activation.to=disk")
            )
        if plan.chosen("compile") is not None:
            reason = "a compiler decides by itself what a block saves"
            problems.append(Problem("activation=offload", f"with compile={plan.chosen('compile')} {reason}",
                                    "compile=none, or activation=full"))  # fmt: skip
        return problems

    @hookimpl
    def check_model(self, plan: RunPlan, model: object) -> Sequence[Problem]:
        """A model without repeated blocks has nothing to offload."""
        return missing_blocks(model, "activation=offload")

    @hookimpl
    def apply_activation_checkpointing(self, part: ModelPart, plan: RunPlan) -> None:
        """Wrap the `forward` of the part's blocks."""
        from framework_plugins.activation.away import Disk, Host, offload_
        from framework_plugins.activation.recompute import every_nth

        tier = Host() if self.to == "host" else Disk(Path(self.folder or plan.run_dir))
        for block in every_nth(part.blocks, self.every):
            offload_(block, tier, self.min_bytes)
