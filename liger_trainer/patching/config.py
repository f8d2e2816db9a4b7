"""`liger_config`: which operations are swapped, and above what size their results are computed again, not kept."""

import difflib

from liger_trainer.instance.report import OPERATIONS
from liger_trainer.memory import rebuild

REBUILD_ABOVE_MIB = "rebuild_above_mib"
_KNOWN = (*OPERATIONS, REBUILD_ABOVE_MIB)


def check_config(config: dict | None) -> dict[str, bool | float]:
    """Check a `liger_config` and fill in its defaults.

    Args:
        config (`dict`, *optional*): Operation -> bool, and `rebuild_above_mib` -> number. Keys that it leaves out have
            their defaults.

    Returns:
        `dict`: Every operation and whether it is on, and `rebuild_above_mib`.

    Raises:
        ValueError: `config` is no dict, or has an unknown key (the message names the nearest known one), or the value
            of an operation is no bool, or that of `rebuild_above_mib` no number of 0 or more.
    """
    if config is not None and not isinstance(config, dict):
        raise ValueError(f"liger_config is {config!r}; expected a dict such as {{'rope': False}}, or None.")
    for key, value in (config or {}).items():
        if key not in _KNOWN:
            near = difflib.get_close_matches(str(key), _KNOWN, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"liger_config has the unknown key {key!r}; did you mean {near!r}? Known keys: {', '.join(_KNOWN)}."
            )
        if key == REBUILD_ABOVE_MIB:
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"liger_config[{key!r}] is {value!r}; expected a number of MiB, 0 or more.")
        elif not isinstance(value, bool):
            raise ValueError(f"liger_config[{key!r}] is {value!r}; expected True or False.")
    return dict.fromkeys(OPERATIONS, True) | {REBUILD_ABOVE_MIB: rebuild.REBUILD_ABOVE_BYTES / 2**20} | (config or {})
