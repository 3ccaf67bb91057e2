"""`Blueprint`: plain, resolved settings on their way to a plan; values, options and their mix are checked together."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework import legality, objects
from framework.catalog import NONE, catalog
from framework.errors import FrameworkError, PlanError, Problem, UsageError
from framework.guard import check_ranges, settings, typed, unknown_key
from framework.legality import Mix
from framework.plan import RunPlan
from framework.planner import plan_batch, plan_mesh
from framework.plugin_manager import OBJECT_SLOTS, ask_each, manager_of, packages
from framework.schema import LIST_SLOTS, RunConfig, TrainerSettings

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

NEEDED = ("model", "data", "launcher")
"""Concerns without which nothing can run."""

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""One of these is there where torch could find a GPU (NVIDIA, AMD, WSL); without any, torch isn't imported to look."""


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
        model: the LightningModule on the meta device, once `plan` has built it.
    """

    values: dict[str, Any]
    choices: dict[str, str]
    command: str = "fit"
    run_id: str = ""
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    model: LightningModule | None = None

    def plan(self, *, model: bool = True, before_model: Callable[[], None] | None = None) -> RunPlan:
        """Return the frozen plan.

        Args:
            model: whether to build the model on the meta device and to check the plan against it.
            before_model: called before torch is imported, if nothing was wrong so far.

        Raises:
            PlanError: with all complaints, and the nearest mixes that work where the mix is the cause.
        """
        root = self._root()
        specs = self._specs()
        components = {
            slot: _instance(slot, spec, self.problems)
            for slot, spec in specs.items()
            if slot not in OBJECT_SLOTS and spec
        }
        draft = None if self.problems else Draft(self, root, specs, components)
        if model and draft is not None and not draft.complaints() and before_model is not None:
            before_model()
        for slot in OBJECT_SLOTS:
            if model or slot not in ("model", "data"):
                spec = dict(specs.get(slot) or {})
                spec.pop("option", None)
                self.problems += objects.check(slot, spec)
        if draft is None or self.problems:
            raise PlanError(self.problems + ([] if draft is None else draft.complaints()))
        if model:
            self._build_model(specs["model"], draft)
        return draft.finish()

    def _root(self) -> DictConfig:
        """Check types and ranges of the root and of `trainer`."""
        plain = {name: self.values[name] for name in settings() if name in self.values and name != "trainer"}
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
        if path is not None and path != "last" and "://" not in path and not Path(path).exists():
            self.problems.append(Problem(f"ckpt_path={path}", "there is no such file or folder"))
        return root

    # -- options ---------------------------------------------------------------------------------------------------

    def _specs(self) -> dict[str, Any]:
        """Describe what is on: slot -> plain description with types converted."""
        specs: dict[str, Any] = {}
        for slot in catalog().slots:
            value = self.values.get(slot)
            if slot in self.broken or slot not in self.values:
                continue
            if not value:
                if slot in NEEDED:
                    known = " or ".join(f"{slot}={option}" for option in catalog().of(slot) if option != NONE)
                    self.problems.append(Problem(f"{slot}={NONE}", f"nothing can run without a {slot}", known))
            elif slot in LIST_SLOTS:
                specs[slot] = self._list(slot, value)
            elif not isinstance(value, Mapping):
                self.problems.append(Problem(f"{slot}={value}", f"it isn't an option of {slot}", _typeable(slot)))
            elif "_target_" not in value:
                self.problems += [
                    Problem(f"{slot}.{key}={item}", f"no {slot} is chosen", _typeable(slot))
                    for key, item in value.items()
                ]
            elif slot in OBJECT_SLOTS:
                if "option" in value:
                    self.problems.append(Problem(f"{slot}.option", "the name is taken; the argument must be renamed"))
                specs[slot] = {"_target_": value["_target_"], "option": self.choices.get(slot, "custom"), **value}
            else:
                spec, problems = describe_component(slot, self.choices.get(slot, "custom"), value)
                self.problems += problems
                specs[slot] = spec
        return specs

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
        draft.facts |= {
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "trainable": sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad),
        }
        if why_not:
            draft.facts["built_with_weights"] = f"The model can't be built on the meta device ({why_not})"


_TRAINER = {item.name for item in fields(TrainerSettings)}


def _typeable(slot: str) -> str:
    """Return the options of a slot as words."""
    return " or ".join(f"{slot}={option}" for option in catalog().of(slot) if option != NONE)


def describe_component(slot: str, option: str, value: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Hold an option's fields against its dataclass; return its plain description, and what is wrong."""
    target = str(value["_target_"])
    if packages().owner(target) is None:
        tops = ", ".join(sorted({package.top for package in packages().loaded}))
        reason = f"an option of {slot} must belong to an installed plugin; their packages are {tops}"
        return {}, [Problem(f"{slot}._target_={target}", reason, _typeable(slot))]
    try:
        cls = objects.locate(target)
    except UsageError as error:
        return {}, [Problem(f"{slot}={option}", str(error))]
    if not (inspect.isclass(cls) and is_dataclass(cls)):
        return {}, [Problem(f"{slot}={option}", f"{target} must be a dataclass")]
    known = [item.name for item in fields(cls) if item.init]
    given = {str(name): item for name, item in value.items() if name != "_target_"}
    problems = [unknown_key(f"{slot}.{name}", item, slot, known) for name, item in given.items() if name not in known]
    config, more = typed(cls, {name: item for name, item in given.items() if name in known}, f"{slot}.")
    problems += more
    problems += [
        Problem(f"{slot}.{name}", "it must have a value and has none", f"{slot}.{name}=<value>")
        for name in OmegaConf.missing_keys(config)
    ]
    if problems:
        return {}, problems
    plain = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    return {"_target_": target, "option": option, **{name: plain[name] for name in known}}, []


def _instance(slot: str, spec: Mapping[str, Any], problems: list[Problem]) -> Any:
    """Build a component; what its `__post_init__` says is a complaint."""
    from framework.plugin_manager import component

    try:
        return component(spec)
    except PlanError as error:
        problems += error.problems
    except (FrameworkError, ValueError, TypeError, OmegaConfBaseException) as error:
        problems.append(spoken(slot, error))
    return None


def spoken(slot: str, error: Exception) -> Problem:
    """Turn an error's text into a complaint; a text that begins with a setting keeps it."""
    setting, separator, reason = str(error).partition(": ")
    if separator and setting.startswith(f"{slot}.") and " " not in setting:
        return Problem(setting, reason)
    return Problem(slot, str(error))


@dataclass
class Draft:
    """A plan on trial: the mix that was asked, and variations of it while the nearest legal ones are looked for."""

    blueprint: Blueprint
    root: DictConfig
    specs: dict[str, Any]
    components: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    suspects: set[str] = field(default_factory=set)
    result: RunPlan | None = None

    @property
    def mix(self) -> dict[str, str]:
        """Slot -> option of all components."""
        return {slot: self.specs[slot]["option"] for slot in self.components}

    def finish(self) -> RunPlan:
        """Return the plan.

        Raises:
            PlanError: with all complaints.
        """
        problems = self.complaints()
        if not problems:
            assert self.result is not None
            return self.result
        nearest = []
        if self.suspects:
            options = {slot: list(names) for slot, names in catalog().options.items() if slot not in OBJECT_SLOTS}
            nearest = legality.nearest(self.mix, self.suspects, options, self._legal)
        raise PlanError(problems, nearest)

    def complaints(self) -> list[Problem]:
        """Collect everything that is wrong with the mix; leaves the plan in `result` if that could be made."""
        manager = manager_of(self.components)
        needs = legality.requirements_of(manager)
        problems = list(legality.conflicts(self.mix, needs))
        if problems:
            given = legality.words_given(self.mix, needs)
            for slot, need in needs.items():
                lacking, hit = need.needs - given.keys(), need.excludes & given.keys()
                if lacking or hit:
                    self.suspects |= {
                        slot,
                        *(word.partition("=")[0] for word in lacking),
                        *(given[word] for word in hit),
                    }
        try:
            self.result = self._plan(manager)
        except PlanError as error:
            return problems + list(error.problems)
        for hook, more in (("check_plan", {}), ("check_model", {"model": self.blueprint.model})):
            if hook == "check_model" and self.blueprint.model is None:
                continue
            for slot, said in legality.plan_complaints(manager, hook, plan=self.result, **more).items():
                problems += said
                if any(not problem.fix for problem in said):
                    self.suspects |= {slot, *(problem.setting.partition(".")[0].partition("=")[0] for problem in said)}
        if self.result.mesh.data_ranks > 1 and "sampler" not in self.components:
            reason = f"{self.result.mesh.data_ranks} data ranks would all train on the same samples"
            problems.append(Problem("sampler=none", reason, "sampler=consistent"))
        return problems

    def _plan(self, manager: pluggy.PluginManager) -> RunPlan:
        """Do the arithmetic and freeze.

        Raises:
            PlanError: mesh or batch don't work out, or two options want one variable.
        """
        root = self.root
        gpus = _gpus() if root.accelerator != "cpu" else 0
        accelerator = root.accelerator if root.accelerator != "auto" else ("cuda" if gpus else "cpu")
        claims = {f"{slot}={self.mix[slot]}": axes for slot, axes in ask_each(manager, "mesh_axes").items()}
        mesh = plan_mesh(claims, root.devices, accelerator, root.num_nodes, gpus)
        pipeline = self.components.get("pp")
        batch = plan_batch(
            root.global_batch_size,
            mesh.data_ranks,
            micro_batch_size=root.micro_batch_size,
            accumulation=root.trainer.accumulate_grad_batches,
            microbatches=getattr(pipeline, "microbatches", None),
            pipeline_ranks=mesh.pp,
            stages=mesh.pp * (getattr(pipeline, "stages_per_rank", None) or 1),
        )
        trainer: Any = OmegaConf.to_container(root.trainer, resolve=True)
        del trainer["accumulate_grad_batches"]  # it is `plan.batch.accumulation`
        plan = RunPlan(
            run_id=self.blueprint.run_id,
            run_dir=root.run_dir,
            name=root.name,
            command=self.blueprint.command,
            seed=root.seed,
            accelerator=accelerator,
            mesh=mesh,
            batch=batch,
            num_nodes=root.num_nodes,
            timeout_s=root.timeout_s,
            threads=root.threads,
            ckpt_path=root.ckpt_path,
            on_nonfinite=root.on_nonfinite,
            trainer={name: value for name, value in trainer.items() if value is not None},
            components=self.specs,
            facts=dict(self.facts),
        )
        return _with_environment(plan, manager)

    def _legal(self, mix: Mix) -> bool:
        """Whether a variation has no complaint; an option that changed has the defaults of its YAML."""
        specs = {slot: spec for slot, spec in self.specs.items() if slot in OBJECT_SLOTS}
        problems: list[Problem] = []
        components = {}
        for slot, option in mix.items():
            if self.mix.get(slot) == option:
                specs[slot], components[slot] = self.specs[slot], self.components[slot]
                continue
            tree = OmegaConf.create({**self.blueprint.values, slot: catalog().options[slot][option].values})
            try:
                value = OmegaConf.to_container(tree[slot], resolve=True)
                assert isinstance(value, dict)
                specs[slot], said = describe_component(slot, option, value)  # type: ignore[arg-type]
            except (OmegaConfBaseException, KeyError):
                return False
            problems += said
            components[slot] = None if problems else _instance(slot, specs[slot], problems)
            if problems:
                return False
        try:
            return not Draft(self.blueprint, self.root, specs, components).complaints()
        except FrameworkError:
            return False


def _gpus() -> int:
    """Return the number of GPUs of this host."""
    if not any(Path(name).exists() for name in GPU_FILES):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _with_environment(plan: RunPlan, manager: pluggy.PluginManager) -> RunPlan:
    """Add the variables that options want for the workers; one that the user exported wins, and that is kept as a fact.

    Raises:
        PlanError: two options want different values.
    """
    wanted: dict[str, str] = {}
    owner: dict[str, str] = {}
    problems = []
    for slot, variables in ask_each(manager, "process_env", plan=plan).items():
        for name, value in variables.items():
            if name in wanted and wanted[name] != value:
                reason = f"{owner[name]} wants {name}={wanted[name]}, and {slot} wants {name}={value}"
                problems.append(Problem(f"{slot}={plan.chosen(slot)}", reason, f"export {name}=..., which wins"))
            wanted.setdefault(name, value)
            owner.setdefault(name, slot)
    if problems:
        raise PlanError(problems)
    kept = {name: os.environ[name] for name in wanted if os.environ.get(name, wanted[name]) != wanted[name]}
    facts = dict(plan.facts)
    if kept:
        facts["exported"] = {name: f"{value} (exported, instead of {wanted[name]})" for name, value in kept.items()}
    return plan.with_(env={**wanted, **kept}, facts=facts)
