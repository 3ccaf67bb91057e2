"""Are all copies of the model still the same? Every N steps, one small collective.

What it looks for, on the ranks that hold the same piece (axis dp_replicate):

* a gradient left from the step before on some ranks only: `zero_grad` was skipped there. It enters the average, so all
  ranks get the same wrong gradient, and nothing else can find it;
* gradients that differ after their reduction;
* weights that differ, and the optimizer settings that made them differ.

Copies are equal bit by bit (every rank gets the same bits from an all-reduce and computes the same with them), so what
is compared is the sum of a tensor's bits, read as integers, and the sum of their squares, both modulo 2^64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from framework.errors import RunFailedError
from framework.precision import local
from framework.state import parameter_names

LEFT, GRADIENT, WEIGHT = 0, 2, 4
"""Where in a parameter's six numbers what begins: gradient left over, reduced gradient, weight."""
WORDS = {GRADIENT: "reduced gradient", WEIGHT: "weight"}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck(Callback):
    """Stops all ranks when copies differ, naming parameters, ranks and step.

    Args:
        every: optimizer steps between checks; the first step is checked, and the weights once more at the end.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._parameters: dict[str, nn.Parameter] = {}
        self._left: Tensor | None = None
        self._last: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn this rank's parameters; asking for names puts shards back in place, so it is done between steps."""
        self._parameters = {name: p for p, name in parameter_names(pl_module).items() if not p.is_meta}

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Note what lies in `.grad` before the first backward of a step that is checked."""
        if self._left is None and self._due(trainer):
            self._left = self._sums_of_gradients(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Compare; the optimizer hasn't moved the weights yet."""
        if self._left is not None:
            self._compare(trainer, self._left, self._sums_of_gradients(trainer))
            self._left = None
            self._last = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the final weights."""
        nothing = _sums([None] * len(self._parameters), trainer)
        self._compare(trainer, nothing, nothing)

    def _due(self, trainer: Trainer) -> bool:
        return trainer.global_step % self.every == 0 and trainer.global_step != self._last

    def _sums_of_gradients(self, trainer: Trainer) -> Tensor:
        return _sums([parameter.grad for parameter in self._parameters.values()], trainer)

    def _compare(self, trainer: Trainer, left: Tensor, gradients: Tensor) -> None:
        """Collective over the copies."""
        strategy: Any = trainer.strategy
        group = strategy.mesh.group("dp_replicate")
        mine = torch.cat([left, gradients, _sums(self._parameters.values(), trainer)], dim=1)
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everyone, mine, group=group)
        table = torch.stack(everyone).cpu()  # [copies, parameters, 6]
        if bool((table == table[:1]).all()):
            return
        ranks = dist.get_process_group_ranks(group)
        for begin in (LEFT, WEIGHT, GRADIENT):
            for at, name in enumerate(self._parameters):
                values = [tuple(row) for row in table[:, at, begin : begin + 2].tolist()]
                if len(set(values)) > 1:
                    raise RunFailedError(self._sentence(trainer, begin, name, values, ranks, table, group))

    def _sentence(
        self,
        trainer: Trainer,
        begin: int,
        name: str,
        values: list[tuple[int, ...]],
        ranks: list[int],
        table: Tensor,
        group: Any,
    ) -> str:
        step = trainer.global_step
        more = int((table[:, :, begin : begin + 2] != table[:1, :, begin : begin + 2]).any(2).any(0).sum()) - 1
        what = f"{name}{f' and {more} more' if more else ''}"
        if begin == LEFT:
            holding = [rank for rank, value in zip(ranks, values, strict=True) if value != (0, 0)]
            return (
                f"{what}: at the start of step {step} rank {_list(holding)} still held the gradient of the step "
                f"before, the other copies none, so it enters the average of all; call zero_grad on all ranks."
            )
        usual = Counter(values).most_common(1)[0][0]
        odd = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
        since = "from the start" if self._last is None else f"since step {self._last}"
        when = f"in step {step}" if begin == GRADIENT else f"before step {step}, {since}"
        settings: list[Any] = [None] * len(ranks)
        dist.all_gather_object(settings, _settings(trainer), group=group)
        apart = sorted({key for one in settings for key in one if any(one[key] != o.get(key) for o in settings)})
        why = "".join(
            f" {key} of the optimizer: "
            + ", ".join(f"{one.get(key)} on rank {rank}" for rank, one in zip(ranks, settings, strict=True)) + "."
            for key in apart[:3]
        )  # fmt: skip
        return f"{what}: the {WORDS[begin]} on rank {_list(odd)} differs from that of its copies {when}.{why}"


def _settings(trainer: Trainer) -> dict[str, str]:
    """Hyper-parameters of all groups of all optimizers, as words."""
    return {
        f"{key} (group {number})": str(value)
        for optimizer in trainer.optimizers
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


@torch.no_grad()
def _sums(tensors: Iterable[Tensor | None], trainer: Trainer) -> Tensor:
    """Return [tensors, 2] integers on the device; nothing is read on the host. Zeros where there is no tensor."""
    device = trainer.strategy.root_device
    rows = []
    for tensor in tensors:
        if tensor is None or not local(tensor).numel():
            rows.append(torch.zeros(2, dtype=torch.int64, device=device))
            continue
        piece = local(tensor).contiguous()
        bits = piece.view(INTEGERS[piece.element_size()]).flatten().long()
        rows.append(torch.stack([bits.sum(), (bits * bits).sum()]).to(device))
    return torch.stack(rows) if rows else torch.zeros(0, 2, dtype=torch.int64, device=device)


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
