"""Checks that a trainer computes what the stock trainer does, in a few steps of a small copy of its model."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from liger_trainer.lora import layers as lora
from liger_trainer.verify.checks import Checks
from liger_trainer.verify.figures import HEADER, Check
from liger_trainer.verify.runs import OPTIMIZERS, Bench, Setup, quiet

__all__ = ["HEADER", "OPTIMIZERS", "Check", "Report", "Setup", "quiet", "verify"]


@dataclass
class Report:
    """The result of `verify`."""

    checks: list[Check]  # in the order of the table
    compared_with: str  # the trainer that ours was compared with
    swapped: str  # a line about what was patched in the model

    @property
    def failed(self) -> list[str]:
        return [check.name for check in self.checks if check.verdict == "FAILED"]

    def to_dict(self) -> dict[str, Any]:
        checks = [check.to_dict() for check in self.checks]
        return {"ok": not self.failed, "compared_with": self.compared_with, "swapped": self.swapped, "checks": checks}


def verify(setup: Setup, tell: Callable[[Check], None] = lambda check: None) -> Report:
    """Run all checks of `setup`. `tell` is called with each result.

    Raises:
        RecipeError: The trainer rejects the setup, or no small copy of the model can be made.
    """
    results = []
    for_many_tokens = mock.patch.object(lora, "LEAST_WORK", 0)  # below it, the kernels of LoRA are not used
    with tempfile.TemporaryDirectory() as folder, quiet(), for_many_tokens:
        checks = Checks(Bench(setup, folder))
        for check in checks.each():
            results.append(check)
            tell(check)
        return Report(results, checks.compared_with, checks.swapped)
