"""Defines this package's reward functions, for `reward_funcs` of a trainer or a recipe.

TRL calls a reward function by keyword: with `prompts`, with `completions` (a list of texts, or of lists of messages),
and with one list for each column of the rows. It returns one number per completion, or None for a completion that it
does not judge.
"""

from collections.abc import Callable
from typing import Any


def boxed_answer(completions: list, solution: list[str], **columns: Any) -> list[float]:
    """Return 1.0 for each completion with the row's `solution` in its last `\\boxed{...}`, else 0.0.

    The two are compared as text. Spaces, dollar signs and a `\\boxed{}` around the solution make no difference, but the
    same number in another notation does not match.

    Args:
        completions (`list`): Texts, or lists of messages; of messages, the last one counts.
        solution (`list[str]`): The right answer for each completion.
    """
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    answers = [_bare(_last_boxed(text)) for text in texts]
    solutions = [_bare(_last_boxed(answer) or answer) for answer in solution]
    return [float(answer is not None and answer == right) for answer, right in zip(answers, solutions, strict=True)]


def _last_boxed(text: str) -> str | None:
    """Return the text inside the last `\\boxed{...}`, which may contain braces; None if it is not closed."""
    start, mark = text.rfind("\\boxed{"), len("\\boxed{")
    if start < 0:
        return None
    depth = 1
    for end in range(start + mark, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + mark : end]
    return None


def _bare(answer: str | None) -> str | None:
    return None if answer is None else "".join(answer.replace("$", "").split())


REWARDS: dict[str, Callable] = {"boxed_answer": boxed_answer}
