"""Cross entropy of logits that are split over the vocabulary (Shoeybi et al., 2019, section 3).

Only three numbers a token cross the network: the maximum, the sum of exponentials and the target's logit. torch's own
`loss_parallel` does the same, but takes a target outside the vocabulary for loss 0, needs backward to run inside its
context, and returns DTensors, which a user's `training_step` would have to know about.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from framework.adapters.torch_private import tree_leaves, tree_map
from framework_plugins.tp.ranges import own_range


class VocabLoss(TorchFunctionMode):
    """Inside, `F.cross_entropy` takes logits split over the vocabulary, and returns a plain tensor.

    Any other function that is given split logits together with a plain tensor gets the logits joined, so that a user's
    accuracy, say, is computed as ever.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept what split logits can't do by themselves."""
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            return _dispatch(*args, **kwargs)
        if _mixed(args, kwargs):
            args, kwargs = tree_map(_joined, (args, kwargs))
        return func(*args, **kwargs)


DEFAULTS = {"size_average": None, "ignore_index": -100, "reduce": None, "reduction": "mean", "label_smoothing": 0.0}
"""Arguments of `F.cross_entropy` after the weight, in order."""


def _dispatch(input: Tensor, target: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Take the arguments of `F.cross_entropy`; where they are more than the split loss can do, join the logits."""
    options = DEFAULTS | dict(zip(DEFAULTS, args, strict=False)) | kwargs
    axis = 0 if input.ndim == 1 else 1
    split = isinstance(input, DTensor) and input.placements == (Shard(axis),) and not target.is_floating_point()
    usual = weight is None and all(options[name] == DEFAULTS[name] for name in ("size_average", "reduce"))
    if not (split and usual and options["label_smoothing"] == 0.0):
        return F.cross_entropy(_joined(input), _joined(target), _joined(weight), *args, **kwargs)
    assert isinstance(input, DTensor)
    return cross_entropy(
        input.to_local().movedim(axis, -1),
        _joined(target),
        classes=input.shape[axis],
        mesh=input.device_mesh,
        ignore_index=options["ignore_index"],
        reduction=options["reduction"],
    )


def _mixed(args: Any, kwargs: Any) -> bool:
    """Tell whether split activations and plain tensors meet in one call."""
    plain = split = False
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, DTensor):
            split |= not isinstance(leaf, nn.Parameter)
        elif isinstance(leaf, Tensor):
            plain = True
    return plain and split


def _joined(leaf: Any) -> Any:
    return leaf.full_tensor() if isinstance(leaf, DTensor) and not isinstance(leaf, nn.Parameter) else leaf


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    classes: int,
    mesh: DeviceMesh,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Return the cross entropy over `classes` of which this rank holds a range of columns.

    Args:
        logits: [..., columns of this rank].
        target: [...], class numbers, equal on all ranks of `mesh`.
        classes: columns in all.
        mesh: 1-D; its ranks hold the columns in order, cut as DTensor cuts them.
        ignore_index: target that doesn't count.
        reduction: `mean`, `sum` or `none`.

    Raises:
        IndexError: a target is neither a class nor `ignore_index`. On an accelerator the device's own assertion stops
            the run instead, as with `F.cross_entropy`.
        ValueError: unknown reduction.
    """
    counted = target != ignore_index
    if target.device.type == "cpu" and bool((counted & ((target < 0) | (target >= classes))).any()):
        wrong = target[counted & ((target < 0) | (target >= classes))][0]
        raise IndexError(f"Target {int(wrong)} is out of bounds: the model has {classes} classes (0 to {classes - 1})")
    safe = torch.where(counted, target, 0)
    loss = _SplitCrossEntropy.apply(logits, safe, classes, mesh)  # type: ignore[no-untyped-call]
    loss = torch.where(counted, loss, 0.0)
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return loss.sum() / counted.sum() if reduction == "mean" else loss.sum()


class _SplitCrossEntropy(torch.autograd.Function):
    """Loss a token; float32 inside if the logits are narrower."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, classes: int, mesh: DeviceMesh) -> Tensor:
        start, end = own_range(classes, mesh)
        group = mesh.get_group()
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        maximum = wide.amax(-1)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group)
        shifted = wide - maximum.unsqueeze(-1)
        exponentials = shifted.exp()
        mine = (target >= start) & (target < end)
        # not a class at all: leave an index that the device refuses, instead of a loss of 0
        column = torch.where(mine, target - start, torch.where((target >= 0) & (target < classes), 0, end - start))
        picked = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1)
        sums = torch.stack([exponentials.sum(-1), torch.where(mine, picked, 0.0)])
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), column, mine)
        ctx.dtype = logits.dtype
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, column, mine = ctx.saved_tensors
        result = softmax.clone()
        ones = mine.to(result.dtype).unsqueeze(-1)
        result.scatter_add_(-1, column.unsqueeze(-1), -ones)
        return (result * gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None
