"""`comm=auto`, `comm=debug`, `comm=ring`: environment variables of the collectives, checked before a process starts.

`auto` sets nothing: NCCL, gloo and torch choose for themselves. Whatever the option, the variables that the user
exported are checked too, and win over those of the option, which is said on the start screen.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from framework import Problem, RunPlan, hookimpl
from framework_plugins.comm import interfaces, variables


@dataclass(kw_only=True, eq=False)
class Environment:
    """Settings and hooks of the option; see the module.

    Attributes:
        interface: network interface, or a comma list, by exact name; None = each backend chooses. Written into
            GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, in each one's grammar. Checked on the host that composes.
        timeout_s: seconds; what the root setting `timeout_s` (the time limit of all collectives) is by default.
        env: variables by full name (`NCCL_ALGO: Ring`); only those that NCCL, gloo or torch.distributed read.
    """

    interface: str | None = None
    timeout_s: float = 1800.0
    env: dict[str, Any] = field(default_factory=dict)

    @hookimpl
    def process_env(self, plan: RunPlan) -> Mapping[str, str]:
        """Return the option's variables, and those that the user exported, so that the plan names all in effect."""
        return {**exported(os.environ), **self.wanted()}

    @hookimpl
    def check_plan(self, plan: RunPlan) -> Sequence[Problem]:
        """Check names, values and interfaces: of the option, and of what the user exported."""
        present = interfaces.host_interfaces()
        mine = exported(os.environ)
        problems = []
        if self.interface is not None and (reason := _interface_reason(self.interface, present)):
            fix = f"comm.interface={_suggested(present)}"
            problems.append(Problem(f"comm.interface={self.interface}", reason, fix))
        effective = {**self.wanted(), **mine}
        for name, raw in self.env.items():
            value = text(raw)
            if reason := complaint(name, value, present):
                problems.append(Problem(f"comm.env.{name}={value}", *_told(name, value, reason, present)))
            elif name.endswith("_IFNAME") and self.interface is not None:
                problems.append(Problem(f"comm.env.{name}={value}", "comm.interface sets it too; keep one of the two"))
        for name, value in mine.items():
            if name not in variables.VARIABLES and not _mistake(name):
                continue  # of a container image, or of another library's NCCL plugin
            if reason := complaint(name, value, present):
                renamed = variables.RENAMED.get(name)
                fix = f"`export {renamed}={value}`" if renamed else f"`unset {name}`"
                if name in variables.NOT_READ:
                    fix += f" and timeout_s={value}"
                problems.append(Problem(f"{name}={value} (exported in your shell)", reason, fix))
        for name, reason in variables.cross_checks(effective):
            problems.append(Problem(f"{name}={effective.get(name, '')}", reason))
        if effective.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL" and _ddp_on_gloo(plan):
            level = "TORCH_DISTRIBUTED_DEBUG=INFO"
            fix = f"`export {level}`" if "TORCH_DISTRIBUTED_DEBUG" in mine else f"comm.env.{level}"
            reason = "torch's DDP wrapper crashes under it on gloo (segmentation fault), which strategy=ddp uses on CPU"
            problems.append(Problem("TORCH_DISTRIBUTED_DEBUG=DETAIL", f"{reason}.", f"{fix}, or strategy=fsdp"))
        return problems

    def wanted(self) -> dict[str, str]:
        """Return the option's own variables, as text."""
        result = {name: text(value) for name, value in self.env.items()}
        if self.interface:
            result["GLOO_SOCKET_IFNAME"] = self.interface
            result["NCCL_SOCKET_IFNAME"] = f"={self.interface}"
        return result


def _ddp_on_gloo(plan: RunPlan) -> bool:
    """Whether torch's own wrapper will be used over gloo; with tp or pp `strategy=ddp` has another form.

    Its logger takes every gloo group for a bare one (torch 2.13, `Logger::set_construction_data_and_log`), and DETAIL
    wraps them. `tests/distributed/test_comm.py` notices when that is over.
    """
    alone = plan.mesh.tp == plan.mesh.pp == 1
    return plan.accelerator == "cpu" and plan.chosen("strategy") == "ddp" and alone


def exported(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the collectives that are set in `environ`."""
    return {
        name: value for name, value in environ.items() if variables.concerns(name) and name not in variables.FOREIGN
    }


def text(value: Any) -> str:
    """Return a YAML value as the variable's text: true is 1, false is 0, null is empty."""
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)


def complaint(name: str, value: str, present: interfaces.Interfaces) -> str | None:
    """Return what is wrong with one variable, or None."""
    if name in variables.NOT_READ:
        return variables.NOT_READ[name]
    if name in variables.RENAMED:
        return f"its name is {variables.RENAMED[name]} now"
    kind = variables.VARIABLES.get(name)
    if kind is None:
        return f"neither NCCL nor gloo nor torch.distributed reads a variable {name}"
    if isinstance(kind, variables.Interface):
        check = interfaces.gloo_complaint if name.startswith("GLOO") else interfaces.nccl_complaint
        reason = check(value, present)
        return reason and f"{reason}; this host has {interfaces.listing(present)}"
    return kind.complaint(value)


def _interface_reason(value: str, present: interfaces.Interfaces) -> str | None:
    """Return why `value` can't be `comm.interface`: exact names, which gloo's grammar is."""
    reason = interfaces.gloo_complaint(value, present)
    if reason is None and not all(name.strip() for name in value.split(",")):
        reason = "it holds an empty name"
    return reason and f"{reason}; this host has {interfaces.listing(present)}"


def _suggested(present: interfaces.Interfaces) -> str:
    """Return an interface to type instead: the first with an address that isn't the loopback, else that."""
    usable = [name for name, addresses in present.items() if addresses]
    return next((name for name in usable if name != "lo"), "lo")


def _told(name: str, value: str, reason: str, present: interfaces.Interfaces) -> tuple[str, str]:
    """Return reason and what to type instead, for a variable of the config."""
    if name in variables.NOT_READ:
        return reason, f"timeout_s={value}"
    if name in variables.RENAMED:
        return reason, f"comm.env.{variables.RENAMED[name]}"
    kind = variables.VARIABLES.get(name)
    if kind is None:
        close = variables.nearest(name)
        return reason, f"comm.env.{close}" if close else ""
    if isinstance(kind, variables.Interface):
        return reason, f"comm.interface={_suggested(present)}"
    return reason, ""


def _mistake(name: str) -> bool:
    """Tell whether an exported variable that nobody reads is likely a mistake rather than some other library's."""
    return name in variables.NOT_READ or name in variables.RENAMED or variables.nearest(name) is not None
