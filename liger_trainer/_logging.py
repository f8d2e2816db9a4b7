"""The package's logger: one line of what happened is shown by default (level INFO), as `Trainer` shows its own."""

import functools
import logging
import sys


class _Logger(logging.LoggerAdapter):
    @functools.cache  # noqa: B019 - one adapter for the life of the process
    def warning_once(self, message: str) -> None:
        self.warning(message)


class _StderrHandler(logging.StreamHandler):
    """Writes to what `sys.stderr` is when it writes, which may have been replaced since the package was imported."""

    def __init__(self):
        logging.Handler.__init__(self)

    @property
    def stream(self):
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
