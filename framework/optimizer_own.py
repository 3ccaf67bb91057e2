"""What an optimizer keeps beside the slots of its parameters: a step count, whatever its own `state_dict` adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def own_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return that state; empty for all optimizers of torch.

    Returns:
        `keyed`: entries of `state` that belong to no parameter; `added`: what a `state_dict` of the optimizer's own has
        beside torch's two keys. Nothing is copied.
    """
    own: dict[str, Any] = {}
    keyed = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    if keyed:
        own["keyed"] = keyed
    if type(optimizer).state_dict is not Optimizer.state_dict and not hasattr(optimizer, "saved_state"):  # `OwnFormat`
        added = {key: value for key, value in optimizer.state_dict().items() if key not in _TORCHS}
        if added:
            own["added"] = added
    return own


def restore_own(optimizer: Optimizer, own: Mapping[str, Any]) -> None:
    """Give it back, before the slots of parameters: a `load_state_dict` of its own sees those of a fresh optimizer."""
    if "added" in own:
        optimizer.load_state_dict({**optimizer.state_dict(), **own["added"]})
    for key, value in own.get("keyed", {}).items():
        optimizer.state[key] = value


_TORCHS = ("state", "param_groups")
