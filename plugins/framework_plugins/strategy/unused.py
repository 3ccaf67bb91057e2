"""Parameters that only some ranks use, under `strategy=fsdp`.

FSDP2 gathers a unit when its forward runs and reduces it when its backward has run, with those parameters that got a
gradient. Ranks that run other units, or use other parameters of one, then pair messages that don't belong together:
gloo ends the process where their sizes differ, and nothing is said where they are equal.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from framework.adapters.torch_private import UnitParameter, watch_unit
from framework.errors import RunFailedError
from framework.parts import ModelPart

FORWARD, BACKWARD, END = 1, 2, 3


class UnitsAgree:
    """Sees that all ranks gather and reduce the same, before they do; a `framework.parts.Reduction`.

    In the first optimizer step each gather and each reduction is agreed on with the other ranks. After it a rank holds
    its reductions against those of that step, which costs no collective.

    Args:
        part: whose units they are.
        units: name -> module that `fully_shard` was applied to, in the same order on all ranks.
        group: ranks over which the part is sharded.
        device: of the collectives.
    """

    def __init__(
        self, part: ModelPart, units: Mapping[str, nn.Module], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.root = part.root
        self.device = device
        self.names = list(units)
        self._owners = {module: name for name, module in part.owned.items()}
        self.group = group
        self.forwards = part.stages == 1  # a pipeline's first step has more of them than others
        self._first_step = True
        self._gathered: set[int] = set()
        """Units that were run in the first step."""
        self._agreed: dict[int, set[tuple[bool, ...]]] = {}
        """Unit -> which of its parameters had a gradient in the first step, in each of its reductions."""
        self._reduced: set[int] = set()
        for number, module in enumerate(units.values()):
            watch_unit(module, partial(self._gathers, number), partial(self._reduces, number))

    def _gathers(self, unit: int) -> None:
        if not (self.forwards and self.root.automatic_optimization and torch.is_grad_enabled()):
            return
        if self._first_step:
            self._agree(FORWARD, unit, ())
            self._gathered.add(unit)
        elif unit not in self._gathered:
            raise self._error(f"{self.names[unit]} is used on rank {dist.get_rank()}, unlike in the first step")

    def _reduces(self, unit: int, held: Sequence[UnitParameter]) -> None:
        if not self.root.automatic_optimization:
            return
        has = tuple(one.has_gradient for one in held)
        if self._first_step:
            missing = [self._name(one) for one in held if not one.has_gradient]
            self._agree(BACKWARD, unit, missing)
            self._agreed.setdefault(unit, set()).add(has)
        elif any(has) and has not in self._agreed.get(unit, ()):
            before = next(iter(self._agreed.get(unit, {()}))) or (False,) * len(has)
            lost = [self._name(one) for one, now, then in zip(held, has, before, strict=True) if then and not now]
            gained = [self._name(one) for one, now, then in zip(held, has, before, strict=True) if now and not then]
            what = f"{', '.join(lost)} got no gradient" if lost else f"{', '.join(gained)} got a gradient"
            raise self._error(f"{what} on rank {dist.get_rank()}, unlike in the first step")
        if any(has):
            self._reduced.add(unit)

    def _name(self, one: UnitParameter) -> str:
        return f"{self._owners.get(one.owner, '')}.{one.key}".lstrip(".")

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Nothing to do: FSDP keeps the gradients on the rank."""
        yield

    def finish(self, dropped: bool = False) -> Sequence[str]:
        """Hold this step's reductions against the first one's; collective in the first."""
        if dropped or not self.root.automatic_optimization:
            return ()
        if self._first_step:
            self._agree(END, len(self.names), ())
            self._first_step = False
        skipped = [unit for unit, ways in self._agreed.items() if any(map(any, ways)) and unit not in self._reduced]
        self._reduced.clear()
        if skipped:
            names = ", ".join(self.names[unit] for unit in skipped)
            raise self._error(f"{names} got no gradient on rank {dist.get_rank()}, unlike in the first step")
        return ()

    def _agree(self, what: int, unit: int, missing: Sequence[str]) -> None:
        """Compare with the other ranks what this one is about to do; collective."""
        mine = torch.tensor([what, unit, zlib.crc32(" ".join(missing).encode())], device=self.device)
        everyone = torch.empty(self.group.size() * 3, dtype=mine.dtype, device=self.device)
        dist.all_gather_into_tensor(everyone, mine, group=self.group)
        if bool((everyone.view(-1, 3) == mine).all()):
            return
        told: list[tuple[int, int, list[str]]] = [(0, 0, [])] * self.group.size()
        dist.all_gather_object(told, (what, unit, list(missing)), group=self.group)
        ranks = dist.get_process_group_ranks(self.group)
        if len({(what, unit) for what, unit, _ in told}) == 1:
            lacking = [set(names) for *_, names in told]
            apart = sorted(set().union(*lacking) - lacking[0].intersection(*lacking))
            without = [str(rank) for rank, names in zip(ranks, lacking, strict=True) if names & set(apart)]
            raise self._error(f"{', '.join(apart)} got no gradient on rank {', '.join(without)}, but did on others")
        doing = {FORWARD: "runs {}", BACKWARD: "has the gradients of {}", END: "is done{}"}
        words = [
            f"rank {rank} {doing[at].format('' if at == END else self.names[unit])}"
            for rank, (at, unit, _) in zip(ranks, told, strict=True)
        ]
        raise self._error(f"Ranks use different parts of the model: {', '.join(words)}")

    @staticmethod
    def _error(what: str) -> RunFailedError:
        return RunFailedError(
            f"{what}, so gradients can't be reduced; type strategy.find_unused_parameters=true, or freeze or remove "
            "what isn't used."
        )


class UnusedParameters:
    """Lets a rank leave out parameters of a part that is one unit; a `framework.parts.Reduction`.

    A parameter without gradient counts as zero on that rank; one that no rank has a gradient for keeps None, so that
    weight decay and momentum don't move it.

    Args:
        part: sharded as one unit.
        groups: of the data axes.
        device: of the collectives.
    """

    def __init__(self, part: ModelPart, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self.groups = groups
        self.device = device
        self._used: dict[nn.Parameter, bool] = {}
        """Whether this rank had a gradient in any of the window's reductions (a pipeline has one a micro-step)."""
        watch_unit(part.module, lambda: None, self._reduces)
        part.module.set_reduce_scatter_unused_params(True)  # type: ignore[operator]

    def _reduces(self, held: Sequence[UnitParameter]) -> None:
        for one in held:
            self._used[one.parameter] = one.has_gradient or self._used.get(one.parameter, False)

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Nothing to do: FSDP keeps the gradients on the rank."""
        yield

    def finish(self, dropped: bool = False) -> Sequence[str]:
        """Take the zero gradients of what no rank used away; collective."""
        used, self._used = self._used, {}
        if dropped or not used:
            return ()
        counts = torch.tensor(list(used.values()), dtype=torch.int32, device=self.device)
        for group in self.groups:
            dist.all_reduce(counts, group=group)
        for parameter, count in zip(used, counts.tolist(), strict=True):
            if not count:
                parameter.grad = None
        return ()
