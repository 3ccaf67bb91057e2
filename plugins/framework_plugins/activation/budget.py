"""Which outputs of a block are kept under `activation.budget`: those with the most compute a byte, until it is used up.

A block is measured once, by one more forward before its first one: which operators it runs, how much each computes,
how large its result is, and how much the block would keep without recomputation. What an operator computes is counted
in floating-point operations, by torch's own formulas; an operator without one counts an operation an element. Nothing
is timed: ranks that share a block's work have to choose alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from framework.adapters import torch_memory
from framework.adapters.torch_private import tree_leaves
from framework_plugins.activation.selective import dropped, operator_name
from framework_plugins.activation.storages import held, storage_of

Call = tuple[str, int]
"""An operator's name, and how many of the block's calls of it came before."""
Kept = frozenset[Call]


@dataclass(frozen=True)
class Cost:
    """One call of an operator in a block.

    Attributes:
        call: which.
        bytes: of what it returns.
        flops: floating-point operations that it takes.
    """

    call: Call
    bytes: int
    flops: float


@dataclass
class Measured:
    """What one forward of a block does.

    Attributes:
        costs: of the calls whose results can be kept: new memory, that nothing writes into afterwards, without random
            numbers.
        sent: calls of operators that send something to other ranks.
        saved: bytes that autograd keeps of the block without recomputation, its inputs and weights left out.
        crosses: whether it exchanges anything with other ranks.
    """

    costs: list[Cost] = field(default_factory=list)
    sent: list[Cost] = field(default_factory=list)
    saved: int = 0
    crosses: bool = False


def choose(measured: Measured, budget: float, sends_kept: Callable[[str], bool]) -> Kept:
    """Return the calls whose results are kept.

    Args:
        measured: the block.
        budget: part of `measured.saved` that the kept results may take, above 0.
        sends_kept: whether what an operator got from other ranks is kept. That is never left to what fits: a rank on
            which it doesn't would wait in the recomputation for others that don't come.
    """
    sent = [cost for cost in measured.sent if sends_kept(cost.call[0])]
    left = budget * measured.saved - sum(cost.bytes for cost in sent)
    kept = {cost.call for cost in sent}
    for cost in sorted(measured.costs, key=lambda cost: (-cost.flops / cost.bytes, cost.call)):
        if cost.bytes <= left:
            kept.add(cost.call)
            left -= cost.bytes
    return frozenset(kept)


def measure(run: Callable[..., Any], block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Measured:
    """Run a block once for its costs; random state and buffers are afterwards as they were."""
    watch = _Watch(block, [*args, *kwargs.values()])
    with (
        _unchanged(block, watch.device),
        saved_tensors_hooks(watch.save, _never),
        torch_memory.operators(watch.see),
    ):
        run(block, *args, **kwargs)
    return watch.result()


def _never(_: Any) -> Any:
    raise AssertionError("the forward that measures a block has no backward")


class _Watch:
    """Collects what `measure` finds out."""

    def __init__(self, block: nn.Module, given: Sequence[Any]) -> None:
        leaves = [leaf for leaf in tree_leaves(list(given)) if isinstance(leaf, Tensor)]
        self.device = leaves[0].device if leaves else torch.device("cpu")
        # references to storages are held, so that no address is used twice
        self.known = {one.cdata: one for one in map(storage_of, [*leaves, *block.parameters(), *block.buffers()])}
        self.costs: dict[int, tuple[int, Cost]] = {}
        self.sent: list[Cost] = []
        self.kept: dict[int, int] = {}
        self.calls: Counter[str] = Counter()
        self.needed = 0
        self.crosses = False
        self._inputs = set(self.known)

    def save(self, tensor: Tensor) -> None:
        """See a tensor that autograd would keep; here it needn't."""
        reference = storage_of(tensor)
        self.known[reference.cdata] = reference
        if reference.cdata not in self._inputs:
            self.kept[reference.cdata] = held(tensor).untyped_storage().nbytes()
        self.needed = sum(self.calls.values())

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """See an operator."""
        name = operator_name(operator)
        cost = Cost((name, self.calls[name]), 0, 0.0)
        self.calls[name] += 1
        for target in torch_memory.written(operator, args, kwargs):
            self.costs.pop(storage_of(target).cdata, None)
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.crosses |= sends(name) or any(isinstance(result, DTensor) for result in results)
        references = [storage_of(result) for result in results if result.numel()]
        new = references and not any(reference.cdata in self.known for reference in references)
        self.known.update({reference.cdata: reference for reference in references})
        if not new or draws(operator, args, kwargs):
            return
        size = sum(held(result).untyped_storage().nbytes() for result in results)
        cost = Cost(cost.call, size, flops(operator, args, kwargs, out))
        if sends(name):
            self.sent.append(cost)
        else:
            self.costs[references[0].cdata] = sum(self.calls.values()), cost

    def result(self) -> Measured:
        """Return the sum; what comes after the last thing that backward needs isn't computed again anyway."""
        last = sum(self.calls.values()) if self.crosses else self.needed
        return Measured(
            [cost for at, cost in self.costs.values() if at <= last],
            self.sent,
            sum(self.kept.values()),
            self.crosses,
        )


@contextmanager
def _unchanged(block: nn.Module, device: torch.device) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in block.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, values in before:
            buffer.copy_(values)


def sends(name: str) -> bool:
    """Whether an operator talks to other ranks."""
    return name.partition("::")[0] in ("c10d", "_c10d_functional", "_c10d_functional_autograd")


def draws(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers: if it didn't in the recomputation, those after it would be others."""
    share = dropped(operator, args, kwargs)
    if share is not None:
        return share > 0
    return torch.Tag.nondeterministic_seeded in operator.tags


def flops(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Return how many floating-point operations a call takes; of sharded tensors: on all ranks together."""
    if "_scaled_dot_product" in operator_name(operator):
        return float(sdpa_flop_count(*(tuple(tensor.shape) for tensor in args[:3])))  # type: ignore[no-untyped-call]
    formula = flop_registry.get(operator.overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=out))
    return float(sum(math.prod(leaf.shape) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)))


class Budget:
    """Chooses for one block, when it first runs; called before each forward that learns.

    Args:
        budget: as the option has it, above 0 and below 1.
        sends_kept: as in `choose`.
        make: returns the contexts of `torch.utils.checkpoint.checkpoint` for a policy.
    """

    def __init__(self, budget: float, sends_kept: Callable[[str], bool], make: Callable[..., Any]) -> None:
        self.budget, self.sends_kept, self.make = budget, sends_kept, make
        self.measured: Measured | None = None
        self.kept: Kept = frozenset()

    def __call__(self, run: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of `checkpoint` for this forward."""
        if self.measured is None:
            given = [leaf for leaf in tree_leaves([*args, *kwargs.values()]) if isinstance(leaf, Tensor)]
            if any(leaf.is_meta for leaf in given):  # a pipeline asks for shapes; there other operators run
                return {}
            self.measured = measure(run, block, args, kwargs)
            self.kept = choose(self.measured, self.budget, self.sends_kept)
        # a rank that has all it needs must not leave the others alone in an exchange that comes after
        return {"context_fn": partial(self.make, partial(_policy, self.kept, Counter())),
                "early_stop": not self.measured.crosses}  # fmt: skip


def _policy(kept: Kept, calls: Counter[str], _: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    name = operator_name(operator)
    call = name, calls[name]
    calls[name] += 1
    return CheckpointPolicy.MUST_SAVE if call in kept else CheckpointPolicy.PREFER_RECOMPUTE
