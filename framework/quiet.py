"""Messages of libraries that are wrong under this Trainer, or of no use to its user; everything else is shown."""

from __future__ import annotations

import logging
import warnings

WARNINGS = (
    # Lightning asks for sync_dist=True; what it gets from us is the global value already (framework.metrics).
    r"It is recommended to use `self\.log\(.*sync_dist=True\)`",
    # Lightning's own use of a name that torch is about to retire.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)

INFOS = ("For seamless cloud logging and experiment tracking", "TPU available: False", "`weights_only` was not set")

LOGGERS = ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.trainer.connectors.checkpoint_connector")


class _Unasked(logging.Filter):
    """Drops records that say one of `INFOS`."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is shown."""
        text = record.getMessage()
        return not any(info in text for info in INFOS)


def quiet() -> None:
    """Leave those messages out in this process; called again it changes nothing."""
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, _Unasked) for one in logger.filters):
            logger.addFilter(_Unasked())
