"""`sampler=consistent`: every rank knows the whole order, and takes its own slice of it.

The order of an epoch is a permutation that follows from (seed, epoch) alone (`framework.counter.permutation` under the
key `derive("order", seed, epoch)`), so no rank has to tell another. Optimizer step k takes the samples

    order[k * G : (k + 1) * G]                G = global_batch_size

and inside it slices are contiguous: accumulation step, then data rank, then micro-batch. So which samples make a step
depends neither on the number of ranks nor on how the step is cut.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from framework import Problem, Requirements, RunPlan, UsageError, hookimpl

if TYPE_CHECKING:
    from framework.data import BatchPlan

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Consistent:
    """Shares samples out over the data ranks, without overlap or gap.

    Attributes:
        shuffle: null = as the user's loader says.
        drop_last: whether the samples at the end of an epoch that don't fill a global batch are left out. false: they
            make a smaller last step, spread over all ranks. null = leave them out only with a pipeline, which takes
            batches of one size only.
        seed: added to the run's seed: another order with the same initial weights.
    """

    shuffle: bool | None = None
    drop_last: bool | None = None
    seed: int = 0

    @hookimpl
    def requirements(self) -> Requirements:
        """Gives what each strategy with several data ranks needs."""
        return Requirements(gives=frozenset({"data_sharding"}))

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """A pipeline can't take a smaller last batch."""
        if self.drop_last is False and plan.mesh.pp > 1:
            return [
                Problem(
                    "sampler.drop_last=false",
                    "a pipeline takes batches of one size only, so a smaller last step can't run",
                    "sampler.drop_last=true",
                )
            ]
        return []

    @hookimpl
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
    ) -> BatchPlan:
        """Return this data rank's batches.

        Raises:
            UsageError: training would make no step at all.
        """
        from framework import counter
        from framework_plugins.sampler.batches import OWN, ConsistentBatches

        seed, size, how = plan.seed + self.seed, len(dataset), OWN
        if order is not None:
            size = len(order(0))
            if train and (asked := self._order_asked()):
                raise UsageError(
                    f"{asked}, but the training loader has a sampler of its own, which gives the order: leave one of "
                    "the two out."
                )
        elif train and (shuffle if self.shuffle is None else self.shuffle):
            how = "shuffled"

            def order(epoch: int) -> Sequence[int]:
                return counter.epoch_order(seed, epoch, size)
        else:
            how = "in order"

            def order(epoch: int) -> Sequence[int]:
                return range(size)

        batch, ranks = plan.batch, plan.mesh.data_ranks
        step = batch.global_batch_size if train else batch_size * ranks
        drop = plan.mesh.pp > 1 if self.drop_last is None else self.drop_last
        batches = ConsistentBatches(
            order=order,
            how=how,
            seed=seed,
            size=size,
            step=step,
            batch_size=batch_size,
            data_ranks=ranks,
            data_rank=data_rank,
            drop_last=train and drop,
            balanced=train or balanced,
        )
        if train and batches.usable == 0:
            needs = f"at least {step} are needed with drop_last" if size else "at least one is needed"
            raise UsageError(
                f"The training set has {size} samples, so no step is made by {plan.world_size} ranks ({ranks} data "
                f"ranks) at global_batch_size={step}: {needs}."
            )
        if batches.usable < size:
            log.info(
                "The last %d of %d samples of each epoch are left out: they don't fill a global batch of %d.",
                size - batches.usable,
                size,
                step,
            )
        return batches

    @hookimpl
    def shard_iterable(self, dataset: Any, plan: RunPlan, data_rank: int, train: bool) -> Any:
        """Return every n-th sample of a stream, n = data ranks.

        Raises:
            UsageError: an order of training samples was asked for, but only the stream can give one.
        """
        from framework_plugins.sampler.batches import Share

        if train and (asked := self._order_asked()):
            raise UsageError(
                f"{asked}, but the training data is a stream, which comes in an order of its own: leave it out, and "
                "shuffle in the stream (random numbers of torch, NumPy and Python follow from seed and epoch there)."
            )
        return Share(dataset, data_rank, plan.mesh.data_ranks, self.drop_last is True)

    def _order_asked(self) -> str:
        """Return the setting that asks for an order, as typed; "" = none does."""
        return "sampler.shuffle=true" if self.shuffle else f"sampler.seed={self.seed}" if self.seed else ""
