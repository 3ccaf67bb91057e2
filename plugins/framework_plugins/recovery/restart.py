"""`recovery=restart`: start again from the newest complete checkpoint after a failure; save and stop on SIGTERM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from signal import SIGKILL
from typing import TYPE_CHECKING

from framework.errors import EXIT_USAGE
from framework.failures import OUT_OF_MEMORY, oom_kills
from framework.hookspecs import hookimpl
from framework.plan import Failure, RunPlan

if TYPE_CHECKING:
    from framework.stopping import SaveAndStop


COUNTED = ("limit_train_batches", "limit_val_batches", "val_check_interval")
"""Settings of the Trainer that count batches, where they are whole numbers."""


@dataclass(kw_only=True, eq=False)
class Restart:
    """Bounded restarts; a failure that can only repeat itself isn't tried again.

    Attributes:
        max_restarts: attempts after the first one, in the whole run.
        on_out_of_memory: what becomes of a run in which a rank has run out of memory: `halve` = it goes on with
            micro-batches half as large and twice as many of them, the same global batch; those restarts don't count.
            `fail` = a failure like others.
    """

    max_restarts: int = 3
    on_out_of_memory: str = "halve"

    def __post_init__(self) -> None:
        self._oom_kills = oom_kills()
        if self.on_out_of_memory not in ("halve", "fail"):
            raise ValueError(f"recovery.on_out_of_memory={self.on_out_of_memory}: it is halve or fail.")
        if self.max_restarts < 0:
            raise ValueError(f"recovery.max_restarts={self.max_restarts}: it is a count, 0 or more.")

    @hookimpl
    def make_restart_policy(self, plan: RunPlan) -> Restart:
        """Return this plugin: it is the policy."""
        return self

    @hookimpl
    def make_callbacks(self, plan: RunPlan) -> Sequence[SaveAndStop]:
        """Return the callback that saves and stops all ranks when one of them is asked to."""
        from framework.stopping import SaveAndStop

        return [SaveAndStop(plan)]

    def adapt(self, plan: RunPlan, failures: Sequence[Failure]) -> tuple[RunPlan, str] | None:
        """After a rank ran out of memory cut its batches; see `framework.launch.RestartPolicy`."""
        kills, self._oom_kills = oom_kills() - self._oom_kills, oom_kills()
        starved = [one for one in failures if _starved(one) or (kills and one.exit_code == -SIGKILL)]
        if not starved or self.on_out_of_memory == "fail":
            return None
        batch = plan.batch
        pieces = next((n for n in range(2, batch.micro_batch_size + 1) if batch.micro_batch_size % n == 0), None)
        if pieces is None:
            return None  # one sample is the least
        cut = "microbatches" if plan.mesh.pp > 1 else "accumulation"
        more = pieces * getattr(batch, cut)
        trainer = dict(plan.trainer)
        if cut == "accumulation":  # Lightning counts batches, of which there are more now
            trainer |= {name: pieces * trainer[name] for name in COUNTED if type(trainer.get(name)) is int}
        smaller = replace(batch, micro_batch_size=batch.micro_batch_size // pieces, **{cut: more})
        told = (
            f"Rank {starved[0].rank} ran out of memory with {batch.micro_batch_size} samples a micro-batch: from now "
            f"on {smaller.micro_batch_size}, and {cut} {more} in the place of {getattr(batch, cut)}. "
            f"The global batch stays {batch.global_batch_size}."
        )
        return plan.with_(batch=smaller, trainer=trainer), told

    def why_not(self, failure: Failure, restarts: int, previous: Failure | None, progressed: bool) -> str | None:
        """Return None to start again, or why not; see `framework.launch.RestartPolicy`."""
        if failure.exit_code == EXIT_USAGE:
            return "Not started again: the settings are at fault."
        same = previous is not None and failure.traceback and failure.message == previous.message
        if same and not progressed:
            return "Not started again: the same error came twice at the same place."
        if restarts >= self.max_restarts:
            return f"Not started again: recovery.max_restarts={self.max_restarts} is used up."
        return None


def _starved(failure: Failure) -> bool:
    """Whether a rank ran out of memory in its step; a save's copies don't get smaller with the batch."""
    return bool(OUT_OF_MEMORY.search(failure.message)) and "CheckpointError" not in failure.message
