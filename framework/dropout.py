"""Dropout masks that don't depend on the mix: a function of the module, the step, the sample and the place in it.

For each sample the mask of the whole tensor is drawn, with a generator whose seed is made of the run's seed, the
optimizer step, the sample's number in the global batch, the module's name, and how often the module ran before for that
micro-batch; a rank that has a piece of the tensor takes its piece of the mask. So it is the same whoever computes it:
under any number of ranks, accumulation, micro-batches, schedule and recomputation.

It holds for torch's own modules (`nn.Dropout`, `nn.Dropout1d` to `3d`) whose input has the samples in dim 0. What is
dropped elsewhere (`F.dropout`, weights inside of a fused attention) is drawn from the generators that
`framework.randomness` seeds, by rank; a module whose input has another dim 0 is, too, and that is said once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from framework import counter
from framework.window import micro_slices

log = logging.getLogger(__name__)

CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Modules that drop whole channels: dim 1 of the input."""
KINDS = (nn.Dropout, *CHANNELS)
SEQUENCE, FEATURES = "sequence", "features"
"""What tensor parallelism cuts: the last dim but one of [..., tokens, features], or the last (of four dims: heads)."""


@dataclass(frozen=True)
class Tokens:
    """Which tokens of each sequence this rank has, in its order, and how many a sequence has in all."""

    indices: Tensor
    of: int


@dataclass(frozen=True)
class Split:
    """How a region of a tensor-parallel model is cut: piece `rank` of `ranks` of `SEQUENCE` or `FEATURES`."""

    what: str
    rank: int
    ranks: int


@dataclass
class _Moment:
    """What is being computed: a micro-batch of a step; `calls` counts a module's forwards for it."""

    step: int
    samples: range
    calls: dict[str, int] = field(default_factory=dict)


class Masks:
    """Draws the masks of one rank.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.tokens: Tokens | None = None
        """Set by context parallelism for each batch; None = whole sequences."""
        self.split: Split | None = None
        """Set by tensor parallelism where a region begins and ends; None = tensors are whole."""
        self.by_rank: set[str] = set()
        """Modules that were given something else than one row a sample."""
        self.unused: set[str] = set()
        """Modules that weren't called yet: their rate may be read by something that drops by itself."""
        self._batch: _Moment | None = None
        self._now: _Moment | None = None

    def begin(self, step: int, samples: range) -> None:
        """Begin a micro-step: of which optimizer step it is, and the numbers of its samples in the global batch."""
        self._batch = self._now = _Moment(step, samples)

    def micro_batch(self, index: int, of: int) -> None:
        """Begin micro-batch `index` of the micro-step's `of`."""
        if self._batch is not None:
            samples = self._batch.samples
            self._now = _Moment(self._batch.step, samples[micro_slices(len(samples), of)[index]])

    def passed(self, calls: Mapping[str, int]) -> None:
        """Begin a stage of a pipeline before which modules were called so many times for this micro-batch."""
        if self._now is not None:
            self._now.calls = dict(calls)

    def recomputed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run` so that what it drops in later calls is what it drops in the next one.

        Called in the forward of what is recomputed in backward, when other micro-batches may have come since.
        """
        then = self._now
        if then is None:
            return run
        before = dict(then.calls)
        first = True

        def again(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            if first:
                first = False
                return run(*args, **kwargs)
            with self._at(_Moment(then.step, then.samples, dict(before))):
                return run(*args, **kwargs)

        return again

    @contextmanager
    def _at(self, moment: _Moment) -> Generator[None, None, None]:
        now, self._now = self._now, moment
        try:
            yield
        finally:
            self._now = now

    @torch.compiler.disable  # type: ignore[untyped-decorator] # what it depends on changes with each call
    def drop(self, module: Any, name: str, x: Tensor) -> Tensor:
        """Return what `module` makes of `x`."""
        now, p = self._now, float(module.p)
        plain = not module.training or p == 0.0 or isinstance(x, DTensor)
        if plain or now is None:
            return _own(module, x)
        if x.is_meta:  # before this stage of a pipeline
            now.calls[name] = now.calls.get(name, 0) + 1
            return _own(module, x)
        if x.ndim == 0 or x.shape[0] != len(now.samples):
            self._say(name, x, len(now.samples))
            return _own(module, x)
        self.unused.discard(name)
        call = now.calls.get(name, 0)
        now.calls[name] = call + 1
        keep = self._keep(x, 1.0 - p, isinstance(module, CHANNELS), (name, now.step, call), now.samples)
        dropped: Tensor = x * keep * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
        return dropped

    def _keep(self, x: Tensor, p: float, channels: bool, key: tuple[Any, ...], samples: range) -> Tensor:
        shape, pieces = self._whole(x)
        if channels:
            shape[1:] = [1] * (len(shape) - 1)
            pieces = {dim: piece for dim, piece in pieces.items() if dim == 0}
        generator = torch.Generator(x.device)
        rows = []
        for sample in samples:
            generator.manual_seed(counter.derive("dropout", self.seed, *key, sample) >> 1)
            row = torch.empty(shape, dtype=torch.bool, device=x.device).bernoulli_(p, generator=generator)
            for dim, indices in pieces.items():
                row = row.index_select(dim, indices.to(x.device))
            rows.append(row)
        return torch.stack(rows)

    def _whole(self, x: Tensor) -> tuple[list[int], dict[int, Tensor]]:
        """Return the shape of a sample of the whole tensor, and for each dim of it that is cut the indices here."""
        shape = list(x.shape[1:])
        pieces: dict[int, Tensor] = {}
        tokens, split = self.tokens, self.split
        sequence = len(shape) - 2  # the last dim but one: [..., tokens, features]
        cut = split is not None and split.what == SEQUENCE and sequence >= 0
        if tokens is not None and sequence >= 0:
            mine = tokens.indices.chunk(split.ranks)[split.rank] if cut and split is not None else tokens.indices
            if len(mine) == shape[sequence]:
                shape[sequence], pieces[sequence] = tokens.of, mine
        elif cut and split is not None:
            pieces[sequence] = torch.arange(shape[sequence]) + split.rank * shape[sequence]
            shape[sequence] *= split.ranks
        if split is not None and split.what == FEATURES and shape:
            dim = 0 if len(shape) == 3 else len(shape) - 1  # [heads, tokens, ...] or [tokens, features]
            pieces[dim] = torch.arange(shape[dim]) + split.rank * shape[dim]
            shape[dim] *= split.ranks
        return shape, pieces

    def _say(self, name: str, x: Tensor, samples: int) -> None:
        if name not in self.by_rank:
            self.by_rank.add(name)
            log.warning(
                "%s drops from a tensor of shape %s, whose dim 0 isn't the %d samples of the micro-batch: its masks "
                "depend on the mix.", name, tuple(x.shape), samples,
            )  # fmt: skip


def _own(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = type(module).forward(module, x)
    return out


def known(module: nn.Module) -> bool:
    """Whether a module drops as torch's own do; a subclass with a `forward` of its own may do anything."""
    return isinstance(module, KINDS) and type(module).forward in {kind.forward for kind in KINDS}


def install(root: nn.Module, seed: int) -> Masks | None:
    """Let the dropout modules of `root` draw masks that don't depend on the mix; None if it has none that drops.

    Only `forward` of the instances changes; a deep copy of a module is bound to itself. Subclasses with a `forward` of
    their own are left alone.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        if known(module) and module.p != 0.0:
            names.setdefault(module, []).append(name)
    if not names:
        return None
    masks = Masks(seed)
    masks.unused = {name for name, *others in names.values() if not others}
    for module, (name, *others) in names.items():
        if others:  # which of its calls is which depends on how the model is cut
            masks.by_rank |= {name, *others}
            log.warning("%s is one module, so its masks depend on the mix.", ", ".join((name, *others)))
            continue

        def forward(self: nn.Module, input: Tensor, name: str = name) -> Tensor:
            dropped: Tensor = masks.drop(self, name, input)
            return dropped

        module.forward = MethodType(forward, module)
    return masks
