"""Counts how many tokens rows with the same prompt have shared, and why other calls shared nothing."""

from typing import Any


class SharedPrompts:
    """Counts shared tokens in the calls of one backbone, for the report.

    Args:
        never (`str`, *optional*): The reason why this backbone never shares, found by its proof or by a call.

    Attributes:
        calls (`int`): The calls with rows that shared a prefix.
        tokens (`int`): The tokens that these calls computed.
        saved (`int`): The tokens that these calls did not compute.
        unshared (`dict[str, int]`): For each reason, the calls with rows that start alike and shared nothing.
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
        """Count a call with rows that start alike and shared nothing. With `for_good`, no later call tries again."""
        self.unshared[reason] = self.unshared.get(reason, 0) + 1
        if for_good:
            self.never = reason

    @property
    def is_empty(self) -> bool:
        """Return whether no call had rows that start alike."""
        return not self.calls and not self.unshared

    def to_dict(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "tokens_computed": self.tokens,
            "tokens_saved": self.saved,
            "calls_not_shared": self.unshared,
        }
