"""`ema=polyak`: an exponential running average of the weights, in the callback's own memory."""

from __future__ import annotations

from dataclasses import dataclass

from framework import hookimpl


@dataclass(kw_only=True, eq=False)
class Polyak:
    """Attributes:
    decay: weight of the old average.
    """

    decay: float = 0.99

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"ema.decay={self.decay} must be from 0 to 1.")

    @hookimpl
    def ema_decay(self, step):
        return min(self.decay, (1 + step) / (10 + step))

    @hookimpl
    def make_callbacks(self):
        from acme_parallel.ema_callback import Ema

        return [Ema(self)]
