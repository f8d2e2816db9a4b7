"""Count what rows that begin alike have shared in the calls of one backbone, and why others have not."""

from typing import Any


class SharedPrompts:
    """Counts what rows that begin alike have shared, for the report.

    Args:
        never (`str`, *optional*): Why they never share: the proof has shown it, or a call.

    Attributes:
        calls (`int`): Calls with rows that shared a beginning.
        tokens (`int`): Computed in these calls.
        saved (`int`): Not computed in these calls.
        unshared (`dict[str, int]`): For each reason, the calls with rows that began alike and shared nothing.
    """

    def __init__(self, never: str | None = None) -> None:
        self.never = never
        self.calls = 0
        self.tokens = 0
        self.saved = 0
        self.unshared: dict[str, int] = {}

    def count(self, tokens: int, saved: int) -> None:
        self.calls += 1
        self.tokens += tokens
        self.saved += saved

    def refuse(self, reason: str, for_good: bool = False) -> None:
        """Count a call with rows that began alike and shared nothing. `for_good`: no later call tries again."""
        self.unshared[reason] = self.unshared.get(reason, 0) + 1
        if for_good:
            self.never = reason

    @property
    def is_empty(self) -> bool:
        """Return whether no call had rows that begin alike."""
        return not self.calls and not self.unshared

    def to_dict(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "tokens_computed": self.tokens,
            "tokens_saved": self.saved,
            "calls_not_shared": self.unshared,
        }
