"""Classic faults of distributed training, planted one by one: a verification that lets one through proves nothing.

Each is a patch of the running program in every rank of one mix, where such a fault would sit. The mix without it must
be equal to the reference, and with it must not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.adapters import torch_private

TOY = (
    "model.layers=4", "model.width=32", "model.heads=4", "model.hidden=64", "model.context=16", "model.vocab_size=32",
    "data._target_=framework.verify.toys.Padded", "data.vocabulary=32", "data.length=16",
)  # fmt: skip
"""A small model and samples of uneven length: weights that don't matter can't be wrong."""

BIASED = ("model._target_=framework.verify.toys.Biased", "data._target_=framework.verify.toys.Padded", "data.length=16")
"""A model with biases behind its row-split layers."""

EXPERTS = (
    "model=moe", "model.experts=4", "model.layers=4", "model.width=16", "model.heads=2", "model.hidden=24",
    "model.context=16", "model.vocab_size=32", "data._target_=framework.verify.toys.Padded", "data.vocabulary=32",
    "data.length=16",
)  # fmt: skip
"""A mixture of experts."""

CLIP = "trainer.gradient_clip_val=0.1"

Change = Callable[[Any], Any]
"""What is there -> what is put there."""


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: what is wrong, in words.
        words: of the mix that should catch it.
        changes: dotted name of a function, method or module attribute -> its change.
        base: words of the model and data.
    """

    name: str
    words: str
    changes: dict[str, Change]
    base: tuple[str, ...] = TOY

    @contextmanager
    def planted(self) -> Generator[None, None, None]:
        """Inside, this process has the fault."""
        with ExitStack() as stack:
            for target, change in self.changes.items():
                stack.enter_context(_patched(target, change))
            yield


@contextmanager
def _patched(target: str, change: Change) -> Generator[None, None, None]:
    holder_name, _, attribute = target.rpartition(".")
    holder: Any = resolve_name(holder_name)
    own = vars(holder).get(attribute, getattr(holder, attribute))
    setattr(holder, attribute, change(own))
    try:
        yield
    finally:
        setattr(holder, attribute, own)


# -- changes -----------------------------------------------------------------------------------------------------------
def _times(factor: Callable[[Any], float]) -> Change:
    """Multiply the result of a method by what is worked out from its object."""

    def change(original: Any) -> Any:
        def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs) * factor(self)

        return changed

    return change


def _nothing(original: Any) -> Any:
    return lambda *args, **kwargs: None


def _first_argument(original: Any) -> Any:
    return lambda self, x, *args, **kwargs: x


def _returns(value: Any) -> Change:
    return lambda original: lambda *args, **kwargs: value


def _without_collectives(original: Any) -> Any:
    """`torch.distributed` for one module, whose all-reduce does nothing."""
    return SimpleNamespace(**{**vars(dist), "all_reduce": lambda *args, **kwargs: None})


def _hooked(reduce: Callable[[Tensor, int], Tensor]) -> Change:
    """Give every `DistributedDataParallel` a communication hook: (bucket, ranks) -> what the bucket becomes."""

    def done(tensor: Tensor) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(tensor)
        return future

    def change(original: Any) -> Any:
        def changed(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            # torch refuses a hook whose annotations are text
            self.register_comm_hook(None, lambda state, bucket: done(reduce(bucket.buffer(), dist.get_world_size())))

        return changed

    return change


def _summed(buffer: Tensor) -> Tensor:
    dist.all_reduce(buffer)
    return buffer


def _after_sharding(act: Callable[[Any], None]) -> Change:
    """Do something to each module that `fully_shard` made."""

    def change(original: Any) -> Any:
        def changed(module: Any, **options: Any) -> Any:
            sharded = original(module, **options)
            act(sharded)
            return sharded

        return changed

    return change


def _never_reduces(module: Any) -> None:
    module.set_requires_gradient_sync(False)
    module.set_requires_gradient_sync = lambda *args, **kwargs: None


def _sharding_with(**more: Any) -> Change:
    return lambda original: lambda module, **options: original(module, **{**options, **more})


def _on_last_rank(original: Any) -> Any:
    """Do nothing on the last rank."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        return None if dist.get_rank() == dist.get_world_size() - 1 else original(*args, **kwargs)

    return changed


def _same_samples(original: Any) -> Any:
    return lambda self, plan, manager, data_rank: original(self, plan, manager, 0)


def _samples_count_alike(original: Any) -> Any:
    def changed(output: Any, batch: Any, samples: int = 1) -> Any:
        loss, _, _ = original(output, batch, samples)
        return loss, 1.0, True

    return changed


def _last_left_out(original: Any) -> Any:
    """The loss of the last micro-step of a window doesn't count."""
    return lambda self, loss: original(self, loss) * (0.0 if self.last else 1.0)


def _first_taken_twice(original: Any) -> Any:
    def changed(batch: Any, pieces: int) -> list[Any]:
        micros = original(batch, pieces)
        return [*micros[:-1], micros[0]]

    return changed


def _weights_by_rank(original: Any) -> Any:
    return lambda tensor, steps, key: original(tensor, steps, key + dist.get_rank())


def _forgetful(original: Any) -> Any:
    """The optimizer's state is lost before each step."""

    def changed(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer.optimizer.state.clear() if hasattr(optimizer, "optimizer") else optimizer.state.clear()
        return original(self, optimizer, *args, **kwargs)

    return changed


def _first_range(original: Any) -> Any:
    """Each rank takes itself for the first one."""

    def changed(size: int, mesh: Any) -> tuple[int, int]:
        start, end = original(size, mesh)
        return 0, end - start

    return changed


def _weight_detached(original: Any) -> Any:
    """The layer's share of the gradient of its weight is lost; of a weight of its own it would be missing."""

    def changed(self: Any, module: Any, x: Tensor) -> Any:
        with torch_private.swapped_parameters(module, {"weight": module.weight.detach()}):
            return original(self, module, x)

    return changed


def _never_summed(original: Any) -> Any:
    return lambda self, axis, summed: original(self, axis, False)


def _bias_a_rank(original: Any) -> Any:
    """The bias of a row-split layer is added before the sum over the ranks."""

    def changed(self: Any, module: Any, x: Tensor) -> Tensor:
        bias = module.bias.to_local() if module.bias is not None else None
        return self.axis.leave(torch.nn.functional.linear(x, module.weight.to_local(), bias))  # type: ignore[no-any-return]

    return changed


def _without_conjugate(original: Any) -> Any:
    """The gradient of an operator goes on as it came."""
    return staticmethod(lambda ctx, gradient: (gradient, None))


def _own_part_only(original: Any) -> Any:
    """Each rank keeps its piece of its own gradient of a gathered sequence; nothing is added up."""

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.mesh.size(), -2)[ctx.mesh.get_local_rank()].contiguous(), None

    return staticmethod(backward)


def _joined_by_rank(original: Any) -> Any:
    return lambda self, held, dim: torch.cat(held, dim)


def _places_from_zero(original: Any) -> Any:
    """Each rank takes its piece of a sequence for the start."""

    def changed(self: Any, batch: Any) -> Any:
        found = original(self, batch)
        found["positions"].copy_(torch.arange(self.length).expand_as(found["positions"]))
        return found

    return changed


def _divided_again(original: Any) -> Any:
    """The gradient of experts, a mean over their group already, is divided by its size once more."""
    return staticmethod(lambda ctx, gradient: (original.__func__(ctx, gradient)[0] / ctx.size, None))


def _routed_by_constants(original: Any) -> Any:
    """The weights of the choices get no gradient."""
    return lambda self, x, weights, *rest: original(self, x, weights.detach(), *rest)


def _takes_all(original: Any) -> Any:
    return lambda self, chosen: torch.ones_like(chosen, dtype=torch.bool)


def _over_the_micro_batch(original: Any) -> Any:
    """The usual balance loss: a product of two means over all tokens at hand."""

    def changed(scores: Tensor, chosen: Tensor) -> Any:
        return original(scores.flatten(0, 1)[None], chosen.flatten(0, 1)[None]).expand(len(scores))

    return changed


def _numbers_of_the_first(original: Any) -> Any:
    return lambda self, batch: range(self.plan.batch.local_batch_size)


def _takes_its_piece_for_the_whole(original: Any) -> Any:
    return lambda self, x: (list(x.shape[1:]), {})


# -- the list ----------------------------------------------------------------------------------------------------------
DDP_INIT = "torch.nn.parallel.DistributedDataParallel.__init__"
SHARD = "torch.distributed.fsdp.fully_shard"
WEIGH = "framework.window.Window.weigh"
AXIS = "framework_plugins.tp.styles.Axis"
OPERATORS = "framework_plugins.tp.operators"
ACCUMULATE = "trainer.accumulate_grad_batches=2"
DROPOUT = "model.dropout=0.2"
PIPE = "pp=gpipe pp.microbatches=4"

MUTANTS = (
    Mutant("ddp: gradients aren't reduced", "strategy=ddp", {DDP_INIT: _hooked(lambda b, n: b)}),
    Mutant("ddp: the sum instead of the mean", "strategy=ddp", {DDP_INIT: _hooked(lambda b, n: _summed(b))}),
    Mutant("ddp: the mean of the mean", "strategy=ddp", {DDP_INIT: _hooked(lambda b, n: _summed(b) / n / n)}),
    Mutant("ddp: one rank keeps stale gradients", "strategy=ddp",
           {"lightning.pytorch.LightningModule.optimizer_zero_grad": _on_last_rank}),
    Mutant("ddp: all ranks read the same samples", "strategy=ddp", {"framework.data.Loaders.__init__": _same_samples}),
    Mutant("ddp: padding counts", "strategy=ddp", {"framework.window.read_output": _samples_count_alike}),
    Mutant("ddp: the loss is scaled by the number of ranks", "strategy=ddp",
           {WEIGH: _times(lambda window: window.plan.world_size)}),
    Mutant("ddp: nothing is corrected for samples of uneven length", "strategy=ddp",
           {"framework.window.foreach_mul_": _nothing}),
    Mutant("ddp: the state of the optimizer is lost", "strategy=ddp",
           {"framework.precision.Precision.optimizer_step": _forgetful}),
    Mutant("accumulation: the last micro-step is left out", f"strategy=ddp {ACCUMULATE}", {WEIGH: _last_left_out}),
    Mutant("accumulation: isn't divided by", f"strategy=ddp {ACCUMULATE}",
           {WEIGH: _times(lambda window: window.plan.batch.accumulation)}),
    Mutant("fsdp: the sum instead of the mean", "strategy=fsdp",
           {SHARD: _after_sharding(lambda module: module.set_gradient_divide_factor(1.0))}),
    Mutant("fsdp: gradients aren't reduced in the last micro-step", f"strategy=fsdp {ACCUMULATE}",
           {SHARD: _after_sharding(_never_reduces)}),
    Mutant("fsdp: copies of hybrid sharding aren't averaged", "strategy=fsdp strategy.replicas=2",
           {SHARD: _after_sharding(lambda module: module.set_requires_all_reduce(False))}),
    Mutant("fsdp: the norm is that of one shard", f"strategy=fsdp {CLIP}",
           {"framework.clipping.dist": _without_collectives}),
    Mutant("fsdp: initial weights depend on the rank", "strategy=fsdp",
           {"framework.initialize.fill": _weights_by_rank}),
    Mutant("tp: gradients of split inputs aren't added up", "tp=dtensor", {f"{AXIS}.added_up": _first_argument}),
    Mutant("tp: outputs of row-split layers aren't added up", "tp=dtensor", {f"{AXIS}.leave": _first_argument}),
    Mutant("tp: outputs of row-split layers are added up twice", "tp=dtensor",
           {f"{AXIS}.leave": _times(lambda axis: axis.mesh.size())}),
    Mutant("tp: the bias of row-split layers is added a rank", "tp=dtensor",
           {"framework_plugins.tp.styles.Rowwise.run": _bias_a_rank}, BIASED),
    Mutant("tp: each rank takes itself for the first", "tp=dtensor",
           {"framework_plugins.tp.styles.own_range": _first_range}),
    Mutant("tp: gradients of norms aren't summed over the pieces", "tp=dtensor tp.sequence_parallel=true",
           {"framework_plugins.tp.styles.Replicated.__init__": _never_summed}),
    Mutant("tp: the split loss knows only its own columns", "tp=dtensor tp.loss_parallel=true",
           {"framework_plugins.tp.vocab_loss.dist": _without_collectives}),
    Mutant("tp: replicated parameters count once a rank", f"tp=dtensor {CLIP}",
           {"framework.clipping._copies": _returns(1)}),
    Mutant("tp: the head's share of the gradient of a tied weight is lost", "tp=dtensor model.tied=true",
           {"framework_plugins.tp.styles.Head.run": _weight_detached}),
    Mutant("megatron: gradients of copied inputs aren't reduced", "tp=megatron",
           {f"{OPERATORS}._Copy.backward": _without_conjugate}),
    Mutant("megatron: gradients of a gathered sequence aren't reduced", "tp=megatron tp.sequence_parallel=true",
           {f"{OPERATORS}._GatherSequence.backward": _own_part_only}),
    Mutant("megatron: the bias of row-split layers is added a rank", "tp=megatron",
           {"framework_plugins.tp.styles.Rowwise.run": _bias_a_rank}, BIASED),
    Mutant("pp: gradients are erased by zero_grad", PIPE, {"framework.pipeline.Pipeline.merge_gradients": _nothing}),
    Mutant("pp: one micro-batch is taken twice, one never", PIPE, {"framework.pipeline.split": _first_taken_twice}),
    Mutant("pp: isn't divided by the number of micro-batches", PIPE,
           {"framework.precision.Precision.scale_loss": lambda original: lambda self, loss: loss * 4}),
    Mutant("pp: the norm is that of one stage", f"{PIPE} {CLIP}", {"framework.clipping.dist": _without_collectives}),
    Mutant("pp: parameters are freed between the halves of a split backward",
           "strategy=fsdp pp=zero_bubble pp.microbatches=4", {SHARD: _sharding_with(reshard_after_forward=True)}),
    Mutant("dropout: all data ranks draw the masks of the first", f"strategy=ddp {DROPOUT}",
           {"framework.data.Loaders.numbers": _numbers_of_the_first}),
    Mutant("dropout: masks of hidden units are the same on all ranks", f"tp=dtensor {DROPOUT}",
           {"framework.dropout.Masks._whole": _takes_its_piece_for_the_whole}, BIASED),
    Mutant("dropout: what is recomputed draws other masks", f"strategy=ddp activation=full {DROPOUT}",
           {"framework.dropout.Masks.recomputed": lambda original: lambda self, run: run}),
    Mutant("dropout: all micro-batches draw the masks of the first", f"{PIPE} {DROPOUT}",
           {"framework.dropout.Masks.micro_batch":
            lambda original: lambda self, index, of: original(self, 0, of)}),
    Mutant("dropout: each rank of a sequence draws the masks of its start", f"cp=ulysses {DROPOUT}",
           {"framework.dropout.Masks._whole": _takes_its_piece_for_the_whole}),
    Mutant("cp: each rank counts positions from 0", "cp=ring",
           {"framework_plugins.cp.sequences.BatchCut.__call__": _places_from_zero}),
    Mutant("cp: gradients aren't reduced over the pieces", "cp=ulysses",
           {"framework.reduction._Bucket.start": _nothing}),
    Mutant("cp: blocks of the ring are merged without their log-sum-exp", "cp=ring",
           {"framework_plugins.cp.ring_attention.merge":
            lambda original: lambda out, total, more, block: (out + more, original(out, total, more, block)[1])}),
    Mutant("cp: pieces are joined in the order of ranks", "cp=allgather",
           {"framework_plugins.cp.sequences.Pieces.whole": _joined_by_rank}),
    Mutant("ep: gradients of experts are averaged again over their group", "strategy=fsdp ep=alltoall",
           {"framework_plugins.ep.exchange._Mean.backward": _divided_again}, EXPERTS),
    Mutant("ep: routing weights get no gradient", "strategy=fsdp ep=alltoall",
           {"framework_plugins.model.moe.Mixture.dispatch": _routed_by_constants}, EXPERTS),
    Mutant("ep: what is beyond capacity counts", "strategy=fsdp ep=alltoall model.capacity_factor=1",
           {"framework_plugins.model.moe.Mixture.within_capacity": _takes_all}, EXPERTS),
    Mutant("moe: balance is that of the micro-batch", "strategy=ddp",
           {"framework_plugins.model.moe.balance": _over_the_micro_batch}, EXPERTS),
)  # fmt: skip


def by_name(name: str) -> AbstractContextManager[None]:
    """Return the context in which this process has a fault."""
    return next(mutant for mutant in MUTANTS if mutant.name == name).planted()
