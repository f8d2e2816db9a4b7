"""What was captured in one training, for the log and the report."""

from typing import Any


class Summary:
    """What was captured in one training, for the report."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.seconds = 0.0
        self.replayed = 0
        self.uncaptured: dict[str, int] = {}

    def count(self, reason: str) -> None:
        self.uncaptured[reason] = self.uncaptured.get(reason, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "sizes": sorted(self.sizes),
            "capture_seconds": round(self.seconds, 2),
            "calls_replayed": self.replayed,
            "calls_not_captured": self.uncaptured,
        }

    def one_line(self) -> str:
        total = self.replayed + sum(self.uncaptured.values())
        reasons = "; ".join(f"{reason} ({count})" for reason, count in self.uncaptured.items())
        line = f"cuda_graphs: {self.replayed} of {total} calls of the backbone replayed"
        if self.sizes:
            line += f", {len(self.sizes)} sizes captured in {self.seconds:.1f} s"
        return f"{line}. Not captured: {reasons}." if reasons else f"{line}."
