"""What a plugin author's or user's own tests need: real processes, plans, conformance suites."""

from framework.plan import RunPlan
from framework.testing.ranks import RanksError, WorkerPool, run_ranks

__all__ = ["RanksError", "WorkerPool", "plan", "run_ranks"]


def plan(
    *overrides: str, config_name: str = "train", command: str = "fit", model: bool = True, here: bool = True
) -> RunPlan:
    """Return the plan of what would be typed: `plan("+strategy=fsdp", "devices=2")`; nothing is written or started.

    Args:
        overrides: as on the command line.
        config_name: `train` or a recipe (`-cn`).
        command: `fit` or `validate`.
        model: whether the model is built (on the meta device) and checked too.
        here: whether the run is meant for this host; False: its GPUs and launcher aren't held against the plan.

    Raises:
        PlanError: with all complaints.
    """
    from framework.compose import compose

    return compose(overrides, config_name, command=command, model=model, here=here)
