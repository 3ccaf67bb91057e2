"""`Draft`: a plan on trial. The mix that was asked is planned and checked; so are its neighbours, if it isn't legal."""

from __future__ import annotations

import os
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy
from omegaconf import DictConfig, OmegaConf

from framework import legality
from framework.catalog import catalog
from framework.errors import FrameworkError, PlanError, Problem
from framework.legality import Mix
from framework.plan import Requirements, RunPlan
from framework.planner import plan_batch, plan_mesh
from framework.plugin_manager import OBJECT_SLOTS, ask_each, manager_of

if TYPE_CHECKING:
    from framework.blueprint import Blueprint

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""One of these is there where torch could find a GPU (NVIDIA, AMD, WSL); without any, torch isn't imported to look."""


DEFAULT_STEPS = 400
"""Length of a run of which nobody said how long it shall be: enough for the default model to learn the default text."""


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

    def finish(self, suggest: bool = True, force: bool = False) -> RunPlan:
        """Return the plan; with `force` in spite of complaints, if the arithmetic allows one.

        `suggest`: look for the nearest mixes that work, which takes as long as trying them.

        Raises:
            PlanError: with all complaints.
        """
        problems = self.complaints()
        if self.result is not None and (force or not problems):
            return self.result
        nearest = []
        if self.suspects and suggest:
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
                    self.suspects |= {slot, *(given[word] for word in hit), *self._givers(lacking)}
                    self.suspects |= {word.partition("=")[0] for word in lacking}
        try:
            self.result = self._plan(manager)
        except PlanError as error:
            return problems + list(error.problems)
        for hook, more in (("check_plan", {}), ("check_model", {"model": self.blueprint.model})):
            if hook == "check_model" and self.blueprint.model is None:
                continue
            for slot, said in legality.plan_complaints(manager, hook, plan=self.result, **more).items():
                if slot == "launcher" and not self.blueprint.here:
                    self.blueprint.elsewhere = said
                    continue
                problems += said
                # A setting that the complaint corrects isn't the fault of the mix; what the model can't do is.
                if hook == "check_model" or any(not problem.fix for problem in said):
                    self.suspects |= {slot, *(problem.setting.partition(".")[0].partition("=")[0] for problem in said)}
        if self.result.mesh.data_ranks > 1 and "sampler" not in self.components:
            reason = f"{self.result.mesh.data_ranks} data ranks would all train on the same samples"
            problems.append(Problem("sampler=none", reason, "sampler=consistent"))
        strategy = needs.get("strategy", Requirements())
        if self.result.mesh.cp > 1 and "strategy" in self.mix and "reduces_over_context" not in strategy.gives:
            reason = f"gradients of the {self.result.mesh.cp} pieces of a sequence would not be averaged"
            problems.append(
                Problem(f"strategy={self.mix['strategy']}", reason, "strategy=ddp, strategy=fsdp or cp=none")
            )
        return problems

    def _givers(self, words: Set[str]) -> set[str]:
        """Return the slots of which an option gives one of `words`."""
        found = set()
        for slot, options in catalog().options.items():
            for name in options if slot not in OBJECT_SLOTS else ():
                wants = self.blueprint.wants(slot, name)
                if wants is not None and words & wants.gives:
                    found.add(slot)
        return found

    def _plan(self, manager: pluggy.PluginManager) -> RunPlan:
        """Do the arithmetic and freeze.

        Raises:
            PlanError: mesh or batch don't work out, or two options want one variable.
        """
        root = self.root
        gpus = _gpus() if root.accelerator != "cpu" else 0
        accelerator = root.accelerator if root.accelerator != "auto" else ("cuda" if gpus else "cpu")
        claims = {f"{slot}={self.mix[slot]}": axes for slot, axes in ask_each(manager, "mesh_axes").items()}
        known = gpus if self.blueprint.here or root.devices == "auto" else None
        mesh = plan_mesh(claims, root.devices, accelerator, root.num_nodes, known)
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
        if trainer["max_steps"] == -1 and trainer["max_epochs"] is None and trainer["max_time"] is None:
            trainer["max_steps"] = DEFAULT_STEPS
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
        components: dict[str, Any] = {}
        for slot, option in mix.items():
            if self.mix.get(slot) == option:
                specs[slot], components[slot] = self.specs[slot], self.components[slot]
                continue
            other = self.blueprint.option(slot, option)
            if other is None:
                return False
            specs[slot], components[slot] = other
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
