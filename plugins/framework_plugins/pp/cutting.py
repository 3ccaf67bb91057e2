"""How a model is cut: between its blocks, or at any weight by cost; which of the two fits, and where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from framework import Problem, RunPlan
from framework.errors import PlanError
from framework.example_batch import example_batch
from framework.parts import find_blocks
from framework.plugin_manager import manager_for
from framework.survey import Survey, SurveyError, cuts, holders, survey

if TYPE_CHECKING:
    from framework_plugins.pp.schedules import Schedule

SURVEY = "_pipeline_survey"
"""Attribute of a LightningModule that keeps its survey."""


def by_blocks(option: Schedule, model: nn.Module, stages: int) -> bool:
    """Return whether the model is cut between blocks.

    `auto`: if the setting names blocks; else if the model's weights lie for the most part in one list of blocks, long
    enough, none is tied to another, and nothing that comes after the list looks as if it were called before it.
    """
    if option.cut != "auto" or option.blocks or option.split or option.balance:
        return option.cut == "blocks" or (option.cut == "auto" and not option.balance)
    blocks = find_blocks(model)
    if len({name.rpartition(".")[0] for name in blocks}) != 1 or len(blocks) < stages:
        return False
    inside = sum(parameter.numel() for block in blocks.values() for parameter in block.parameters())
    if 2 * inside < sum(parameter.numel() for parameter in model.parameters()) or tied(model):
        return False
    return not any(True for _ in _tables_after(model, next(iter(blocks)).rpartition(".")[0]))


def _tables_after(model: nn.Module, path: str) -> Iterator[str]:
    """Yield modules with buffers and no weights, registered after the list: tables that blocks are given.

    Models of transformers have that of their positions there.
    """
    words = path.split(".")
    for depth, onward in enumerate(words):
        children = list(model.get_submodule(".".join(words[:depth])).named_children())
        later = [name for name, _ in children].index(onward) + 1
        for name, child in children[later:]:
            if any(True for _ in child.buffers()) and not any(True for _ in child.parameters()):
                yield name


def tied(model: nn.Module) -> list[tuple[str, str]]:
    """Return pairs of names of one parameter."""
    seen: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return [(seen[p], name) for name, p in named if seen.setdefault(p, name) != name]


def survey_of(model: Any, plan: RunPlan, device: torch.device) -> Survey | None:
    """Return what following the step method showed, kept on the model; None if there is no data to follow it with.

    Raises:
        SurveyError: it can't be followed.
    """
    if SURVEY not in model.__dict__:
        batch = example_batch(model, plan, device)
        if batch is None:
            model.__dict__[SURVEY] = None
            return None
        precision = manager_for(plan).hook.make_precision(plan=plan)
        if precision is None:
            model.__dict__[SURVEY] = survey(model, batch)
        else:
            with precision.train_step_context():
                model.__dict__[SURVEY] = survey(model, precision.convert_input(batch), precision.convert_module)
    found: Survey | None = model.__dict__[SURVEY]
    return found


def complaints(option: Schedule, plan: RunPlan, model: Any, stages: int) -> list[Problem]:
    """Say why the model can't be cut by cost into so many stages."""
    words = f"pp={option.schedule}"
    name = type(model).__name__
    try:
        found = survey_of(model, plan, torch.device("cpu"))
        if found is None:
            return _perhaps_on_one_rank(option, plan, model)
        chosen = places(option, found, stages)
        holders(found, chosen, dict.fromkeys(n for n, _ in [*model.named_parameters(), *model.named_buffers()]))
    except SurveyError as error:
        fix = "pp.cut=blocks, or pp=none" if find_blocks(model) else "pp=none"
        return [Problem(words, f"{name} can't be cut by cost: {error}", fix)]
    except ValueError:
        assert found is not None
        here = [str(mark) for mark, size in zip(found.marks[1:], found.sent[1:], strict=True) if size is not None]
        listed = ", ".join(here[:3]) + (", ..." if len(here) > 3 else "") if here else "none"
        reason = f"{name} can be cut in {len(here)} places ({listed}), too few for {stages} stages"
        fix = f"pp.size={(len(here) + 1) // option.stages_per_rank}" if here else "pp=none"
        return [Problem(words, reason, fix)]
    return _on_one_rank(option, plan, model, found, chosen)


def _perhaps_on_one_rank(option: Schedule, plan: RunPlan, model: Any) -> list[Problem]:
    """What `_on_one_rank` would say of some cuts, where the cut isn't known yet."""
    if option.stages_per_rank == 1 or plan.mesh.data_ranks == 1 or not tied(model):
        return []
    first, other = tied(model)[0]
    reason = f"one rank may come to hold the tied weight '{first}', '{other}' for two stages of its own"
    return [Problem(f"pp={option.schedule}", reason, "pp=gpipe or pp=1f1b")]


def _on_one_rank(option: Schedule, plan: RunPlan, model: Any, found: Survey, chosen: Sequence[int]) -> list[Problem]:
    """A shared weight that one rank holds for two of its stages can't be managed by two data-parallel wraps."""
    if option.stages_per_rank == 1 or plan.mesh.data_ranks == 1:
        return []
    held = holders(found, chosen, dict.fromkeys(name for name, _ in model.named_parameters()))
    for name, stages in held.items():
        ranks = [option.place(stage, plan.mesh.pp) for stage in stages]
        if len(set(ranks)) < len(ranks):
            reason = f"one rank would hold '{name}' for stages {', '.join(map(str, stages))} of its own"
            return [Problem(f"pp={option.schedule}", reason, "pp=gpipe or pp=1f1b")]
    return []


def places(option: Schedule, found: Survey, stages: int) -> list[int]:
    """Return the segments that the second and later stages begin with; ValueError if there are too few."""
    return cuts(found.costs(option.balance or "flops"), stages, found.sent)


def found_places(option: Schedule, model: Any, plan: RunPlan, stages: int, device: torch.device) -> Any:
    """Return the survey and the places in a rank; PlanError if the model can't be cut, None if nothing is known."""
    problems = complaints(option, plan, model, stages)
    if problems:
        raise PlanError(problems)
    found = survey_of(model, plan, device)
    return None if found is None else (found, places(option, found, stages))
