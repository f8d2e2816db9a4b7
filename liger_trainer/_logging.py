"""The package's logger. Unless you set another level, it writes messages from INFO upwards to standard error."""

import functools
import logging
import sys
from typing import TextIO


class _Logger(logging.LoggerAdapter):
    @functools.cache  # noqa: B019 - there is one adapter, and it lives as long as the process
    def warning_once(self, message: str) -> None:
        self.warning(message)


class _StderrHandler(logging.StreamHandler):
    """Looks `sys.stderr` up for each message, because it may have been replaced since the package was imported."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _build() -> _Logger:
    base = logging.getLogger("liger_trainer")
    if not base.handlers:
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("[liger_trainer] %(message)s"))
        base.addHandler(handler)
        base.setLevel(logging.INFO)
    return _Logger(base, {})


logger = _build()
