"""The seam: while a step runs, causal `F.scaled_dot_product_attention` looks at whole sequences, the rest is local."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from framework.adapters.torch_private import in_backward, storage_id
from framework.errors import UsageError
from framework_plugins.cp.option import POSITIONS
from framework_plugins.cp.sequences import BatchCut

Attend = Callable[[Tensor, Tensor, Tensor, float | None, float], Tensor]
"""(queries [samples, heads, tokens of this rank, size], keys, values, scale, dropout) -> the shape of the queries."""

LOOKS = ("size", "dim", "__get__", "__getitem__", "stride", "numel", "is_floating_point", "is_contiguous")
"""Functions that ask a tensor about its shape or take a view: that isn't reading it."""


class SplitAttention(TorchFunctionMode):
    """Inside, attention exchanges with the other ranks of axis cp.

    A mode and not a patch of `torch.nn.functional`, which would miss a name that a module imported before. It is off
    while a function runs that it was asked about, such as `Tensor.backward`; what that recomputes needs it again.

    Args:
        attend: the exchange.
        cut: of the batches.
        whole: whether this rank runs the whole model, so that a step without attention means that it wasn't seen.
    """

    def __init__(self, attend: Attend, cut: BatchCut, whole: bool) -> None:
        super().__init__()
        self.attend = attend
        self.cut = cut
        self.whole = whole
        self._exchanging = False
        self._checked = False
        self._attended = False
        self._read = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept attention."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            raise UsageError(
                f"cp={self.cut.option} replaces torch.nn.functional.scaled_dot_product_attention and can't look into "
                "multi_head_attention_forward: call the former, or type cp=none."
            )
        if not self._checked:
            self._watch(func, args, kwargs)
        return func(*args, **kwargs)

    def _backward(
        self,
        loss: Tensor,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        with self:  # for what a user's own checkpoint recomputes
            torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        # a block of another pipeline stage, of which only the shapes are wanted; or the mode is on twice
        if query.is_meta or self._exchanging:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        self._attended = True
        if attn_mask is not None or not is_causal:
            what = "attention with a mask" if attn_mask is not None else "attention without is_causal=True"
            raise UsageError(
                f"cp={self.cut.option} can't do {what}: a rank has a piece of each sequence, and only causal attention "
                "over whole sequences is known here; call it with is_causal=True and no mask, or type cp=none."
            )
        shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
        tokens = {shape[-2] for shape in shapes}
        if any(len(shape) != 4 for shape in shapes) or tokens != {self.cut.length}:
            raise UsageError(
                f"cp={self.cut.option} met attention over queries, keys and values of shapes {shapes}; it takes "
                f"[samples, heads, tokens, size] with the {self.cut.length} tokens that this rank has of each sequence."
            )
        grouped = query.shape[1] != key.shape[1]
        if key.shape[:2] != value.shape[:2] or (grouped and not (enable_gqa and query.shape[1] % key.shape[1] == 0)):
            raise UsageError(
                f"cp={self.cut.option} met attention of {query.shape[1]} heads of queries and {key.shape[1]} of keys; "
                "grouped queries need enable_gqa=True, and a number of heads that those of the keys divide."
            )
        kind = query.device.type
        if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
            query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
        self._exchanging = True
        try:
            return self.attend(query, key, value, scale, dropout_p)
        finally:
            self._exchanging = False

    def _watch(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note whether the first step reads the positions that it was given."""
        positions = self.cut.positions
        if self._read or positions is None or getattr(func, "__name__", "") in LOOKS:
            return
        self._read = any(
            isinstance(leaf, Tensor) and leaf.dtype == positions.dtype and storage_id(leaf) == storage_id(positions)
            for leaf in (*args, *kwargs.values())
        )

    def watch_(self, block: nn.Module) -> None:
        """Be on where `block` is recomputed in backward, whatever started that, and in whatever thread.

        A schedule that splits the backward calls `torch.autograd.grad`, inside which the mode is off.
        """
        mode = self
        inner: Any = block.forward
        # a bound method is taken apart and rebound, else a deep copy of the block would run the original's weights
        bound = isinstance(inner, MethodType) and inner.__self__ is block
        run: Any = inner.__func__ if bound else lambda _, *args, **kwargs: inner(*args, **kwargs)

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not in_backward():
                return run(self, *args, **kwargs)
            with mode:
                return run(self, *args, **kwargs)

        block.forward = MethodType(forward, block)

    def __exit__(self, *error: Any) -> None:
        """After the first step that learns: a model which ignores its positions, or attends unseen, is wrong."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._checked or error[0] is not None or not torch.is_grad_enabled() or in_backward():
            return
        self._checked = True
        if not self._read:
            raise UsageError(
                f'The model doesn\'t read batch["{POSITIONS}"], the place of each token in its sequence, so each rank '
                f"of cp={self.cut.option} would take its piece for the start: read it, or type cp=none."
            )
        if self.whole and not self._attended:
            raise UsageError(
                f"The model never called torch.nn.functional.scaled_dot_product_attention, the one thing that "
                f"cp={self.cut.option} replaces, so tokens would only see their own piece: call it, or type cp=none."
            )
