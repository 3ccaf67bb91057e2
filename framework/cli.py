"""The command line: words -> command. Nothing here imports torch before a model has to be built."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, FrameworkError, UsageError
from framework.guide import COMMANDS, PROGRAM
from framework.plugin_manager import packages

if TYPE_CHECKING:
    from framework.compose import Request
    from framework.plan import RunPlan

HYDRA_ONLY = ("cfg", "info", "shell_completion", "hydra_help")
"""Flags that only ask Hydra something; the command isn't looked at."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; complaints go to stderr, without a traceback.

    Args:
        argv: words after the program's name; None = those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(words)
    except FrameworkError as error:
        print(f"framework: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stopped:
        return int(getattr(stopped, "exit_code", EXIT_INTERRUPTED))


def _command(words: list[str]) -> int:
    name = words.pop(0) if words and words[0].isidentifier() else "train"
    if name not in COMMANDS and name not in packages().commands:
        raise UsageError(_unknown_command(name))
    if name == "verify":
        from framework.verify.command import main as verify

        return verify(words)
    if name == "export":
        from framework.export import main as export

        return export(words)
    if name == "ledger":
        from framework.ledger.command import main as ledger

        return ledger(words)
    own = _locate(name)
    if getattr(own, "takes_words", False):
        return int(own(words) or EXIT_OK)
    if "--help" in words or "-h" in words or name == "help":
        from framework.guide import help_page
        from framework.job import console

        console().print(help_page())
        return EXIT_OK
    if name == "plugins":
        return _plugins(words)
    return _composed(name, words)


def _locate(name: str) -> Any:
    """Return the function of a package's command; None for the core's."""
    target = packages().commands.get(name)
    if target is None:
        return None
    from framework.objects import locate

    return locate(target.replace(":", "."))


def _unknown_command(name: str) -> str:
    known = [*COMMANDS, *packages().commands]
    near = get_close_matches(name, known, n=1)
    why = "".join(f" {package.complaint()}" for package in packages().unusable)
    return f"There is no command {name!r}; there is {', '.join(known)}.{why}" + (f" Type {near[0]}." if near else "")


def _plugins(words: list[str]) -> int:
    from framework.guide import plugins_page
    from framework.job import console

    if words and words != ["list"]:
        raise UsageError(f"The command plugins takes nothing more, and {words} was given. Type {PROGRAM} plugins.")
    page, broken = plugins_page()
    console().print(page)
    return EXIT_USAGE if broken else EXIT_OK


def _composed(name: str, words: list[str]) -> int:
    """Run a command that needs settings."""
    from framework import compose
    from framework.rank_env import external_rank

    flags = _flags(words)
    dirs = [flags.config_dir] if flags.config_dir else []
    multirun = flags.multirun or "hydra.mode=MULTIRUN" in flags.overrides
    request = compose.read(flags.overrides, flags.config_name or "train", dirs, multirun=multirun)
    if any(getattr(flags, flag) for flag in HYDRA_ONLY):
        return _hydra(words, request, flags, lambda config: None)
    _warn()
    if name == "plan":
        return _plan(request, multirun)
    if multirun and external_rank() is not None:
        raise UsageError("-m under torchrun: each rank would run the whole sweep. Type it without torchrun.")
    if multirun:
        return _sweep(name, words, request, flags)
    return _single(name, words, request, flags)


def _flags(words: list[str]) -> argparse.Namespace:
    """Parse the flags with Hydra's own parser, so that all of Hydra's work; wrong ones end the program with code 2."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.prog = PROGRAM
    flags: argparse.Namespace = parser.parse_args(words)
    if flags.config_path is not None:
        raise UsageError(f"-cp {flags.config_path}: the catalogue stays where it is. Type -cd {flags.config_path}.")
    if flags.config_dir is not None and not Path(flags.config_dir).is_dir():
        raise UsageError(f"-cd {flags.config_dir}: there is no such folder.")
    return flags


def _warn() -> None:
    """Say once what is broken; it doesn't matter to a run that doesn't use it."""
    from framework.catalog import catalog
    from framework.rank_env import external_rank

    outside = external_rank()
    if outside is None or outside.rank == 0:
        for line in [*(package.complaint() for package in packages().unusable), *catalog().warnings]:
            print(f"warning: {line}", file=sys.stderr)


def _plan(request: Request, multirun: bool) -> int:
    """Check and show each job; start nothing, write nothing."""
    from dataclasses import replace

    from framework import compose, job

    screen = job.console()
    code = EXIT_OK
    jobs = compose.jobs(request) if multirun else [request.tokens]
    for number, tokens in enumerate(jobs):
        if multirun:
            screen.rule(f"job {number}: {' '.join(token.lstrip('+') for token in tokens)}", style="bold")
        try:
            blueprint = compose.blueprint(replace(request, tokens=list(tokens)))
            blueprint.here = False
            screen.print(job.start_screen(blueprint.plan(), blueprint.model))
            for problem in blueprint.elsewhere:
                print(f"Not from here: {problem}")
        except FrameworkError as error:
            if not multirun:
                raise
            job.console(stderr=True).print(f"job {number} can't run:\n{error}", markup=False)
            code = error.exit_code
    return code


def _runner(name: str) -> Callable[[RunPlan, Any], int]:
    """Return what to do with a plan: run it, or give it to a package's command."""
    from framework import job

    function = _locate(name)
    if function is None:
        return lambda plan, model: job.run(plan, model)[0]
    return lambda plan, model: int(function(plan) or EXIT_OK)


def _single(name: str, words: list[str], request: Request, flags: argparse.Namespace) -> int:
    """Make the folder, check everything, then run; a run that is refused leaves no folder."""
    from framework import compose, job
    from framework.multirun import Task
    from framework.rank_env import external_rank

    outside = external_rank()
    follows = outside is not None and outside.rank > 0
    # first, since loggers and others name files in it: the time must be read once
    claimed = None if follows else _claim(request)
    try:
        blueprint = compose.blueprint(request, "validate" if name == "validate" else "fit")
        plan = blueprint.plan(before_model=_prewarm)
        run = _runner(name)
    except BaseException:
        if claimed is not None:
            job.release(claimed, Path.cwd())
        raise
    if follows:
        return run(plan, blueprint.model)
    task = Task(plan.command, (plan, blueprint.model), run)
    refused = _hydra(words, request, flags, task)
    if task.error is not None:
        raise task.error
    return task.exit_code or refused


def _sweep(name: str, words: list[str], request: Request, flags: argparse.Namespace) -> int:
    """Run every job, whatever becomes of the others; then the table."""
    from framework import multirun
    from framework.errors import PlanError

    if request.problems:
        raise PlanError(request.problems)
    _claim(request)
    since = multirun.now()
    task = multirun.Task("validate" if name == "validate" else "fit", None, _runner(name), _prewarm)
    code = EXIT_USAGE
    try:
        code = _hydra(words, request, flags, task)
    finally:
        concluded = multirun.conclude(since)
    return code if concluded is None else concluded


def _claim(request: Request) -> Path | None:
    """Make and return the folder of the run (of a sweep: of its jobs); None if the user named one."""
    from framework import job

    if request.timed_run_dir is None:
        return None
    claimed = job.claim(Path(request.timed_run_dir).resolve())
    request.tokens.append(f'++run_dir="{claimed}"')
    return claimed


def _prewarm() -> None:
    """Let the workers' server import torch while this process does."""
    from framework.launch import prewarm

    prewarm()


def _hydra(words: list[str], request: Request, flags: argparse.Namespace, task: Callable[..., Any]) -> int:
    """Let Hydra make folders and jobs, with the words respelled; return 0, or 2 if it refused."""
    import hydra

    from framework import paths
    from framework.hydra_setup import VERSION_BASE

    kept = [word for word in words if word not in flags.overrides]
    before = sys.argv
    sys.argv = [before[0], *kept, *request.tokens]
    try:
        hydra.main(version_base=VERSION_BASE, config_path=str(paths.conf_dir()), config_name=request.config_name)(
            task
        )()
    except SystemExit as ended:
        return EXIT_USAGE if ended.code else EXIT_OK
    finally:
        sys.argv = before
    return EXIT_OK
