"""What a resumed learning-rate schedule takes from its checkpoint in spite of this run's settings (P15)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def schedule_changes(saved: Mapping[str, Any], now: Mapping[str, Any], where: str) -> list[str]:
    """Compare a scheduler's saved state with a fresh one's: settings that differ, in words. The saved ones will win."""
    changes = []
    for key, value in saved.items():
        if key in _PROGRESS or key not in now:
            continue
        if isinstance(value, list) and any(isinstance(one, dict) for one in value):  # schedulers or factors inside
            for one, other in zip(value, now[key], strict=False):
                if isinstance(one, dict) and isinstance(other, dict):
                    changes += schedule_changes(one, other, where)
        elif isinstance(value, (bool, int, float, str, list, tuple, dict)) and value != now[key]:
            changes.append(f"{where}.{key}: {value} from the checkpoint, this run's settings say {now[key]}")
    return changes


_PROGRESS = ("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "best",
             "num_bad_epochs", "cooldown_counter")  # fmt: skip
"""What changes in a scheduler as it goes."""
