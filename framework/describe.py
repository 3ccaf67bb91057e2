"""`describe`: the one screen that explains a run before it starts; what `python -m framework plan` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from framework.plan import AXES, RunPlan
from framework.process_env import environment_lines
from framework.schema import LIST_SLOTS, SLOTS
from framework.summary import short

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from framework.memory import RankBytes

MAX_ROWS = 10
MAX_COLUMNS = 8
"""A larger mesh is drawn with its middle left out."""


def describe(plan: RunPlan, model: LightningModule | None = None) -> RenderableType:
    """Return what a run is: mesh, options, number formats, memory, collectives, batch, environment, folder.

    Fits 80 columns; prints as plain text where the output isn't a terminal.

    Args:
        plan: the run.
        model: with its parameters on the meta device; None = nothing is said about memory and stages, and torch isn't
            imported.
    """
    command = {"fit": "train", "validate": "validate"}.get(plan.command, plan.command)
    ranks = f"{plan.world_size} {plan.accelerator} rank{'s' if plan.world_size > 1 else ''}"
    hosts = f" on {plan.num_nodes} hosts" if plan.num_nodes > 1 else ""
    parts: list[RenderableType] = [
        Text(f"{plan.name}: {command} on {ranks}{hosts}, seed {plan.seed}", style="bold"),
        _heading(f"Mesh: {plan.mesh}"),
        _mesh(plan),
        _axes(plan),
    ]
    if model is not None:
        parts += _stages(plan, model)
    parts += [_heading("Who does what"), _options(plan), *_notes(plan)]
    if model is not None:
        parts += _memory(plan, model)
        parts += _collectives(plan, model)
    parts += [_heading("Batch"), _batch(plan), *_rest(plan)]
    return Group(*parts)


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _grid(*columns: dict[str, Any], header: bool = True) -> Table:
    table = Table(box=box.SIMPLE_HEAD if header else None, show_header=header, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(**column)
    return table


# -- mesh -------------------------------------------------------------------------------------------------------------


def _mesh(plan: RunPlan) -> Table:
    """Draw the ranks: the last axis in use runs across, the others down."""
    mesh = plan.mesh
    used = [axis for axis, size in zip(AXES, mesh.shape, strict=True) if size > 1]
    across = used[-1] if used else None
    width = getattr(mesh, across) if across else 1
    room = 76 - sum(len(axis) + 2 for axis in used[:-1])
    shown = _shown(width, min(MAX_COLUMNS, room // (len(f"{mesh.world_size} d{mesh.data_ranks}") + 2)))
    headers = ["..." if at is None else f"{across} {at}" if across else "" for at in shown]
    outer = [{"header": axis, "justify": "right"} for axis in used[:-1]]
    table = _grid(*outer, *({"header": header, "no_wrap": True} for header in headers), header=across is not None)
    short = len(shown) > 4 or len(outer) > 1
    for row in _shown(mesh.world_size // width, MAX_ROWS):
        if row is None:
            table.add_row(*("..." for _ in (*outer, *shown)))
            continue
        at = mesh.coordinate(row * width)
        cells = []
        for column in shown:
            rank = row * width + (column or 0)
            share = mesh.data_rank(rank)
            cells.append("..." if column is None else f"{rank} d{share}" if short else f"rank {rank}, d{share}")
        table.add_row(*(str(at[axis]) for axis in used[:-1]), *cells)
    return table


def _shown(count: int, most: int) -> list[int | None]:
    """Return which of `count` places are drawn; None stands for those left out."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


def _axes(plan: RunPlan) -> Table:
    """Say what ranks along each axis have in common and what not."""
    mesh = plan.mesh
    shards = mesh.dp_shard * mesh.cp
    told = {
        "pp": "a stage each: its own blocks of the model; the same samples",
        "dp_replicate": "a copy each; its own samples (dN: share N of each batch)",
        "dp_shard": f"1/{shards} of each parameter, gradient and optimizer state each; its own samples (dN)"
        + (f"; groups of {mesh.ep} share the experts (ep)" if mesh.ep > 1 else ""),
        "cp": "a piece of each sequence each; the same samples",
        "tp": "a slice of each split layer each; the same samples",
    }
    table = _grid({"style": "bold", "no_wrap": True}, {}, header=False)
    for axis, size in zip(AXES, mesh.shape, strict=True):
        if size > 1:
            table.add_row(axis, told[axis])
    if mesh.world_size == 1:
        table.add_row("1 rank", "the whole model and every sample")
    return table


def _stages(plan: RunPlan, model: LightningModule) -> list[RenderableType]:
    """Say which modules each rank along pp holds."""
    if plan.mesh.pp == 1:
        return []
    from framework.memory import stage_parts

    table = _grid({"style": "bold", "no_wrap": True}, {}, header=False)
    for stage in range(plan.mesh.pp):
        rank = next(rank for rank in range(plan.world_size) if plan.mesh.coordinate(rank)["pp"] == stage)
        parts = stage_parts(plan, model, rank)
        said = [f"stage {part.index}: {_modules(part)}" for part in parts]
        if parts[0].stages == 1:  # a cut that asks for a batch, and the data for a Trainer
            said = ["a stage of like cost, found by the ranks; bytes below are those of the whole model"]
        table.add_row(f"pp {stage}", "; ".join(said))
    return [table]


def _modules(part: Any) -> str:
    """Name what a stage owns: its blocks as a range, other modules by their outermost names."""
    blocks = list(part.blocks)
    inside = tuple(f"{name}." for name in blocks)
    others = [name for name in part.owned if name and name not in part.blocks and not name.startswith(inside)]
    outer = [name for name in others if not any(name.startswith(f"{other}.") for other in others)]
    outer = [name for name in outer if any(True for _ in part.owned[name].parameters())]
    run = [] if not blocks else [blocks[0] if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1].rpartition('.')[2]}"]
    return ", ".join([*outer, *run] if part.index == 0 else [*run, *outer])


# -- options ----------------------------------------------------------------------------------------------------------


def _options(plan: RunPlan) -> Table:
    """Return one row a concern: the chosen option, and what it was set to."""
    table = _grid({"style": "bold", "no_wrap": True}, {"no_wrap": True}, {"overflow": "fold"}, header=False)
    off = []
    for slot in [*SLOTS, *(slot for slot in plan.components if slot not in SLOTS)]:
        spec = plan.components.get(slot)
        if not spec:
            off.append(slot)
        elif slot in LIST_SLOTS:
            table.add_row(slot, ", ".join(spec), "")
        else:
            option = spec.get("option") or spec.get("_target_", "").rpartition(".")[2]
            table.add_row(slot, str(option), Text(_settings(slot, spec), style="dim"))
    if off:
        table.add_row("off", "", Text(", ".join(off), style="dim"))
    return table


TOLD_WHOLE = ("strategy", "tp", "pp", "cp", "ep", "model")
"""Concerns of which every setting is shown; of the others only what differs from the option's own file."""


def _settings(slot: str, spec: Any) -> str:
    """Return the settings of an option on few lines; nested objects by the name of their class."""
    from framework.catalog import catalog

    option = catalog().options.get(slot, {}).get(str(spec.get("option")))
    usual = {} if option is None or slot in TOLD_WHOLE else option.values
    told = []
    for key, value in spec.items():
        if key in ("option", "name") or (key == "_target_" and spec.get("option")) or value is None:
            continue
        if key in usual and (usual[key] == value or str(usual[key]).startswith("${")):
            continue
        if isinstance(value, dict) and "_target_" in value:
            value = value["_target_"].rpartition(".")[2]  # noqa: PLW2901
        told.append(f"{key}={value}")
    return " ".join(told)


def _notes(plan: RunPlan) -> list[RenderableType]:
    """Return what options have to say about the plan themselves."""
    from framework.plugin_manager import manager_for

    lines = [line for lines in manager_for(plan).hook.plan_notes(plan=plan) for line in lines]
    return [Text("\n".join(lines))] if lines else []


# -- memory -----------------------------------------------------------------------------------------------------------


def _memory(plan: RunPlan, model: LightningModule) -> list[RenderableType]:
    from framework.memory import bytes_per_rank

    ranks = bytes_per_rank(plan, model)
    total = sum(parameter.numel() for parameter in model.parameters())
    unit, scale = _unit(max(held.total for held in ranks))
    table = _grid({"header": "rank", "no_wrap": True}, *({"header": name, "justify": "right"} for name in _COLUMNS))
    for numbers, held in _alike(ranks):
        sizes = [held.parameter_bytes, held.gradient_bytes, held.optimizer_bytes, held.total, held.gathered_bytes]
        shown = ["?" if size is None else f"{size / scale:,.1f}" for size in sizes]
        table.add_row(numbers, f"{held.parameters:,}", *shown)
    told = [f"The model has {total:,} parameters. {_formats(plan)}", "Activations come on top."]
    if any(held.gathered_bytes for held in ranks):
        told[1] = (
            "On top come activations and, during a step, at most so many gathered: whole parameters put together from"
            " their shards."
        )
    told += _too_much(plan, max(held.total for held in ranks))
    if any(held.optimizer_bytes is None for held in ranks):
        told.append("The optimizer can't be made without a Trainer (configure_optimizers): its state isn't known yet.")
    return [_heading(f"Memory a rank, {unit}"), table, Text("\n".join(told))]


def _too_much(plan: RunPlan, need: int) -> list[str]:
    """Return a warning if a rank needs more than it has, as far as that is known here."""
    import psutil
    import torch

    if plan.accelerator == "cpu":
        have = int(psutil.virtual_memory().total) // plan.local_world_size
    elif torch.cuda.is_available():
        have = torch.cuda.get_device_properties(0).total_memory
    else:
        return []
    if need <= have:
        return []
    return [
        f"Warning: a rank needs {need / 2**30:,.1f} GiB before any activation, and has {have / 2**30:,.1f} GiB: it will"
        " run out of memory. Type +strategy=fsdp, or more devices."
    ]


_COLUMNS = ("parameters", "weights", "gradients", "optimizer", "sum", "gathered")


def _unit(size: int) -> tuple[str, int]:
    """Return the unit in which `size` bytes is a handy number, and its bytes."""
    return ("KiB", 2**10) if size < 2**20 else ("MiB", 2**20) if size < 10 * 2**30 else ("GiB", 2**30)


def _alike(ranks: Sequence[RankBytes]) -> Iterator[tuple[str, RankBytes]]:
    """Join neighbouring ranks that hold the same: `0-3`; of very many different ones the first and last few."""
    rows = []
    for held, group in groupby(enumerate(ranks), key=lambda entry: entry[1]):
        numbers = [number for number, _ in group]
        rows.append((f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}", held))
    for row in _shown(len(rows), 2 * MAX_ROWS):
        if row is not None:
            yield rows[row]


def _formats(plan: RunPlan) -> str:
    from framework.plugin_manager import manager_for

    precision: Any = manager_for(plan).hook.make_precision(plan=plan)
    if precision is None:
        return "Weights as the module makes them."
    stored, computed = (str(dtype).removeprefix("torch.") for dtype in (precision.param_dtype, precision.compute_dtype))
    scale = ", loss scale" if precision.scale is not None else ""
    matrix = stored if precision.compute_dtype is None else f"{computed} (autocast)"
    return f"Weights, gradients and optimizer state are {stored}, matrix products {matrix}{scale}."


# -- collectives ------------------------------------------------------------------------------------------------------


def _collectives(plan: RunPlan, model: LightningModule) -> list[RenderableType]:
    """Return what travels along each axis in one optimizer step, of the rank that moves most."""
    rows = list(collectives(plan, model))
    if not rows:
        return []
    unit, scale = _unit(max(size or 0 for *_, size in rows))
    table = _grid(
        {"header": "axis", "style": "bold", "no_wrap": True},
        {"header": "what"},
        {"header": "how often", "no_wrap": True},
        {"header": unit, "justify": "right"},
    )
    for axis, what, times, size in rows:
        table.add_row(
            axis, what, "once" if times == 1 else f"{times} times", "" if size is None else f"{size / scale:,.1f}"
        )
    return [_heading("Collectives in an optimizer step"), table]


def collectives(plan: RunPlan, model: LightningModule) -> Iterator[tuple[str, str, int, int | None]]:
    """Yield axis, kind, how often, and bytes in all (of the rank that moves most).

    Bytes are None where they depend on the data (activations) or are next to nothing.
    """
    from framework.memory import given_words, shares

    mesh, batch, words = plan.mesh, plan.batch, given_words(plan)
    firsts = [rank for rank in range(plan.world_size) if mesh.data_rank(rank) == 0]
    held = [list(shares(plan, model, rank)) for rank in firsts]
    weights = max(sum(share.bytes for share in one) for one in held)
    rest = max(sum(share.bytes for share in one if not share.unit) for one in held)
    trained = max(sum(share.bytes for share in one if share.trainable) for one in held)
    rounds, micros = batch.accumulation, batch.accumulation * batch.microbatches
    if mesh.pp > 1:
        yield "pp", "send activations to the next stage, their gradients back", micros, None
    if mesh.tp > 1:
        yield "tp", "reduce or gather activations of each split layer", micros, None
    if mesh.cp > 1:
        yield "cp", "exchange keys and values, or heads, in each attention", micros, None
    if mesh.ep > 1:
        yield "ep", "all-to-all tokens to their experts and back, and their gradients", micros, None
    sharded, over = "shards_parameters" in words, " x cp" if mesh.cp > 1 else ""
    shards, copies = (
        (mesh.dp_shard * mesh.cp, mesh.dp_replicate) if sharded else (mesh.dp_shard, mesh.dp_replicate * mesh.cp)
    )
    if sharded and shards > 1:
        # Gathered for the forward, and again for the backward: all, or what lies outside of blocks, which FSDP lets go
        # when the module's forward ends, within the step method. A pipeline keeps everything until its last backward.
        again = 0 if mesh.pp > 1 else weights if "frees_blocks" in words else rest
        gathers = rounds * (2 if again == weights else 1)
        # a pipeline reduces after each batch, and so do some engines; else only the last micro-step does
        reductions = rounds if mesh.pp > 1 or "reduces_every_batch" in words else 1
        yield f"dp_shard{over}", "all-gather parameters", gathers, rounds * (weights + again)
        yield f"dp_shard{over}", "reduce-scatter gradients", reductions, trained * reductions
    elif mesh.dp_shard > 1:  # optimizer state is sharded, perhaps gradients
        reductions = rounds if "reduces_every_batch" in words else 1
        yield "dp_shard", "reduce-scatter gradients", reductions, trained * reductions
        yield "dp_shard", "all-gather updated parameters", 1, trained
    if copies > 1:
        where = f"dp_replicate{'' if sharded else over}" if mesh.dp_replicate > 1 else "cp"
        yield where, "all-reduce gradients", 1, trained // shards
    if mesh.world_size > 1 and "delayed_gradients" not in words:
        yield "all", "agree on loss, weights, metrics: one small all-reduce", rounds, None
        if plan.trainer.get("gradient_clip_val"):
            yield "all", "all-reduce the gradient norm", 1, None


# -- the rest ---------------------------------------------------------------------------------------------------------


def _batch(plan: RunPlan) -> Text:
    batch = plan.batch
    micro = f" x {batch.microbatches} micro-batches" if plan.mesh.pp > 1 or batch.microbatches > 1 else ""
    ranks = f"{batch.data_ranks} data rank{'s' if batch.data_ranks > 1 else ''}"
    derived = f" (derived: {', '.join(batch.derived)})" if batch.derived else ""
    return Text(
        f"{batch.global_batch_size} samples a step = {ranks} x {batch.accumulation} accumulation"
        f"{micro} x {batch.micro_batch_size} samples{derived}\n"
        "Loss: a mean over tokens where training_step returns their number as weight; without, samples count alike."
    )


def _rest(plan: RunPlan) -> Iterator[RenderableType]:
    """Yield environment, start and folder."""
    if plan.env:
        yield _heading("Environment of the workers")
        yield Text("\n".join(environment_lines(plan)))
    facts = {name: value for name, value in plan.facts.items() if name not in ("exported", "parameters", "trainable")}
    if facts:
        yield _heading("Known beforehand")
        yield Text("\n".join(f"{name}: {value}" for name, value in facts.items()))
    yield _heading("Folder")
    start = f"\nstarts from {short(plan.ckpt_path)}" if plan.ckpt_path else ""
    yield Text(short(plan.run_dir) + start, overflow="fold")
