"""Report what was captured in one training."""

from typing import Any


class CaptureSummary:
    """The captures of one training, for the log and the report.

    Args:
        off (`str`, *optional*): Why no step of the training can be captured.

    Attributes:
        sizes (`list[int]`): Tokens of each size that was captured, in that order.
        seconds (`float`): What all captures took.
        replayed (`int`): Calls of backbones that were replayed.
        uncaptured (`dict[str, int]`): How many calls ran the model's own code, for each reason.
    """

    def __init__(self, off: str | None = None) -> None:
        self.off = off
        self.sizes: list[int] = []
        self.seconds = 0.0
        self.replayed = 0
        self.uncaptured: dict[str, int] = {}

    def count(self, reason: str) -> None:
        self.uncaptured[reason] = self.uncaptured.get(reason, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "off": self.off,
            "sizes": sorted(self.sizes),
            "capture_seconds": round(self.seconds, 2),
            "calls_replayed": self.replayed,
            "calls_not_captured": self.uncaptured,
        }

    def one_line(self) -> str:
        """Return what was captured in one line, for the log."""
        if self.off is not None:
            return f"cuda_graphs: steps are not captured, because {self.off}."
        return f"cuda_graphs: {self.describe()}"

    def describe(self) -> str:
        """Return what was captured, to follow the word "captured"."""
        if self.off is not None:
            return f"nothing, because {self.off}"
        total = self.replayed + sum(self.uncaptured.values())
        words = f"{self.replayed} of {total} calls of the backbone replayed"
        if self.sizes:
            words += f", {len(self.sizes)} captures in {self.seconds:.1f} s"
        reasons = "; ".join(f"{reason} ({count})" for reason, count in self.uncaptured.items())
        return f"{words}. Not captured: {reasons}" if reasons else words
