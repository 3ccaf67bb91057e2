"""Averaging gradients over replicas, each bucket's all-reduce started as soon as its last gradient is accumulated.

Li et al., PyTorch Distributed (2020), section 3.2, without a wrapper: hooks on the parameters, so that it composes with
tensor and pipeline parallelism. Buckets are started in one fixed order (last parameter first, as backward goes), so
that a rank whose graph differs can't pair its message with another one's: a bucket that isn't full waits for `finish`,
which fills in zeros or names what had no gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.errors import RunFailedError
from framework.precision import local

if TYPE_CHECKING:
    from framework.parts import ModelPart
    from framework.plan import RunPlan

BUCKET_BYTES = 25 * 2**20
"""Largest bucket unless one is asked for: that of torch's wrapper."""


class _Bucket:
    """Parameters of one dtype and device that travel together.

    Attributes:
        full: how many times a gradient is accumulated before the bucket may start.
        fired: how many times one was, since the last `finish`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], full: int) -> None:
        self.parameters = list(parameters)
        self.full = full
        self.fired = 0
        self._pieces: list[Tensor] = []
        self._wire: Tensor | None = None
        self._work: Any = None

    def start(
        self, send: Callable[[Tensor], Any], replicas: int, wire_dtype: torch.dtype | None, in_place: bool
    ) -> None:
        """Send the gradients, divided by the number of replicas and then rounded; zeros where there is none."""
        self._pieces = [local(p.grad if p.grad is not None else torch.zeros_like(p)) for p in self.parameters]
        first = self._pieces[0]
        dtype = wire_dtype or first.dtype
        self._wire = None
        if in_place and len(self._pieces) == 1 and dtype is first.dtype and first.is_contiguous():
            wire = first.div_(replicas)
        else:
            flat = first.flatten() if len(self._pieces) == 1 else torch.cat([p.flatten() for p in self._pieces])
            wire = self._wire = (flat / replicas).to(dtype)
        if wire.numel():
            self._work = send(wire)

    def wait(self, stays_none: Callable[[nn.Parameter], bool]) -> None:
        """Put the averages into the gradients."""
        if self._work is not None:
            self._work.wait()
        if self._wire is not None:
            averages = torch.split(self._wire, [piece.numel() for piece in self._pieces])
            for parameter, piece, average in zip(self.parameters, self._pieces, averages, strict=True):
                if parameter.grad is None:
                    if stays_none(parameter):
                        continue
                    parameter.grad = torch.zeros_like(parameter)
                local(parameter.grad).copy_(average.view_as(piece))
        elif self.parameters[0].grad is None and not stays_none(self.parameters[0]):
            grad = torch.zeros_like(self.parameters[0])
            local(grad).copy_(self._pieces[0])
            self.parameters[0].grad = grad
        self._pieces, self._wire, self._work, self.fired = [], None, None, 0


class GradientReduction:
    """Averages the gradients of one `ModelPart` over its replicas; a `framework.parts.Reduction`.

    Sums are torch's; a library with all-reduces of its own overrides `send`.

    Args:
        parameters: name -> parameter, in the order of the model; frozen ones are left out until they have gradients.
        group: the replicas.
        bucket_bytes: a bucket holds at least one parameter and no more bytes than this; 0 = one parameter each.
        wire_dtype: gradients are divided by the number of replicas, rounded to it, summed in it; None = their own.
        backwards: backward passes of an optimizer step that accumulate into each parameter (a pipeline's
            micro-batches).
        early: start a bucket when it is full; False: all in `finish`.
        own_gradients: `.grad` belongs to its parameter alone and may be reduced where it lies.
        find_unused: a parameter may get no gradient on some ranks (it counts as zero there) or on none (it stays None).
        buffers_of: modules whose own buffers are copied from the first replica at the end of each optimizer step.
    """

    takes_sparse = "strategy.reduction=bucketed without tp and pp"
    """What to type where a gradient is sparse, which isn't reduced here."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        *,
        bucket_bytes: int,
        wire_dtype: torch.dtype | None = None,
        backwards: int = 1,
        early: bool = True,
        own_gradients: bool = True,
        find_unused: bool = False,
        buffers_of: Iterable[nn.Module] = (),
    ) -> None:
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._names = {parameter: name for name, parameter in self.parameters.items()}
        self._frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        self._thawed = False
        self.group = group
        self.bucket_bytes = bucket_bytes
        self.wire_dtype = wire_dtype
        self.early = early
        self.own_gradients = own_gradients
        self.find_unused = find_unused
        self.backwards = backwards
        self._buckets: list[_Bucket] = []
        self._started = 0
        self._sync = True
        self._with_buffers = [module for module in buffers_of if any(True for _ in module.buffers(recurse=False))]
        self._take(self.parameters.values())
        own = weakref.ref(self)

        def thaw(parameter: Tensor) -> None:
            if (reduction := own()) is not None:
                reduction._thawed = True

        on_gradient_of_frozen(self._frozen.values(), thaw)

    def _take(self, parameters: Iterable[nn.Parameter]) -> None:
        for members in _fill(parameters, self.bucket_bytes):
            bucket = _Bucket(members, len(members) * self.backwards)
            self._buckets.append(bucket)
            for parameter in members:
                parameter.register_post_accumulate_grad_hook(self._counting(bucket))  # type: ignore[no-untyped-call]

    def _take_thawed(self) -> None:
        """Reduce from now on what was frozen at first and has gradients now (Lightning's `BackboneFinetuning`)."""
        thawed = {name: p for name, p in self._frozen.items() if p.requires_grad}
        self._frozen = {name: p for name, p in self._frozen.items() if name not in thawed}
        self.parameters |= thawed
        self._names |= {parameter: name for name, parameter in thawed.items()}
        self._take(thawed.values())
        self._thawed = False

    @classmethod
    def of_part(
        cls,
        part: ModelPart,
        plan: RunPlan,
        group: dist.ProcessGroup,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        buffers: bool = True,
        **settings: Any,
    ) -> GradientReduction:
        """Return the reduction of a part's parameters; other arguments as in the constructor.

        In a pipeline a gradient is final after the last micro-batch, if it isn't added to those of earlier micro-steps
        later; where a rank runs several stages their buckets have no common order. With manual optimization each pass
        may have parameters of its own, and which ones only the module's author knows.
        """
        mine, pipeline, manual = set(part.parameters()), part.stages > 1, not part.root.automatic_optimization
        settings["find_unused"] = settings.get("find_unused", False) or manual
        return cls(
            {name: parameter for name, parameter in part.root.named_parameters() if parameter in mine},
            group,
            bucket_bytes=bucket_bytes,
            backwards=plan.batch.microbatches if pipeline else 1,
            early=not manual and (not pipeline or (plan.batch.accumulation == 1 and part.stages == plan.mesh.pp)),
            own_gradients=not pipeline,
            buffers_of=part.owned.values() if buffers else (),
            **settings,
        )

    def send(self, values: Tensor, name: str) -> Any:
        """Start to add up `values` over the replicas, in place; return an object whose `wait()` ends when they are.

        Called in the same order on all replicas, with the same names: that of a bucket's last parameter.
        """
        return dist.all_reduce(values, group=self.group, async_op=True)

    def _counting(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        """Return the hook of a bucket's parameters.

        It holds nothing alive: hooks of tensors are out of the garbage collector's sight, and a model that ends would
        stay, with its process groups.
        """
        own, members = weakref.ref(self), weakref.ref(bucket)

        def accumulated(parameter: Tensor) -> None:
            reduction, filled = own(), members()
            if reduction is not None and filled is not None and reduction._sync:
                filled.fired += 1
                if reduction.early and filled.fired == filled.full:
                    reduction._start_full_ones()

        return accumulated

    @torch.no_grad()
    def _start_full_ones(self) -> None:
        while self._started < len(self._buckets) and self._buckets[self._started].fired == (
            self._buckets[self._started].full
        ):
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._started]
        for parameter in bucket.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise RunFailedError(
                    f"The gradient of {self._names[parameter]} is sparse, which only torch's DDP wrapper reduces; "
                    f"build its layer with sparse=False, or type {self.takes_sparse}."
                )
        send = partial(self.send, name=self._names[bucket.parameters[0]])
        bucket.start(send, self.group.size(), self.wire_dtype, self.own_gradients)
        self._started += 1

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Backward passes inside only accumulate."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    @torch.no_grad()
    def finish(self, dropped: bool = False) -> Sequence[str]:
        """Start what hasn't started, wait for all; collective. See `framework.parts.Reduction.finish`."""
        if dropped and not self._started:
            for bucket in self._buckets:
                bucket.fired = 0
            return ()
        if self._thawed:
            self._take_thawed()
        used: dict[nn.Parameter, bool] = {}
        if self._started < len(self._buckets):
            missing = [name for name, p in self.parameters.items() if p.requires_grad and p.grad is None]
            if missing and not self.find_unused:
                return missing
        while self._started < len(self._buckets):
            self._start_next()
        if self.find_unused:  # after the buckets: a rank with all gradients has started them before
            used = self._used_anywhere()
        for bucket in self._buckets:
            bucket.wait(lambda parameter: not parameter.requires_grad or not used.get(parameter, True))
        self._started = 0
        self._copy_buffers()
        return ()

    @property
    def unreduced(self) -> bool:
        """Whether gradients were accumulated since the last `finish`."""
        return any(bucket.fired for bucket in self._buckets)

    def _used_anywhere(self) -> dict[nn.Parameter, bool]:
        """Return which parameters got a gradient on any replica."""
        parameters = list(self.parameters.values())
        device = parameters[0].device if parameters else torch.device("cpu")
        counts = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
        self.send(counts, "used parameters").wait()
        return dict(zip(parameters, counts.bool().tolist(), strict=True))

    def _copy_buffers(self) -> None:
        """Give all replicas the buffers of the first."""
        buffers = [local(buffer) for module in self._with_buffers for buffer in module.buffers(recurse=False)]
        for _, same in groupby(sorted(buffers, key=_kind), key=_kind):
            alike = list(same)
            flat = torch.cat([buffer.flatten() for buffer in alike])
            dist.broadcast(flat.view(torch.uint8), group=self.group, group_src=0)  # gloo sends no booleans
            for buffer, piece in zip(alike, torch.split(flat, [buffer.numel() for buffer in alike]), strict=True):
                buffer.copy_(piece.view_as(buffer))


def on_gradient_of_frozen(parameters: Iterable[nn.Parameter], call: Callable[[Tensor], None]) -> None:
    """Have `call(parameter)` called whenever one of these, which are frozen now, gets a gradient after all.

    `call` must not hold a parameter: a hook is out of the garbage collector's sight, so neither would ever be freed.
    """
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.requires_grad_(True)  # torch takes no hook otherwise
            parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(False)


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tensor.device}"


def _fill(parameters: Iterable[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Cut the parameters, last first, into runs of one dtype and device that aren't larger than `limit` bytes."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(list(parameters)):
        nbytes = local(parameter).numel() * parameter.element_size()
        if not buckets or size + nbytes > limit or _kind(buckets[-1][0]) != _kind(parameter):
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += nbytes
    return buckets
