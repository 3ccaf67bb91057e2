"""`Blueprint`: plain, resolved settings on their way to a plan; values, options and their mix are checked together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework import objects
from framework.catalog import NONE, catalog
from framework.draft import Draft
from framework.errors import PlanError, Problem, UsageError
from framework.guard import check_ranges, settings, typed
from framework.legality import requirements_of
from framework.options import describe_component, instance, spoken, typeable, unknown_arguments, unknown_names
from framework.plan import STARTS, Requirements, RunPlan
from framework.plugin_manager import OBJECT_SLOTS, manager_of
from framework.schema import LIST_SLOTS, RunConfig, TrainerSettings

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_TRAINER = {item.name for item in fields(TrainerSettings)}

NEEDED = ("model", "data", "launcher")
"""Concerns without which nothing can run."""


@dataclass
class Blueprint:
    """Everything that was asked, before it is known to be possible.

    Attributes:
        values: root settings, `trainer` and slots, in plain containers, interpolations resolved.
        choices: slot -> option.
        command: `fit` or `validate`.
        run_id: for the plan.
        problems: complaints so far.
        broken: keys of the root of which there was a complaint.
        here: whether the run is meant for this host and process; False: what only they can't do goes to `elsewhere`.
        elsewhere: why the plan couldn't start here.
        model: the LightningModule on the meta device, once `plan` has built it.
        facts: what was found out about model and data then.
        described: options that were held against their dataclass, by slot, option and values; of all variations.
        roots: the same for the root and `trainer`, of those without a complaint.
    """

    values: dict[str, Any]
    choices: dict[str, str]
    command: str = "fit"
    run_id: str = ""
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    here: bool = True
    elsewhere: list[Problem] = field(default_factory=list)
    model: LightningModule | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    described: dict[str, tuple[dict[str, Any], list[Problem]]] = field(default_factory=dict)
    roots: dict[str, DictConfig] = field(default_factory=dict)
    wanted: dict[tuple[str, str], Requirements | None] = field(default_factory=dict)

    def vary(self, words: Sequence[str], devices: int | str = "auto") -> Blueprint:
        """Return this run under another mix, in milliseconds: nothing is composed again, model and facts are shared.

        Args:
            words: `slot=option`, `slot=none` and `slot.setting=value` for slots that are components.
            devices: ranks in all.
        """
        values, choices = {**self.values, "devices": devices}, dict(self.choices)
        for word in words:
            key, _, text = word.partition("=")
            slot, _, setting = key.partition(".")
            if setting:
                values[slot] = {**values[slot], setting: yaml.safe_load(text)}
                continue
            choices[slot] = text
            values[slot] = None if text == NONE else self.option_values(slot, text, values)
        return replace(self, values=values, choices=choices, problems=[], broken=set(), elsewhere=[])

    def option_values(self, slot: str, option: str, values: Mapping[str, Any]) -> Any:
        """Return the settings of an option's YAML, resolved in the tree of `values`."""
        if "${" not in catalog().options[slot][option].text:
            return dict(catalog().options[slot][option].values)
        tree = OmegaConf.create({**values, slot: catalog().options[slot][option].values})
        return OmegaConf.to_container(tree[slot], resolve=True)

    def option(self, slot: str, name: str) -> tuple[dict[str, Any], Any] | None:
        """Describe and build an option that wasn't asked for, with the defaults of its YAML; None if that can't be."""
        try:
            spec, problems = self._describe(slot, name, self.option_values(slot, name, self.values))
        except (OmegaConfBaseException, KeyError):
            return None
        built = None if problems else instance(slot, spec, problems)
        return None if problems else (spec, built)

    def wants(self, slot: str, name: str) -> Requirements | None:
        """Return what an option needs, gives and excludes with its defaults; None if it can't be built with these."""
        if (slot, name) not in self.wanted:
            built = self.option(slot, name)
            self.wanted[slot, name] = (
                None if built is None else requirements_of(manager_of({slot: built[1]})).get(slot, Requirements())
            )
        return self.wanted[slot, name]

    def plan(
        self,
        *,
        model: bool = True,
        before_model: Callable[[], None] | None = None,
        suggest: bool = True,
        force: bool = False,
    ) -> RunPlan:
        """Return the frozen plan.

        Args:
            model: whether to build the model on the meta device and to check the plan against it.
            before_model: called before torch is imported, if nothing was wrong so far.
            suggest: whether to look for the nearest mixes that work, where this one doesn't.
            force: for tests of what is refused: return a plan in spite of complaints about the mix.

        Raises:
            PlanError: with all complaints, and the nearest mixes that work where the mix is the cause.
        """
        root = self._root()
        specs = self._specs()
        components = {
            slot: instance(slot, spec, self.problems)
            for slot, spec in specs.items()
            if slot not in OBJECT_SLOTS and spec
        }
        for slot in OBJECT_SLOTS:
            self.problems += unknown_arguments(slot, specs.get(slot) or {})
        if self.problems:
            raise PlanError(self.problems)  # at once: importing torch to find more would take seconds
        draft = Draft(self, root, specs, components, dict(self.facts))
        if self.model is not None:
            return draft.finish(suggest, force)
        if not model or draft.complaints():
            if not model or draft.result is None:
                return draft.finish(suggest)
        elif before_model is not None:
            before_model()
        self._build(specs, draft)
        draft.facts |= self.facts
        return draft.finish(suggest, force)

    def _build(self, specs: Mapping[str, Any], draft: Draft) -> None:
        """Build the model, and ask the data what it is."""
        for slot in OBJECT_SLOTS:
            spec = {name: value for name, value in (specs.get(slot) or {}).items() if name != "option"}
            self.problems += objects.check(slot, spec)
        if self.problems:
            raise PlanError([*draft.complaints(), *self.problems])
        self._build_model(specs["model"], draft)
        self.facts |= data_facts(specs["data"])

    def _root(self) -> DictConfig:
        """Check types and ranges of the root and of `trainer`."""
        plain = {name: self.values[name] for name in settings() if name in self.values and name != "trainer"}
        key = f"{plain!r} {self.values.get('trainer')!r}"
        if key in self.roots:
            return self.roots[key]
        root, problems = typed(RunConfig, plain)
        said = {problem.setting.partition("=")[0].lstrip("+") for problem in self.problems}
        given = {
            name: value
            for name, value in (self.values.get("trainer") or {}).items()
            if name in _TRAINER and f"trainer.{name}" not in said
        }
        root.trainer, more = typed(TrainerSettings, given, "trainer.")
        self.problems += problems + more
        self.broken |= {problem.setting.partition("=")[0] for problem in self.problems}
        self.problems += [
            problem for problem in check_ranges(root) if problem.setting.partition("=")[0] not in self.broken
        ]
        path = root.ckpt_path
        if path is not None and path not in STARTS and "://" not in path and not Path(path).exists():
            self.problems.append(Problem(f"ckpt_path={path}", "there is no such file or folder"))
        if not self.problems:
            self.roots[key] = root
        return root

    # -- options ---------------------------------------------------------------------------------------------------

    def _specs(self) -> dict[str, Any]:
        """Describe what is on: slot -> plain description with types converted."""
        specs: dict[str, Any] = {}
        for slot in catalog().slots:
            value = self.values.get(slot)
            if slot not in self.values:
                continue
            if slot in self.broken:
                self.problems += unknown_names(slot, self.choices.get(slot, ""), value)
                continue
            if not value:
                if slot in NEEDED:
                    known = " or ".join(f"{slot}={option}" for option in catalog().of(slot) if option != NONE)
                    self.problems.append(Problem(f"{slot}={NONE}", f"nothing can run without a {slot}", known))
            elif slot in LIST_SLOTS:
                specs[slot] = self._list(slot, value)
            elif not isinstance(value, Mapping):
                self.problems.append(Problem(f"{slot}={value}", f"it isn't an option of {slot}", typeable(slot)))
            elif "_target_" not in value:
                self.problems += [
                    Problem(f"{slot}.{key}={item}", f"no {slot} is chosen", typeable(slot))
                    for key, item in value.items()
                ]
            elif slot in OBJECT_SLOTS:
                if "option" in value:
                    self.problems.append(Problem(f"{slot}.option", "the name is taken; the argument must be renamed"))
                specs[slot] = {"_target_": value["_target_"], "option": self.choices.get(slot, "custom"), **value}
            else:
                spec, problems = self._describe(slot, self.choices.get(slot, "custom"), value)
                self.problems += problems
                specs[slot] = spec
        return specs

    def _describe(self, slot: str, option: str, value: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        key = f"{slot}={option} {value!r}"
        if key not in self.described:
            self.described[key] = describe_component(slot, option, value)
        spec, problems = self.described[key]
        return copy.deepcopy(spec), list(problems)

    def _list(self, slot: str, value: Any) -> dict[str, Any]:
        """Describe loggers or callbacks: name -> description."""
        if not isinstance(value, Mapping):
            self.problems.append(Problem(f"{slot}={value}", "it is a list of options", f"'{slot}=[...]'"))
            return {}
        for name, entry in value.items():
            if not isinstance(entry, Mapping) or "_target_" not in entry:
                reason = f"{slot}.{name} isn't on, or has no _target_"
                self.problems.append(Problem(f"{slot}.{name}", reason, f"{slot}.{name}._target_=package.module.Class"))
        return dict(value)

    def _build_model(self, spec: Mapping[str, Any], draft: Draft) -> None:
        """Build the model, note how large it is."""
        from framework.compose import model_on_meta

        try:
            self.model, why_not = model_on_meta(spec)
        except UsageError as error:
            raise PlanError([*draft.complaints(), Problem("model", str(error))]) from error
        if not hasattr(self.model, "training_step"):
            name = f"{type(self.model).__module__}.{type(self.model).__qualname__}"
            raise PlanError([Problem(f"model._target_={spec['_target_']}", f"{name} is no LightningModule")])
        self.facts |= {
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "trainable": sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad),
        }
        if why_not:
            self.facts["built_with_weights"] = f"The model can't be built on the meta device ({why_not})"


def data_facts(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the data says about itself (`facts()`: hash, number of samples); empty if it says nothing.

    Raises:
        PlanError: the data can't be built or read.
    """
    if not hasattr(objects.locate(spec["_target_"]), "facts"):
        return {}
    try:
        return dict(objects.build(spec).facts())
    except (UsageError, OSError, ValueError, ImportError) as error:
        raise PlanError([spoken("data", error)]) from error
