"""One gradient norm over all axes, and clipping by it (Pascanu et al., 2013).

`torch.nn.utils.clip_grad_norm_` fails on mixes of DTensor and plain tensors or of meshes, and knows no pipeline. Here
every rank adds up its own pieces, each divided by the number of ranks that hold the same piece, and one all-reduce
over the world gives the square sum in which each logical element counts once. All ranks get the same bits, so replicas
stay equal. Which rank holds what is read from the parameters alone:

* a DTensor is split over the mesh axes on which its placement isn't `Replicate`, and copied over the others;
* a plain tensor is copied over the data, context and tensor axes;
* pipeline stages hold different parameters, but for those that are said to be on several.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from framework.adapters.torch_private import foreach_clamp_, foreach_mul_, foreach_norm

if TYPE_CHECKING:
    from framework.mesh import Mesh

ALGORITHMS = ("norm", "inf_norm", "value")
EPSILON = 1e-6
"""Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does."""


def total_norm(
    parameters: Iterable[nn.Parameter],
    mesh: Mesh | None,
    norm_type: float = 2.0,
    holders: Mapping[nn.Parameter, int] | None = None,
) -> Tensor:
    """Return the norm of all gradients of the whole model, the same on every rank.

    Collective: all ranks of the mesh call it at the same point, those without any gradient too.

    Args:
        parameters: those of this rank, each once; the ones without gradient count as zero.
        mesh: the axes; None = one process.
        norm_type: 2, any other positive number, or infinity.
        holders: parameters that are on several pipeline stages -> on how many; None = there are none.

    Returns:
        A scalar on the mesh's device, float64 if every gradient here is float64, else float32.

    Raises:
        ValueError: `norm_type` isn't positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} is not a norm: type a positive number or inf")
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    settle_(parameters)
    groups: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        piece = _piece(parameter)
        if piece.numel():
            groups.setdefault(
                (_copies(parameter, mesh) * (holders or {}).get(parameter, 1), piece.device, piece.dtype), []
            ).append(piece)
    # float64 on some ranks only would make the ranks' messages differ in size: the message is always float64
    total = torch.zeros((), dtype=torch.float64, device=_device(mesh, parameters))
    for (copies, _, dtype), pieces in groups.items():
        wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        norms = torch.stack(foreach_norm(pieces, norm_type, dtype=wide)).double()
        if math.isinf(norm_type):
            total = torch.maximum(total, norms.max().to(total.device))
        else:
            total += norms.pow(norm_type).sum().to(total.device) / copies
    if math.isinf(norm_type):
        total = total.nan_to_num(nan=math.inf)  # a MAX over ranks may lose a NaN, never an infinity
    if mesh is not None and mesh.spec.world_size > 1:
        dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
    if not math.isinf(norm_type):
        total = total.pow(1.0 / norm_type)
    exact = bool(parameters) and all(parameter.dtype is torch.float64 for parameter in parameters)
    return total if exact else total.float()


@torch.no_grad()
def clip_(
    parameters: Iterable[nn.Parameter],
    mesh: Mesh | None,
    max_norm: float,
    norm_type: float = 2.0,
    algorithm: str = "norm",
    holders: Mapping[nn.Parameter, int] | None = None,
) -> Tensor:
    """Clip all gradients in place; return their norm from before. Collective, as `total_norm`.

    The bound is applied on the device: nothing waits for the host. A norm that isn't finite is not hidden: the factor
    is then NaN or 0 on all ranks alike, as in torch's own function; who wants to skip such a step looks at the result.

    Args:
        parameters: those of this rank, each once.
        mesh: the axes; None = one process.
        max_norm: bound of the norm, or of each element's size if `algorithm` is `value`.
        norm_type: of algorithm `norm` and of the result.
        algorithm: `norm` scales all gradients of the model by one common factor; `inf_norm` is that with the norm
            infinity; `value` cuts each element to [-max_norm, max_norm].
        holders: as of `total_norm`.

    Raises:
        ValueError: unknown algorithm, or a bound that isn't positive.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"gradient_clip_algorithm={algorithm} is unknown: type one of {', '.join(ALGORITHMS)}")
    if not max_norm > 0:
        raise ValueError(f"gradient_clip_val={max_norm} is not a bound: type a positive number, or null for none")
    parameters = list(parameters)
    norm = total_norm(parameters, mesh, math.inf if algorithm == "inf_norm" else norm_type, holders)
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and (piece := _piece(parameter)).numel():
            groups.setdefault((piece.device, piece.dtype), []).append(piece)
    if algorithm == "value":
        for pieces in groups.values():
            foreach_clamp_(pieces, max_norm)
        return norm
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for (device, _), pieces in groups.items():
        foreach_mul_(pieces, factor.to(device))
    return norm


@torch.no_grad()
def settle_(parameters: Iterable[nn.Parameter]) -> None:
    """Bring every DTensor gradient to its parameter's placements: sums that are still due over an axis are done now.

    Autograd may leave the gradient of a replicated DTensor as `Partial`; its norm, its momentum and its checkpoint
    would each be wrong or need the sum again. Collective over the axes concerned; free where nothing is due.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            due = any(isinstance(placement, Partial) for placement in gradient.placements)
            if due or gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(gradient.device_mesh, parameter.placements)


def _piece(parameter: nn.Parameter) -> Tensor:
    """Return this rank's values of a gradient, as storage to write to; of a sparse one the stored values."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    if gradient.is_sparse:
        if not gradient.is_coalesced():
            gradient = gradient.coalesce()
            parameter.grad = gradient
        return gradient.values()
    return gradient


def _copies(parameter: nn.Parameter, mesh: Mesh | None) -> int:
    """Return how many ranks hold the same piece of the gradient of `parameter`."""
    if mesh is None:
        return 1
    ranks = mesh.spec.world_size // mesh.size("pp")
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if not isinstance(placement, Replicate):
                ranks //= parameter.device_mesh.size(axis)
    return ranks


def _device(mesh: Mesh | None, parameters: list[nn.Parameter]) -> torch.device:
    """Return where the sum is made: on the device of the process group, though gradients may be offloaded."""
    if mesh is not None and mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return _piece(parameters[0]).device if mesh is None and parameters else torch.device("cpu")
