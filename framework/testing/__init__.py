"""What a plugin author's or user's own tests need: real processes, plans, conformance suites."""

from framework.testing.ranks import RanksError, WorkerPool, run_ranks

__all__ = ["RanksError", "WorkerPool", "run_ranks"]
