"""Recognise, prove, swap: `apply_liger` puts fused kernels into a model instance, `remove_liger` takes them out."""

from .apply import apply_liger, check_config, remove_liger
from .report import OPERATIONS, LigerReport

__all__ = ["OPERATIONS", "LigerReport", "apply_liger", "check_config", "remove_liger"]
