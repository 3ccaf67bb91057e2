"""The environment variables of a run as lines for the screen: which are in effect, and who asked for them. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from framework.plan import RunPlan
from framework.redaction import MASK, Redactor, is_secret


def environment_lines(plan: RunPlan, environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a line a variable of `plan.env`, sorted, secrets masked: what the workers get.

    Args:
        plan: `env` holds what the options' `process_env` hooks asked for, the user's own winning; `facts["exported"]`
            says where the user's won over an option's.
        environ: the launcher's environment; None = this process's.
    """
    environ = os.environ if environ is None else environ
    redact = Redactor(environ)
    won = plan.facts.get("exported", {})
    lines = []
    for name, value in sorted(plan.env.items()):
        if is_secret(name):
            lines.append(f"{name}={MASK}")
        elif name in won:
            lines.append(redact(f"{name}={won[name]}"))
        else:
            lines.append(redact(f"{name}={value}" + (" (exported)" if environ.get(name) == value else "")))
    return lines
