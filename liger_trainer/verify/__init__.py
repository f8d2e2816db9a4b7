"""Whether a training computes what the stock one does: a few steps of a small copy of its model, looked at closely."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from liger_trainer.verify.checks import Checks
from liger_trainer.verify.figures import FAILED, HEADER, Check
from liger_trainer.verify.runs import Bench, Setup, as_at_real_size, quiet

__all__ = ["HEADER", "Check", "Report", "Setup", "quiet", "verify"]


@dataclass
class Report:
    """What `verify` has found.

    Attributes:
        checks (`list[Check]`): In the order in which they were made.
        compared_with (`str`): The trainer that ours was compared with.
        swapped (`str`): What of the model was swapped, in a line.
    """

    checks: list[Check]
    compared_with: str
    swapped: str

    @property
    def failed(self) -> list[str]:
        return [check.name for check in self.checks if check.verdict == FAILED]

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": not self.failed, "compared_with": self.compared_with, "swapped": self.swapped,
            "checks": [check.to_dict() for check in self.checks],
        }  # fmt: skip


def verify(setup: Setup, tell: Callable[[Check], None] = lambda check: None) -> Report:
    """Make all checks of `setup`, and `tell` of each when it is done.

    Raises:
        RecipeError: The trainer refuses the setup, or no small copy of the model can be made.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder, quiet(), as_at_real_size():
        checks = Checks(Bench(setup, folder))
        for check in checks.each():
            found.append(check)
            tell(check)
        return Report(found, checks.compared_with, checks.swapped)
