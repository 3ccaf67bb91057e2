"""Messages that mislead are left out, others aren't."""

from __future__ import annotations

import logging
import warnings

import pytest

from framework.quiet import LOGGERS, quiet


def test_only_the_listed_messages_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        quiet()
        quiet()
        warnings.warn("It is recommended to use `self.log('val_loss', ..., sync_dist=True)` when logging", stacklevel=1)
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated, use that", FutureWarning, stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["something else"]
    logger = logging.getLogger(LOGGERS[0])
    with caplog.at_level(logging.INFO, LOGGERS[0]):
        logger.info("💡 Tip: For seamless cloud logging and experiment tracking, try this")
        logger.info("`Trainer.fit` stopped: `max_steps=3` reached.")
    assert caplog.messages == ["`Trainer.fit` stopped: `max_steps=3` reached."]
