"""`apply_liger`, which recognises modules, proves what they compute and swaps in fused kernels, and `remove_liger`."""

from liger_trainer.instance.report import OPERATIONS, LigerReport
from liger_trainer.patching.apply import apply_liger, check_config, remove_liger

__all__ = ["OPERATIONS", "LigerReport", "apply_liger", "check_config", "remove_liger"]
