"""Checkpoints between Lightning and the store: what is saved, under which names, and how another mix gets it back.

Names in a checkpoint: `model.<name>`, `optimizer.<number>.<parameter>.<key>`, `meta.<keys>` (tensors inside other
state), `rank.<rank>.<name>` (what callbacks keep for each rank), and where weights are averaged `current.<name>`: those
that are trained, and `model` is their average.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from framework import versions
from framework.agreement import gather, ranks, together
from framework.checkpoint_files import CheckpointError
from framework.encoding import check_pieces, decode, encode, tensor_entries, tensor_paths
from framework.going_on import merged
from framework.plan import Checkpoint, MeshSpec
from framework.state import (
    Entries,
    ModuleState,
    clean,
    flatten_optimizer,
    module_state,
    optimizer_template,
    restore_optimizer,
    state_of,
)

__all__ = [
    "CheckpointError",
    "CheckpointStore",
    "load_checkpoint",
    "load_module_state",
    "save_checkpoint",
]

log = logging.getLogger(__name__)

RANK_STATE = "rank_state"
"""Key of Lightning's checkpoint dict under which callbacks may put tensors of this rank alone: name -> tensor."""
AVERAGED = "current_model_state"
"""Key under which Lightning's averaging callbacks put the weights that are trained; then `state_dict` is an average."""
CHANGED = "changed"
"""Key under which each rank tells which parameters were frozen, thawed or given to an optimizer since its run began."""
TRAINED = "current."
"""Names of these weights in a checkpoint begin so."""
_OWN_KEYS = ("state_dict", "optimizer_states", RANK_STATE, AVERAGED, CHANGED, "hparams_type", "datamodule_hparams_type")
"""Keys of Lightning's dict that aren't carried over as they are; stored hyper-parameters are plain: no type needed."""


class CheckpointStore(Protocol):
    """Reads and writes checkpoints; returned by the hook `make_checkpoint_io`.

    `save` and `load` are collective: all ranks call them with the same path, and all raise CheckpointError if one
    can't do its part.
    """

    def save(self, path: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Write a checkpoint. What `tensors` hold may change as soon as this returns; it is durable after `wait`.

        Raises what went wrong with the save before, if that wasn't told yet.

        Args:
            path: directory to make. A complete checkpoint there is replaced, but not before the new one is complete.
            tensors: name -> what this rank holds: plain tensors whole (of equal names, the lowest rank's is
                written), DTensors each rank its shard. Ranks may pass different names.
            meta: plain JSON data with an int `step`; rank 0's is written. Each rank's has the `clock`, as
                `framework.versions.Clock.to_dict` gives it.
        """

    def load(self, path: str, tensors: Mapping[str, Tensor], scope: Sequence[str] = ()) -> Mapping[str, Any]:
        """Fill `tensors` in place, whatever layout wrote them, and return `meta`.

        Args:
            path: a complete checkpoint.
            tensors: what this rank wants; all of it must be there with its shape. Values are cast to the tensors'
                dtypes.
            scope: prefixes; each saved tensor whose name begins so must be wanted by some rank.
        """

    def wait(self) -> None:
        """Return when no save is in flight; raise CheckpointError on all ranks if the last one failed. Collective.

        A store whose `save` returns when all is durable needs no such method.
        """

    def entries(self, path: str) -> Entries:
        """Names, dtypes and global shapes of all saved tensors. Not collective."""

    def read_meta(self, path: str) -> Mapping[str, Any]:
        """Return `meta` alone. Not collective. Raises CheckpointError if the checkpoint isn't complete."""

    def is_complete(self, path: str) -> bool:
        """Tell whether `path` holds a complete checkpoint. Not collective."""

    def newest_complete(self, run_dir: str) -> Checkpoint | None:
        """Return the newest complete checkpoint of a run, None if none was ever saved. Not collective.

        Raises CheckpointError if there are checkpoints and all are damaged.
        """

    def remove(self, path: str) -> None:
        """Delete a checkpoint. To be called on one rank."""


def save_checkpoint(
    store: CheckpointStore, checkpoint: Mapping[str, Any], path: str, mesh: MeshSpec, life: int = 1
) -> None:
    """Write Lightning's checkpoint dict. Collective.

    Args:
        store: where to.
        checkpoint: what `trainer.dump_checkpoint` made: `state_dict` holds this rank's tensors
            (`module_state(...).all_names()`), `optimizer_states` each optimizer's `state.optimizer_state(...)`. What
            isn't a tensor is taken from rank 0.
        path: directory to make.
        mesh: of this run; tells at loading whether `rank_state` still fits.
        life: of the run, as `versions` counts; rank 0's is taken.

    Raises:
        CheckpointError: on all ranks, if any can't save, or they hold states of different steps.
    """
    what = f"Saving {path}"
    model, trained = state_of(checkpoint.get("state_dict", {})), state_of(checkpoint.get(AVERAGED, {}))
    model.extra |= trained.extra
    optimizers = checkpoint.get("optimizer_states", [])
    own = checkpoint.get(RANK_STATE, {})
    tensors = together(what, lambda: _named_tensors(model, trained, optimizers, own), CheckpointError)
    rest = {key: value for key, value in checkpoint.items() if key not in _OWN_KEYS}
    reports = gather(
        {
            "kept": tensor_paths(rest),
            "held": {*model.tensors, *model.ties},
            "absent": model.absent,
            "ties": model.ties,
            "changed": checkpoint.get(CHANGED),
            "extra": model.extra,
            "optimizers": [_groups(state) for state in optimizers],
            "step": int(checkpoint.get("global_step", 0)),
            "life": life,
        }
    )
    groups = [mesh.data_rank(rank) if rank < mesh.world_size else rank for rank in range(len(reports))]
    steps = [report["step"] for report in reports]
    at = versions.joined(what, reports[0]["life"], groups, steps).to_dict()

    def build() -> dict[str, Any]:
        held = set().union(*(report["held"] for report in reports))
        lost = set().union(*(report["absent"] for report in reports)) - held
        if lost:
            raise CheckpointError(f"No rank holds {_some(lost)}: still on the meta device everywhere")
        check_pieces([report["kept"] for report in reports])
        meta_tensors: dict[str, Tensor] = {}
        meta = {
            "step": reports[0]["step"],
            "clock": at,
            "mesh": dataclasses.asdict(mesh),
            CHANGED: merged([report["changed"] for report in reports if report["changed"] is not None]),
            "ties": {name: first for report in reports for name, first in report["ties"].items()},
            "lightning": encode(rest, meta_tensors),
            "extra": encode(
                {name: value for report in reports for name, value in report["extra"].items()}, meta_tensors
            ),
            "optimizers": encode(_merge([report["optimizers"] for report in reports]), meta_tensors),
        }
        tensors.update(meta_tensors)
        return meta

    meta = together(what, lambda: build() if ranks()[0] == 0 else {"clock": at}, CheckpointError)
    store.save(path, tensors, meta)


def _named_tensors(
    model: ModuleState, trained: ModuleState, optimizers: Sequence[dict[str, Any]], rank_state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.tensors.items()}
    tensors |= {f"{TRAINED}{name}": tensor.detach() for name, tensor in trained.tensors.items()}
    for number, state in enumerate(optimizers):
        tensors |= flatten_optimizer(state, f"optimizer.{number}.")
    return tensors | {f"rank.{ranks()[0]}.{name}": tensor for name, tensor in rank_state.items()}


def _groups(state: Mapping[str, Any]) -> dict[str, Any]:
    """One rank's parameter groups without its tensors."""
    groups = [
        {"values": {key: value for key, value in group.items() if key != "params"}, "names": list(group["params"])}
        for group in state["param_groups"]
    ]
    return {"class": state["class"], "groups": groups, "own": state.get("own", {})}


def _merge(optimizers: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Join the groups of all ranks (outer: rank, inner: optimizer): stages hold different parameters of a group."""
    merged = []
    for number, first in enumerate(optimizers[0]):
        groups = [{"values": group["values"], "names": dict.fromkeys(group["names"])} for group in first["groups"]]
        for of_rank in optimizers[1:]:
            for index, group in enumerate(of_rank[number]["groups"]):
                if index < len(groups) and groups[index]["values"] == group["values"]:
                    groups[index]["names"].update(dict.fromkeys(group["names"]))
                else:
                    groups.append({"values": group["values"], "names": dict.fromkeys(group["names"])})
        merged.append(
            {
                "class": first["class"],
                "own": first["own"],
                "groups": [{"values": group["values"], "names": list(group["names"])} for group in groups],
            }
        )
    return merged


def load_checkpoint(
    store: CheckpointStore,
    path: str,
    module: LightningModule,
    optimizers: Sequence[Optimizer] | None = None,
    *,
    mesh: MeshSpec | None = None,
    strict: bool = True,
    averaging: bool = False,
) -> dict[str, Any]:
    """Restore model and optimizers in place and return the rest as Lightning's checkpoint dict. Collective.

    To be called when the model has its final layout and the optimizers exist.

    Args:
        store: where from.
        path: a complete checkpoint, of any mix.
        module: to fill.
        optimizers: to fill; None = weights only (validation, a warm start).
        mesh: of this run. `rank_state` is in the result only if the checkpoint's mesh is the same.
        strict: False lets names be missing on either side.
        averaging: whether the run averages weights, and so takes those that are trained apart from their average.

    Returns:
        Lightning's dict; its `state_dict` holds the module's own, now loaded, tensors, so that `on_load_checkpoint`
        may replace some (`load_module_state` puts those back).

    Raises:
        CheckpointError: on all ranks: not complete, names or shapes that differ, other optimizers.
    """
    path = str(Path(path).resolve())
    what = f"Loading {path}"
    live = module_state(module)
    entries, meta = together(what, lambda: (store.entries(path), store.read_meta(path)), CheckpointError)
    versions.check_same(what, gather(meta.get("clock")))
    averaged = optimizers is not None and any(name.startswith(TRAINED) for name in entries)

    def build() -> dict[str, Tensor]:
        _check(path, meta, live, optimizers)
        if averaged and not averaging:
            raise CheckpointError(
                f"{path} holds an average of weights beside those that were trained, and no callback of this run takes "
                "it: add the one that made it (EMAWeightAveraging), or start a new run from its weights"
            )
        template = {f"model.{name}": tensor.detach() for name, tensor in live.tensors.items()}
        if averaged:
            template |= {f"{TRAINED}{name}": torch.zeros_like(t.detach()) for name, t in live.tensors.items()}
        for number, optimizer in enumerate(optimizers or ()):
            template |= optimizer_template(module, optimizer, f"optimizer.{number}.", entries)
        if mesh is not None and dataclasses.asdict(mesh) == meta["mesh"]:
            template |= _empty(
                {name: entry for name, entry in entries.items() if name.startswith(f"rank.{ranks()[0]}.")}
            )
        template |= _empty(tensor_entries(dict(meta)))
        return template if strict else {name: tensor for name, tensor in template.items() if name in entries}

    template = together(what, build, CheckpointError)
    scope = ("model.", *(("optimizer.", TRAINED) if optimizers is not None else ())) if strict else ()
    store.load(path, template, scope)
    _report_casts(template, entries)
    if not strict:
        _report_gaps(live, entries)
    result = together(what, lambda: _finish(meta, live, module, optimizers or (), template), CheckpointError)
    if averaged:
        first = {name: name for name in live.tensors} | live.ties
        result[AVERAGED] = {
            raw: template[f"{TRAINED}{first[name]}"] if (name := clean(raw)) in first else value
            for raw, value in module.state_dict().items()
        }
    return result


def _empty(entries: Entries) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in entries.items()}


def _check(path: str, meta: Mapping[str, Any], live: ModuleState, optimizers: Sequence[Optimizer] | None) -> None:
    for name, first in meta["ties"].items():
        if name in live.tensors and first in live.tensors:
            raise CheckpointError(
                f"{name} was tied to {first} when {path} was saved, but in this run they are two tensors: tie them"
                f" before loading"
            )
    if optimizers is None:
        return
    saved = [optimizer["class"] for optimizer in meta["optimizers"]]
    if not saved:
        raise CheckpointError(
            f"{path} holds weights only, so no run can go on from it: start a new run from its weights"
        )
    now = [type(optimizer).__name__ for optimizer in optimizers]
    if saved != now:
        raise CheckpointError(
            f"{path} was saved with the optimizers {', '.join(saved)}, but this run has {', '.join(now) or 'none'}:"
            f" their state doesn't fit; choose the same, or start a new run"
        )


def _finish(
    meta: Mapping[str, Any],
    live: ModuleState,
    module: LightningModule,
    optimizers: Sequence[Optimizer],
    loaded: Mapping[str, Tensor],
) -> dict[str, Any]:
    result: dict[str, Any] = decode(meta["lightning"], loaded)
    result["state_dict"] = live.detached()
    for name, value in decode(meta["extra"], loaded).items():
        if name in live.extra:
            module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
    saved = decode(meta["optimizers"], loaded)
    for number, optimizer in enumerate(optimizers):
        groups, own = saved[number]["groups"], saved[number].get("own")
        changes = restore_optimizer(module, optimizer, f"optimizer.{number}.", loaded, groups, own)
        for change in changes:
            _say(f"Resumed with the checkpoint's setting of optimizer {number}: {change}")
    prefix = f"rank.{ranks()[0]}."
    rank_state = {name.removeprefix(prefix): tensor for name, tensor in loaded.items() if name.startswith(prefix)}
    if rank_state:
        result[RANK_STATE] = rank_state
    return result


def load_module_state(module: LightningModule, state_dict: Mapping[str, Any]) -> None:
    """Copy those tensors into the module that aren't its own already: replaced by a user's `on_load_checkpoint`.

    `state_dict` holds whole tensors or DTensors like the module's; unknown names raise CheckpointError.
    """
    live = module_state(module).all_names()
    own = {name: tensor.data_ptr() for name, tensor in live.items() if not isinstance(tensor, DTensor)}
    own |= {name: tensor.to_local().data_ptr() for name, tensor in live.items() if isinstance(tensor, DTensor)}
    for name, value in state_dict.items():
        if not isinstance(value, Tensor):
            continue
        if name not in live:
            raise CheckpointError(f"on_load_checkpoint put '{name}' into the state, but the module has no such tensor")
        target = live[name]
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.data_ptr() == own[name] and value.shape == target.shape:
            continue
        with torch.no_grad():
            target.copy_(_like(target, value))


def _like(target: Tensor, value: Tensor) -> Tensor:
    """Lay out a whole tensor, equal on all ranks, like `target`."""
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        # No rank sends anything: each takes its piece.
        return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
    return value


def _report_casts(template: Mapping[str, Tensor], entries: Entries) -> None:
    casts: dict[tuple[torch.dtype, torch.dtype], set[str]] = {}
    for name, tensor in template.items():
        if name in entries and entries[name][0] != tensor.dtype:
            casts.setdefault((entries[name][0], tensor.dtype), set()).add(name)
    for (saved, now), names in casts.items():
        _say(f"Loaded {_some(names)} as {now}, saved as {saved}".replace("torch.", ""))


def _report_gaps(live: ModuleState, entries: Entries) -> None:
    """Say what `strict_loading = False` let pass; collective."""
    names = {f"model.{name}" for name in live.tensors}
    fresh, wanted = set().union(*gather(names - set(entries))), set().union(*gather(names))
    left = {name for name in entries if name.startswith("model.")} - wanted
    if fresh:
        _say(f"strict_loading=False: {_some(fresh)} aren't in the checkpoint and stay as they are")
    if left:
        _say(f"strict_loading=False: nothing in this run takes {_some(left)}")


def _some(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def _say(text: str) -> None:
    if ranks()[0] == 0:
        log.warning(text)
