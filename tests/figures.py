"""Figures of campaigns: kept in the repository, each with the commit that it was measured at."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "campaign"


def keep(name: str, figures: Mapping[str, Any]) -> None:
    """Write `tests/campaign/<name>.json`."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps({"commit": commit, **figures}, indent=1) + "\n")
