"""The package's logger. Unless you set another level, it writes messages from INFO upwards to standard error."""

import functools
import logging


class _Logger(logging.LoggerAdapter):
    @functools.cache  # noqa: B019 - there is one adapter, and it lives as long as the process
    def warning_once(self, message: str) -> None:
        self.warning(message)


def _build() -> _Logger:
    base = logging.getLogger("liger_trainer")
    if not base.handlers:
        handler = type(logging.lastResort)()  # type: ignore[misc]  # looks sys.stderr up for each message
        handler.setFormatter(logging.Formatter("[liger_trainer] %(message)s"))
        base.addHandler(handler)
        base.setLevel(logging.INFO)
    return _Logger(base, {})


logger = _build()
