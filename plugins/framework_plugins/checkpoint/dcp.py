"""`checkpoint=dcp`: sharded checkpoints that any other mix of parallelism can resume from.

Every rank writes what it holds, under global names, with torch.distributed.checkpoint's plans (DCP) into safetensors
files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from framework import Problem, RunPlan, hookimpl
from framework.plan import Checkpoint

if TYPE_CHECKING:
    from framework_plugins.checkpoint.callback import Checkpoints
    from framework_plugins.checkpoint.store import ShardedStore


@dataclass(kw_only=True, eq=False)
class DCP:
    """Sharded checkpoints.

    Attributes:
        every_n_steps: optimizer steps between two saves; 0 = only at the end, on request, and when `monitor` is new.
        keep: how many of the newest are kept, at least 1; a damaged newest one needs an older one to fall back on.
        save_top_k: how many of the best by `monitor` are kept besides; -1 = delete none, 0 = save nothing at all.
        monitor: name of the logged metric that says which is best; null = the newest counts.
        monitor_mode: whether the best metric is the `min` or the `max`.
        save_last: `link` = `checkpoints/last` points to the newest; `none` = no link.
        memory_every_n_steps: optimizer steps between two saves into this host's main memory, from which a restart takes
            it if it is the newest; 0 = none. The newest is kept; they are gone with the host, or when the run is done.
        memory_dir: folder of a memory file system; null = `/dev/shm`.
        peers: host:port of keepers (`python -m framework keep`), one a host in the order of the hosts, or any others;
            each checkpoint in memory is copied to another host's.
        remote: URL, as fsspec has them, to which each checkpoint on disk is copied, with a catalogue; null = none.
        remote_keep: how many of the newest are kept there, besides the `save_top_k` best.
        mode: `async` = training goes on as soon as each rank has copied what it holds, and a thread writes (twice the
            memory of the state); `sync` = training waits until all is on disk; `auto` = the first save is waited
            for, and the rest as well if that took a quarter of a second or less, or if the steps beside a save lost
            more time than waiting takes.
        on_failure: when a checkpoint can't be written (full disk): `end` = all ranks end with the error; `go_on` =
            training goes on, with a warning, and the next save is tried.
    """

    every_n_steps: int = 100
    keep: int = 2
    save_top_k: int = 1
    monitor: str | None = None
    monitor_mode: str = "min"
    save_last: str = "link"
    mode: str = "auto"
    on_failure: str = "end"
    memory_every_n_steps: int = 0
    memory_dir: str | None = None
    peers: list[str] = field(default_factory=list)
    remote: str | None = None
    remote_keep: int = 2

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """Check the ranges of the settings."""
        rules = [
            (
                "every_n_steps",
                self.every_n_steps >= 0,
                "it is a count of optimizer steps",
                "checkpoint.every_n_steps=100",
            ),
            (
                "memory_every_n_steps",
                self.memory_every_n_steps >= 0,
                "it is a count of optimizer steps",
                "checkpoint.memory_every_n_steps=10",
            ),
            ("keep", self.keep >= 1, "the newest checkpoint is always kept", "checkpoint.keep=1"),
            ("save_top_k", self.save_top_k >= -1, "it is a count, or -1 for all", "checkpoint.save_top_k=-1"),
            (
                "monitor_mode",
                self.monitor_mode in ("min", "max"),
                "the best is the smallest or the largest",
                "checkpoint.monitor_mode=min",
            ),
            ("save_last", self.save_last in ("link", "none"), "it is link or none", "checkpoint.save_last=link"),
            (
                "mode",
                self.mode in ("auto", "async", "sync"),
                "it is auto, async or sync",
                f"checkpoint.monitor_mode={self.mode}" if self.mode in ("min", "max") else "checkpoint.mode=auto",
            ),
            (
                "memory_every_n_steps",
                not self.memory_every_n_steps or plan.num_nodes == 1 or bool(self.peers),
                "hosts don't see one another's memory",
                "checkpoint.peers=[<host:port of each host's keeper>]",
            ),
            (
                "peers",
                not self.peers or self.memory_every_n_steps > 0,
                "peers hold copies of checkpoints in memory",
                "checkpoint.memory_every_n_steps=10",
            ),
            (
                "memory_every_n_steps",
                not self.memory_every_n_steps
                or not self.every_n_steps
                or self.memory_every_n_steps % self.every_n_steps != 0,
                "each of these steps is saved on disk anyway",
                f"checkpoint.memory_every_n_steps={max(1, self.every_n_steps // 10)}",
            ),
            (
                "save_top_k",
                self.save_top_k != 0 or not (self.memory_every_n_steps or self.remote),
                "0 saves nothing, in memory and remote neither",
                "checkpoint.save_top_k=1",
            ),
            ("remote_keep", self.remote_keep >= 1, "the newest one is always kept", "checkpoint.remote_keep=1"),
            (
                "remote",
                self.remote is None or "://" in self.remote,
                "it is a URL",
                f"checkpoint.remote=file://{self.remote}",
            ),
            ("on_failure", self.on_failure in ("end", "go_on"), "it is end or go_on", "checkpoint.on_failure=end"),
        ]
        from framework_plugins.checkpoint import peers

        wrong = peers.check(self.peers)
        unreachable = [] if wrong is None else [Problem(f"checkpoint.peers={self.peers}", *wrong)]
        return unreachable + [
            Problem(f"checkpoint.{name}={getattr(self, name)}", reason, fix)
            for name, good, reason, fix in rules
            if not good
        ]

    @hookimpl
    def newest_complete(self, plan: RunPlan) -> Checkpoint | None:
        """Return the newest complete checkpoint of this run, of all tiers that it saves to."""
        from framework_plugins.checkpoint import tiers

        return tiers.newest(plan.run_dir, self)

    @hookimpl
    def fetch_checkpoint(self, plan: RunPlan, url: str) -> Checkpoint | None:
        """Fetch a checkpoint from a catalogue."""
        from framework_plugins.checkpoint import remote

        return remote.find(url, plan.run_dir)

    @hookimpl
    def make_checkpoint_io(self, plan: RunPlan) -> ShardedStore:
        """Return the store."""
        from framework_plugins.checkpoint.store import ShardedStore

        return ShardedStore(
            background=self.mode == "async", ranks_a_host=None if plan is None else plan.local_world_size
        )

    @hookimpl
    def make_callbacks(self, plan: RunPlan) -> Sequence[Checkpoints]:
        """Return the callback that saves and tidies."""
        from framework_plugins.checkpoint.callback import Checkpoints

        return [Checkpoints(self, plan)]
