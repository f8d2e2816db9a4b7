"""`apply_liger`, which recognises modules, proves what they compute and swaps in fused kernels, and `remove_liger`.

`core/` is below the rooms that bind something to a model, and `apply.py` is above them. So a name of this package is
imported when it is first used (PEP 562).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_trainer.patching.apply import apply_liger, check_config, remove_liger
    from liger_trainer.patching.core.report import OPERATIONS, LigerReport

__all__ = ["OPERATIONS", "LigerReport", "apply_liger", "check_config", "remove_liger"]


def __getattr__(name: str) -> Any:
    if name in ("OPERATIONS", "LigerReport"):
        return getattr(importlib.import_module("liger_trainer.patching.core.report"), name)
    if name in __all__:
        return getattr(importlib.import_module("liger_trainer.patching.apply"), name)
    raise AttributeError(f"module 'liger_trainer.patching' has no attribute {name!r}")
