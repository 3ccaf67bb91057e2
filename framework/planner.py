"""The arithmetic of a run: sizes of the mesh axes, and how a global batch is split. Pure functions of plain numbers.

Rules for the mesh (`plan_mesh`). An axis whose option says a size has that size. The others, which say None:

* `devices=auto` on CPU: each gets 2, the smallest world in which the axis does something; dp_shard at least ep's size.
* `devices=N` (or `auto` on GPUs, where N is all of them): an axis that doesn't divide data gets 2; the data-parallel
  axis gets what is left of N.

The product must be N. Ranks that no axis uses are refused: they would train copies whose gradients nobody reduces.

Rules for the batch (`plan_batch`): `global_batch_size = data_ranks * accumulation * microbatches * micro_batch_size`.
What the user left open (None) is derived: accumulation is 1 unless `micro_batch_size` is given; `microbatches` is 1
without a pipeline, else 2 x stages' ranks if that divides and is enough, else the smallest count that divides and is
not smaller than the number of stages, multiples of the pipeline's ranks first.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from framework.errors import PlanError, Problem
from framework.plan import AXES, DATA_AXES, BatchSpec, MeshSpec

DEFAULT_SIZE = 2
"""Size of an axis that nobody sized."""

_REPLICATE = "+strategy=ddp"


def plan_mesh(
    claims: Mapping[str, Mapping[str, int | None]],
    devices: int | str = "auto",
    accelerator: str = "cpu",
    num_nodes: int = 1,
    available: int | None = 0,
) -> MeshSpec:
    """Return the mesh that the chosen options and the number of devices describe.

    Args:
        claims: who uses which axis: words of the option (`tp=dtensor`) -> axis -> size, None = open.
        devices: ranks in all, over all hosts; `auto`, see the rules above.
        accelerator: `cpu` or `cuda`.
        num_nodes: hosts; the ranks must spread evenly over them.
        available: devices of one host, only read on `cuda`; None = unknown, so that `devices` isn't held against it.

    Raises:
        PlanError: with all factors that don't match.
    """
    sizes, problems = _merge_claims(claims)
    total = _total(devices, accelerator, num_nodes, available, problems)
    if problems:
        raise PlanError(problems)
    experts = sizes.pop("ep", 1)
    experts = DEFAULT_SIZE if experts is None else experts
    if total is None:
        usual = {axis: max(DEFAULT_SIZE, experts) if axis == "dp_shard" else DEFAULT_SIZE for axis in sizes}
        chosen = {axis: usual[axis] if size is None else size for axis, size in sizes.items()}
        problem = None
    else:
        chosen, problem = _fill(sizes, total, f"devices={devices}")
    if problem is not None:
        raise PlanError([problem])
    mesh = MeshSpec(**chosen, ep=experts)
    if mesh.dp_shard % mesh.ep:
        fit = max(n for n in range(1, mesh.ep + 1) if mesh.dp_shard % n == 0)
        problems.append(
            Problem(
                f"ep.size={mesh.ep}",
                f"experts are spread over the ranks of dp_shard, and {mesh.dp_shard} isn't a multiple of {mesh.ep}",
                f"ep.size={fit}" if fit > 1 else f"+strategy=fsdp strategy.size={mesh.ep}, or ep=none",
            )
        )
    if mesh.world_size % num_nodes:
        problems.append(
            Problem(
                f"num_nodes={num_nodes}", f"{mesh} has {mesh.world_size} ranks, which don't spread evenly over hosts"
            )
        )
    if problems:
        raise PlanError(problems)
    return mesh


def _merge_claims(claims: Mapping[str, Mapping[str, int | None]]) -> tuple[dict[str, int | None], list[Problem]]:
    """Merge who uses which axis; two options may share an axis only with one size."""
    sizes: dict[str, int | None] = {}
    owner: dict[str, str] = {}
    problems = []
    for words, axes in claims.items():
        for axis, size in axes.items():
            if axis not in (*AXES, "ep"):
                problems.append(Problem(words, f"it uses an axis {axis!r}; the axes are {', '.join(AXES)}, ep"))
            elif size is not None and size < 1:
                problems.append(Problem(words, f"its axis {axis} has size {size}; the smallest is 1"))
            elif sizes.get(axis) is None:
                sizes[axis] = size
                owner.setdefault(axis, words)
            elif size is not None and size != sizes[axis]:
                problems.append(Problem(words, f"it wants {axis} {size}, but {owner[axis]} wants {axis} {sizes[axis]}"))
    return sizes, problems


def _total(
    devices: int | str, accelerator: str, nodes: int, available: int | None, problems: list[Problem]
) -> int | None:
    """Return the number of ranks asked for; None = as many as the axes need."""
    if devices == "auto":
        if accelerator == "cuda":
            if not available:
                problems.append(Problem("accelerator=cuda", "this host has no GPU", "accelerator=cpu"))
                return None
            return available * nodes
        return None
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        problems.append(
            Problem(f"devices={devices}", "it is the number of ranks in all, a whole number from 1, or auto")
        )
        return None
    if accelerator == "cuda" and available is not None and devices > available * nodes:
        have = f"{nodes} host(s) with {available} GPU(s) each have {available * nodes}"
        problems.append(Problem(f"devices={devices}", have, f"devices={max(1, available * nodes)} or accelerator=cpu"))
    return devices


def _fill(sizes: Mapping[str, int | None], total: int, asked: str) -> tuple[dict[str, int], Problem | None]:
    """Give every axis its size so that the product is `total`, or say why that can't be."""
    open_data = [axis for axis in DATA_AXES if axis in sizes and sizes[axis] is None]
    rest = open_data[-1] if open_data else None
    fixed = {axis: DEFAULT_SIZE if size is None else size for axis, size in sizes.items() if axis != rest}
    product = prod(fixed.values())
    factors = " x ".join(f"{axis} {fixed[axis]}" for axis in AXES if axis in fixed) or "one rank"
    if rest is not None:
        if total % product or total < product:
            reason = (
                f"{rest} gets what {factors} = {product} leaves of {total}, and {total} isn't a multiple of {product}"
            )
            return {}, Problem(asked, reason, f"devices={max(product, total // product * product)}")
        return {**fixed, rest: total // product}, None
    if product == total:
        return fixed, None
    if total % product or total < product:
        return {}, Problem(
            asked, f"the chosen axes make {factors} = {product} ranks, not {total}", f"devices={product}"
        )
    left = total // product
    if any(axis in sizes for axis in DATA_AXES):
        reason = f"the chosen axes make {factors} = {product} ranks and leave {left} copies unused"
        return {}, Problem(asked, reason, f"devices={product}")
    reason = f"{factors} = {product} leaves {left} copies of the model, and nobody would reduce their gradients"
    return {}, Problem(asked, reason, f"{_REPLICATE} (or another strategy), or devices={product}")


def plan_batch(
    global_batch_size: int,
    data_ranks: int = 1,
    *,
    micro_batch_size: int | None = None,
    accumulation: int | None = None,
    microbatches: int | None = None,
    pipeline_ranks: int = 1,
    stages: int | None = None,
) -> BatchSpec:
    """Return how a global batch is split; the rules are at the top of the file.

    Args:
        global_batch_size: samples an optimizer step, over all ranks.
        data_ranks: ranks that read different samples.
        micro_batch_size: samples of one forward; None = derived.
        accumulation: batches an optimizer step; None = derived.
        microbatches: micro-batches of one call of the pipeline schedule; None = derived.
        pipeline_ranks: size of the axis pp; 1 = no pipeline.
        stages: stages in all; None = one a rank.

    Raises:
        PlanError: with all the numbers.
    """
    given = {
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size,
        "trainer.accumulate_grad_batches": accumulation,
        "pp.microbatches": microbatches,
    }
    problems = [Problem(f"{k}={v}", "the smallest is 1") for k, v in given.items() if v is not None and v < 1]
    if problems:
        raise PlanError(problems)
    asked = ", ".join(f"{key}={value}" for key, value in given.items() if value is not None)
    if global_batch_size % data_ranks:
        near = _around(global_batch_size, data_ranks)
        reason = f"{data_ranks} data ranks can't share {global_batch_size} samples evenly"
        raise PlanError([Problem(f"global_batch_size={global_batch_size}", reason, f"global_batch_size={near}")])
    derived = tuple(
        name
        for name, value in (
            ("micro_batch_size", micro_batch_size),
            ("accumulation", accumulation),
            ("microbatches", microbatches),
        )
        if value is None
    )
    if accumulation is None and micro_batch_size is None:
        accumulation = 1
    if microbatches is None and pipeline_ranks == 1:
        microbatches = 1
    rank_share = global_batch_size // data_ranks
    known = {
        "micro_batch_size": micro_batch_size,
        "accumulate_grad_batches": accumulation,
        "pp.microbatches": microbatches,
    }
    factors = {name: value for name, value in known.items() if value is not None}
    if rank_share % prod(factors.values()):
        raise PlanError([_indivisible(asked, global_batch_size, data_ranks, factors)])
    open_part = rank_share // prod(factors.values())
    if microbatches is None:
        needed = stages or pipeline_ranks
        if len(factors) == 2:  # accumulation and micro_batch_size are fixed: there is one answer
            microbatches = open_part if open_part >= needed else None
        else:
            microbatches = _count(open_part, pipeline_ranks, needed)
        if microbatches is None:
            text = f"{_product(data_ranks, factors)} leave {open_part} to cut into micro-batches"
            reason = f"{global_batch_size} samples over {text}, fewer than the {needed} stages"
            fix = f"global_batch_size={data_ranks * prod(factors.values()) * needed}"
            raise PlanError([Problem(asked, reason, fix)])
        open_part //= microbatches
    if accumulation is None:
        accumulation, open_part = open_part, 1
    if micro_batch_size is None:
        micro_batch_size, open_part = open_part, 1
    if open_part != 1:
        raise PlanError([_indivisible(asked, global_batch_size, data_ranks, factors)])
    return BatchSpec(global_batch_size, micro_batch_size, microbatches, accumulation, data_ranks, derived)


def _count(samples: int, ranks: int, stages: int) -> int | None:
    """Choose the number of micro-batches among the divisors of `samples`; None = none is large enough."""
    divisors = [n for n in range(1, samples + 1) if samples % n == 0]
    enough = [n for n in divisors if n >= stages]
    if 2 * ranks in enough:
        return 2 * ranks
    return next((n for n in enough if n % ranks == 0), enough[0] if enough else None)


def _indivisible(asked: str, samples: int, data_ranks: int, factors: Mapping[str, int]) -> Problem:
    """Say that the product of the given factors doesn't fit the global batch."""
    product = data_ranks * prod(factors.values())
    rule = (
        f"not the {samples} samples of a global batch"
        if len(factors) == 3
        else f"which doesn't divide {samples} samples"
    )
    return Problem(
        asked,
        f"{_product(data_ranks, factors)} = {product}, {rule}",
        f"global_batch_size={_around(samples, product)}",
    )


def _product(data_ranks: int, factors: Mapping[str, int]) -> str:
    """Write the factors that are fixed."""
    return " x ".join([f"{data_ranks} data ranks", *(f"{name} {value}" for name, value in factors.items())])


def _around(samples: int, step: int) -> str:
    """Return the multiples of `step` nearest to `samples`, as words."""
    below = samples // step * step
    return f"{below} or global_batch_size={below + step}" if below else str(step)
