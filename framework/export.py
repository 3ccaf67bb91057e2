"""`python -m framework export RUN --to safetensors|hf|torch`: the weights of a checkpoint, whole, for other programs.

One process reads the pieces that any mix has written, a few tensors at a time, each byte checked against its hash, and
writes them whole. Nothing that lies in the run's folder is executed: which store reads it, and which class knows the
form of Hugging Face, follow from the names of options, looked up among what is installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework import checkpoint_files as files
from framework.catalog import catalog
from framework.errors import EXIT_OK, UsageError
from framework.guide import PROGRAM
from framework.job import read_plan
from framework.objects import locate
from framework.plan import RunPlan

if TYPE_CHECKING:
    from torch import Tensor

    from framework.checkpoint import CheckpointStore

FORMS = ("safetensors", "hf", "torch")
SHARD_BYTES = 2 * 10**9
"""A file of safetensors is no larger, unless one tensor is: what is in memory at a time."""
PREFIX = "model."


def main(words: Sequence[str]) -> int:
    """Run the command; return 0, or raise UsageError or CheckpointError in a sentence."""
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} export", description="Write the weights of a checkpoint, whole.")
    parser.add_argument("run", metavar="RUN", help="folder of a run (its newest checkpoint), or of a checkpoint")
    parser.add_argument("--to", choices=FORMS, default="safetensors", help="form (safetensors)")
    parser.add_argument("--out", type=Path, help="folder to make (RUN/export-FORM)")
    flags = parser.parse_args(list(words))
    checkpoint, run_dir = _find(Path(flags.run).resolve())
    plan = read_plan(run_dir)
    out = flags.out or run_dir / f"export-{flags.to}"
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"{out} isn't empty: type --out FOLDER, or move it away.")
    written = export(checkpoint, plan, flags.to, out)
    print(f"{checkpoint} -> {out}")
    print(f"  {written['tensors']} tensors, {written['parameters']:,} elements: {', '.join(written['files'])}")
    for name, first in written["ties"].items():
        print(f"  {name} is tied to {first}")
    return EXIT_OK


def _find(path: Path) -> tuple[Path, Path]:
    """Return the checkpoint and the run's folder."""
    if (path / files.META).is_file():
        return files.read_mark(path).path, path.parents[1]
    if not path.is_dir():
        raise UsageError(f"{path}: there is no such folder.")
    newest = files.newest_complete(path)
    if newest is None:
        raise UsageError(f"{path} has no complete checkpoint in {files.folder_of(path)}.")
    return Path(newest.path), path


def export(checkpoint: Path, plan: RunPlan, form: str, out: Path) -> dict[str, Any]:
    """Write a checkpoint's weights and buffers under the names of the user's module.

    Args:
        checkpoint: a complete one.
        plan: of its run.
        form: one of `FORMS`. `hf`: what transformers reads, config included, for a model that has such a form.
        out: folder to make.

    Returns:
        `tensors` and `parameters` (elements) written, `files`, and `ties`: name -> the name under which it is written.

    Raises:
        UsageError: this model has no such form.
        CheckpointError: the checkpoint is damaged.
    """
    prefix, extra = _hugging_face(plan) if form == "hf" else ("", {})
    store = _store()
    entries = {
        name: entry for name, entry in store.entries(str(checkpoint)).items() if name.startswith(PREFIX + prefix)
    }
    if not entries:
        raise UsageError(f"{checkpoint} holds no weights whose names begin with '{prefix}'.")
    cut = len(PREFIX + prefix)
    ties = {
        name.removeprefix(prefix): first.removeprefix(prefix)
        for name, first in store.read_meta(str(checkpoint))["ties"].items()
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, text in extra.items():
        (out / name).write_text(text, encoding="utf-8")
    groups = list(_groups(entries))
    if form == "torch":
        written = _torch(store, checkpoint, groups, cut, ties, out)
    else:
        written = _safetensors(store, checkpoint, groups, cut, ties, out)
    return {
        "tensors": len(entries),
        "parameters": sum(prod(shape) for _, shape in entries.values()),
        "files": [*extra, *written],
        "ties": ties,
    }


def _store() -> CheckpointStore:
    """Return the bundled store."""
    option = locate(catalog().options["checkpoint"]["dcp"].values["_target_"])()
    store: CheckpointStore = option.make_checkpoint_io(plan=None)
    return store


def _hugging_face(plan: RunPlan) -> tuple[str, dict[str, str]]:
    """Return the prefix of the inner model's names, and the files that go beside the weights: name -> text."""
    chosen = plan.chosen("model")
    option = catalog().options["model"].get(chosen or "")
    form = None if option is None else getattr(locate(option.values["_target_"]), "hugging_face_form", None)
    if form is None:
        raise UsageError(
            f"--to hf: {f'model={chosen}' if chosen else 'this model'} has no form of Hugging Face. "
            "Type --to safetensors."
        )
    settings = {key: value for key, value in plan.components["model"].items() if key not in ("_target_", "option")}
    prefix, extra = form(**settings)
    return prefix, extra


def _groups(entries: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the entries in order, as many at a time as fit into one file."""
    group: dict[str, Any] = {}
    held = 0
    for name, (dtype, shape) in entries.items():
        size = prod(shape) * dtype.itemsize
        if group and held + size > SHARD_BYTES:
            yield group
            group, held = {}, 0
        group[name] = (dtype, shape)
        held += size
    yield group


def _read(store: CheckpointStore, checkpoint: Path, group: Mapping[str, Any], cut: int) -> dict[str, Tensor]:
    import torch

    tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in group.items()}
    store.load(str(checkpoint), tensors)
    return {name[cut:]: tensor for name, tensor in tensors.items()}


def _safetensors(
    store: CheckpointStore, checkpoint: Path, groups: Sequence[Any], cut: int, ties: Mapping[str, str], out: Path
) -> list[str]:
    """Write `model.safetensors`, or numbered files and their index, as Hugging Face's libraries read them."""
    from safetensors.torch import save_file

    metadata = {"format": "pt", **{f"tied:{name}": first for name, first in ties.items()}}
    where: dict[str, str] = {}
    total = 0
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = _read(store, checkpoint, group, cut)
        save_file(tensors, out / name, metadata=metadata)
        where |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    written = list(dict.fromkeys(where.values()))
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
        written.append("model.safetensors.index.json")
    return written


def _torch(
    store: CheckpointStore, checkpoint: Path, groups: Sequence[Any], cut: int, ties: Mapping[str, str], out: Path
) -> list[str]:
    """Write `model.pt`: a state dict that `torch.load(..., weights_only=True)` reads, tied names included."""
    import torch

    state: dict[str, Tensor] = {}
    for group in groups:
        state |= _read(store, checkpoint, group, cut)
    torch.save({**state, **{name: state[first] for name, first in ties.items()}}, out / "model.pt")
    return ["model.pt"]
