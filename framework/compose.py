"""From words to a frozen plan: compose with Hydra, check everything at once, choose the mesh, split the batch.

After this the config tree is dead: only a `RunPlan` and objects travel. Nothing here imports torch, except for the
model, which is built on the meta device to check the plan against it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from framework import overrides as command_line
from framework.blueprint import Blueprint
from framework.catalog import catalog, recipes
from framework.errors import PlanError, Problem, UsageError
from framework.guard import check_keys, check_values
from framework.hydra_setup import hydra_ready, prepare
from framework.plan import RunPlan
from framework.rank_env import external_rank

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


@dataclass
class Request:
    """What a user typed, respelled for Hydra and checked token by token.

    Attributes:
        tokens: for Hydra.
        problems: complaints about tokens.
        spoilt: slots whose token was refused.
        config_name: primary config, `train` or a recipe.
        config_dirs: folders of configs of the user's own.
        timed_run_dir: folder of the run (of a sweep: of its jobs) if only the time names it: then it must be a new one.
    """

    tokens: list[str]
    problems: list[Problem] = field(default_factory=list)
    spoilt: set[str] = field(default_factory=set)
    config_name: str = "train"
    config_dirs: tuple[str, ...] = ()
    timed_run_dir: str | None = None


def read(
    tokens: Sequence[str], config_name: str = "train", config_dirs: Sequence[str] = (), *, multirun: bool = False
) -> Request:
    """Respell `tokens` for Hydra and collect what is wrong with them.

    Raises:
        UsageError: the primary config itself can't be composed.
    """
    prepare(config_dirs)
    with hydra_ready():
        try:
            primary = hydra.compose(config_name, return_hydra_config=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise UsageError(_primary_error(config_name, error)) from error
        listed = [name for name in primary.hydra.runtime.choices if not name.startswith("hydra/")]
        loader = GlobalHydra.instance().config_loader()
        groups = {slot: loader.get_group_options(slot) for slot in catalog().slots}
        timed = _timed_run_dir(primary, tokens)
    line = command_line.read(tokens, groups, listed, multirun=multirun)
    return Request(line.tokens, line.problems, line.spoilt, config_name, tuple(config_dirs), timed)


def _primary_error(config_name: str, error: Exception) -> str:
    if f"'{config_name}'" in str(error) and "primary config" in str(error):
        known = ", ".join(recipes()) or "none"
        return (
            f"-cn {config_name}: there is no such recipe; the bundled ones are {known}. Type -cd FOLDER for your own."
        )
    return f"-cn {config_name}: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """Return an error of Hydra's or OmegaConf's without its search path and object dumps."""
    text = str(error).split("Config search path:")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type=")))


def compose(
    overrides: Sequence[str] = (),
    config_name: str = "train",
    *,
    command: str = "fit",
    config_dirs: Sequence[str] = (),
    model: bool = True,
    here: bool = True,
) -> RunPlan:
    """Return the plan of a run; nothing is written and nothing is started.

    Args:
        overrides: as typed on the command line.
        config_name: `train` or a recipe.
        command: `fit` or `validate`.
        config_dirs: folders of configs of the user's own.
        model: whether the model is built (on the meta device) and checked too; imports torch.
        here: whether the run is meant for this host; False: its GPUs and launcher aren't held against the plan.

    Raises:
        PlanError: with all complaints.
    """
    made = blueprint(read(overrides, config_name, config_dirs), command)
    made.here = here
    return made.plan(model=model)


def jobs(request: Request) -> list[list[str]]:
    """Return the tokens of each job of a sweep, as Hydra's basic sweeper would make them."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(
        [token for token in request.tokens if token != "hydra.mode=MULTIRUN"]
    )
    return [list(job) for batch in BasicSweeper.split_arguments(parsed, None) for job in batch]


def blueprint(request: Request, command: str = "fit") -> Blueprint:
    """Compose a request that holds no sweep, and check the tree.

    Raises:
        PlanError: Hydra can't compose it; the complaints about tokens come first.
    """
    prepare(request.config_dirs)
    with hydra_ready():
        try:
            config = hydra.compose(request.config_name, list(request.tokens), return_hydra_config=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise PlanError([*request.problems, Problem("config", one_line(error))]) from error
        choices = dict(config.hydra.runtime.choices)
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(config)
        try:
            return examine(config, choices, command=command, problems=request.problems, spoilt=request.spoilt)
        finally:
            HydraConfig.instance().cfg = before


def examine(
    config: DictConfig,
    choices: Mapping[str, Any],
    *,
    command: str = "fit",
    run_dir: str | None = None,
    problems: Sequence[Problem] = (),
    spoilt: Sequence[str] | set[str] = (),
) -> Blueprint:
    """Check a composed tree and take it apart; the tree isn't needed afterwards.

    Args:
        config: with or without Hydra's own node; `HydraConfig` must be set.
        choices: group -> option, from Hydra.
        command: `fit` or `validate`.
        run_dir: folder of the run; None = what the tree says.
        problems: complaints so far.
        spoilt: slots about which nothing more is said.
    """
    config = DictConfig(OmegaConf.to_container(config, resolve=False))
    found = list(problems)
    with read_write(config), open_dict(config):
        config.pop("hydra", None)
        _fix_run_dir(config, run_dir)
    found += [problem for problem in check_keys(config) if _root(problem) not in spoilt]
    found += [problem for problem in check_values(config) if _root(problem) not in spoilt]
    broken = {_root(problem) for problem in found} | set(spoilt)
    values = {
        str(key): _plain(config, str(key)) for key in config if key not in spoilt and not _empty(config, str(key))
    }
    outside = external_rank()
    return Blueprint(
        values=values,
        choices={slot: str(option) for slot, option in choices.items() if not slot.startswith("hydra/")},
        command=command,
        run_id=outside.run_id if outside else secrets.token_hex(6),
        problems=found,
        broken=broken,
    )


def _fix_run_dir(config: DictConfig, run_dir: str | None) -> None:
    """Make the run's folder absolute before anything that refers to it is resolved."""
    try:
        config.run_dir = str(Path(run_dir or config.run_dir).resolve())
    except (OmegaConfBaseException, TypeError):
        return  # `check_values` says which value is missing or broken


def _timed_run_dir(primary: DictConfig, tokens: Sequence[str]) -> str | None:
    """Return the folder that the time names, if neither the primary config nor the user names another."""
    named = {token.lstrip("+").partition("=")[0] for token in tokens}
    raw: Any = OmegaConf.to_container(primary, resolve=False)
    if named & {"run_dir", "hydra.run.dir", "hydra.sweep.dir"} or "${now:" not in str(raw["run_dir"]):
        return None
    return str(primary.run_dir)


def _root(problem: Problem) -> str:
    return problem.setting.lstrip("+~").partition("=")[0].partition(".")[0].partition("[")[0]


def _empty(config: DictConfig, key: str) -> bool:
    """Whether an entry has no value at all: missing, or an interpolation that leads nowhere; `check_values` said so."""
    if OmegaConf.is_missing(config, key):
        return True
    try:
        config[key]  # resolves it
    except OmegaConfBaseException:
        return True
    return False


def _plain(config: DictConfig, key: str) -> Any:
    """Return a resolved copy of one entry, in plain containers."""
    value = config[key]
    if not OmegaConf.is_config(value):
        return value
    try:
        return OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException:  # named by `check_values` already
        return OmegaConf.to_container(value, resolve=False)


def model_on_meta(spec: Mapping[str, Any]) -> tuple[LightningModule, str]:
    """Build the model without its weights; return it, and why that wasn't possible and it has weights after all.

    Raises:
        UsageError: it can't be built at all.
    """
    import torch

    from framework.objects import build

    try:
        with torch.device("meta"):
            return build(spec), ""
    except UsageError as error:
        return build(spec), str(error)
