"""`--help` and `plugins`: what there is, from the catalogue; neither torch nor Hydra is imported."""

from __future__ import annotations

import re
from typing import Any

import yaml
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from framework import paths
from framework.catalog import NONE, Catalog, Option, catalog, recipes
from framework.errors import UsageError
from framework.objects import locate
from framework.plugin_manager import OBJECT_SLOTS, Package, Packages, first_line, packages

PROGRAM = "python -m framework"

EXAMPLES = (
    (f"{PROGRAM} +strategy=fsdp +pp=gpipe", "4 ranks here: 2 stages, each sharded over 2 ranks"),
    (f"{PROGRAM} strategy=ddp devices=4 trainer.max_steps=100", "the + may be left out"),
    (f"{PROGRAM} plan +tp=dtensor tp.size=4", "show what would run; start nothing"),
    (f"{PROGRAM} -cn gpt_tiny seed=1", "a recipe, with one setting changed"),
    (f"{PROGRAM} -m strategy=ddp,fsdp pp=none,gpipe", "a sweep: one job a combination"),
    (f"{PROGRAM} model._target_=my_project.MyModule", "any LightningModule of your own"),
    (f"{PROGRAM} ledger runs/mine", "which samples it was trained on: none twice, none left out"),
    (f"{PROGRAM} ckpt_path=last run_dir=runs/mine", "go on where that run stopped, under any mix"),
)

COMMANDS = {
    "train": "run (the default)",
    "validate": "run the validation set once, no training",
    "plan": "check everything and show what would run; starts nothing",
    "verify": "train a few steps under a mix, or under many, and hold them against one process without a framework",
    "ledger": "prove from a run's records that each sample was trained once, over restarts and resizes",
    "export": "write the weights of a run whole, for other programs: safetensors, hf or torch",
    "plugins": "what is installed, what it adds, what is wrong with it",
}


def help_page() -> RenderableType:
    """Return the whole help; printed for `--help`."""
    shown = catalog()
    usage = Text(f"{PROGRAM} [command] [+concern=option ...] [setting=value ...]", style="bold")
    return Group(
        usage,
        Text("\nCommands", style="bold"),
        _pairs({**COMMANDS, **packages().commands}),
        Text("\nConcerns and their options", style="bold"),
        _concerns(shown),
        Text("\nSettings", style="bold"),
        _settings(),
        Text("\nRecipes (-cn NAME)", style="bold"),
        _pairs(recipes()),
        Text("\nExamples", style="bold"),
        _pairs(dict(EXAMPLES)),
        Text("\nFlags", style="bold"),
        _pairs(
            {
                "-m": "sweep over values separated by commas",
                "-cn NAME": "start from a recipe instead of train",
                "-cd FOLDER": "also look for recipes and options in FOLDER",
                "--cfg job": "print the composed settings",
            }
        ),
    )


def _pairs(rows: dict[str, str]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for left, right in rows.items():
        table.add_row(Text(f"  {left}"), Text(right))
    return table


def _concerns(shown: Catalog) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    default = defaults()
    for slot, doc in shown.slots.items():
        mark = "" if slot in default else "+"
        chosen = f" (default {default[slot]})" if default.get(slot) else ""
        table.add_row(Text(f"  {mark}{slot}=", style="bold"), Text(f"{doc}{chosen}", style="bold"))
        for name, option in sorted(shown.options[slot].items()):
            table.add_row(Text(f"      {name}"), Text(option.doc))
        if not shown.options[slot]:
            table.add_row(Text(f"      {NONE}"), Text("the only option so far"))
    return table


def _settings() -> Table:
    """Show the lines of `train.yaml` with their comments, so that there is one place that explains a setting."""
    return _pairs(setting_docs((paths.conf_dir() / "train.yaml").read_text(encoding="utf-8")))


def setting_docs(text: str) -> dict[str, str]:
    """Return `key=default` -> comment of every setting in the text of `train.yaml`, `trainer.` before those of it."""
    rows = {}
    section = ""
    for line in text.splitlines():
        found = re.match(r"^( *)([a-z_]+):(.*?)(?: #\s*(.*))?$", line)
        if not found:
            continue
        indent, name, value, comment = found.groups()
        if not indent:
            section = "" if value.strip() else f"{name}."
        if comment and section in ("", "trainer."):
            default = value.strip()
            rows[f"{section}{name}" + ("" if default == "null" else f"={default}")] = comment
    return rows


def defaults() -> dict[str, str]:
    """Return what `train.yaml` chooses: slot -> option, or options separated by commas."""
    listed = yaml.safe_load((paths.conf_dir() / "train.yaml").read_text(encoding="utf-8"))["defaults"]
    chosen = {slot: value for entry in listed if isinstance(entry, dict) for slot, value in entry.items()}
    return {slot: ",".join(value) if isinstance(value, list) else str(value) for slot, value in chosen.items()}


# -- plugins -----------------------------------------------------------------------------------------------------


def plugins_page() -> tuple[RenderableType, int]:
    """Return the table of all plugins with what is wrong below it, and the number of conflicts and broken ones."""
    installed, shown = packages(), catalog()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("name", "version", "where", "adds", "hooks", "state"):
        table.add_column(name, overflow="fold")
    faults = []
    for package in installed.all:
        options = shown.by_package(package.name) if package.state == "loaded" else []
        hooks, broken = _hooks(package, options, installed)
        faults += broken
        table.add_row(
            Text(package.name),
            Text(package.label),
            Text(package.where),
            Text(_adds(package, options)),
            Text(" ".join(sorted(hooks))),
            Text(package.state, style="green" if package.state == "loaded" else "red"),
        )
    lines = [package.complaint() for package in installed.unusable] + shown.warnings + faults
    return Group(table, *(Text(line, style="red") for line in lines)), len(installed.unusable)


def _adds(package: Package, options: list[Option]) -> str:
    slots: dict[str, list[str]] = {}
    for option in options:
        slots.setdefault(option.slot, []).append(option.name)
    lines = [f"{slot}={','.join(sorted(names))}" for slot, names in slots.items()]
    lines += [f"concern {slot}" for slot in package.groups]
    lines += [f"command {name}" for name in package.commands]
    return "\n".join(lines)


def _hooks(package: Package, options: list[Option], installed: Packages) -> tuple[set[str], list[str]]:
    """Return the hooks that a package and its options implement, and a sentence for each class that is broken."""
    hooks: set[str] = set()
    faults = []
    if package.module is not None:
        hooks |= _implemented(package.module)
    for option in options:
        if option.slot in OBJECT_SLOTS:
            continue  # objects implement no hooks, and importing them would import torch
        try:
            hooks |= _implemented(locate(str(option.values.get("_target_", ""))))
        except UsageError as error:
            faults.append(f"{option.words} of {package.label} can't be used: {first_line(error)}.")
    return hooks, faults


def _implemented(owner: Any) -> set[str]:
    found = (name for name in dir(owner) if hasattr(getattr(owner, name, None), "framework_impl"))
    return set(found)
