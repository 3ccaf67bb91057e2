"""Keep secrets out of logs and of every printed environment.

A secret is the value of an environment variable whose name holds TOKEN, SECRET, PASSWORD or KEY as a whole word or at
the end of one (`HF_TOKEN`, `AWS_SECRET_ACCESS_KEY`, `APIKEY`; not `KEYBOARD` or `TOKENIZERS_PARALLELISM`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

SECRET_NAMES = r"(?:TOKEN|SECRET|PASSWORD|PASSWD|KEY)S?(?:_|$)"
"""Searched for in the upper-case name."""
MASK = "***"
SHORTEST = 6
"""Shorter values are masked where their name is shown, but not looked for in text: `KEY=1` would mask every 1."""


def is_secret(name: str, names: str = SECRET_NAMES) -> bool:
    """Tell whether the value of environment variable `name` must not be shown."""
    return re.search(names, name.upper()) is not None


def redacted(environment: Mapping[str, str], names: str = SECRET_NAMES) -> dict[str, str]:
    """Return a copy of `environment` fit to be shown: secret values masked, and masked inside other values too."""
    redact = Redactor(environment, names)
    return {
        name: MASK if value and is_secret(name, names) else redact(value) for name, value in sorted(environment.items())
    }


class Redactor:
    """Replaces in any text the secret values that `environment` held when this was built (None: this process's own)."""

    def __init__(self, environment: Mapping[str, str] | None = None, names: str = SECRET_NAMES) -> None:
        environment = os.environ if environment is None else environment
        values = {value for name, value in environment.items() if len(value) >= SHORTEST and is_secret(name, names)}
        # Longest first: a secret that begins with another one is masked whole.
        ordered = sorted(values, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def __call__(self, text: str) -> str:
        return text if self._pattern is None else self._pattern.sub(MASK, text)
