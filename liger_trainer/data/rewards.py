"""The reward functions of this package, for `reward_funcs` of a trainer or of a recipe.

A reward function is called as TRL calls it, by keyword: with `prompts`, with `completions` (a list of texts, or of
lists of messages), and with one list for each column of the rows. It returns one number per completion, or None for
one that it does not judge.
"""

from collections.abc import Callable
from typing import Any


def boxed_answer(completions: list, solution: list[str], **columns: Any) -> list[float]:
    """1.0 for a completion whose last `\\boxed{...}` holds the row's `solution`, else 0.0.

    The two are compared as text. Spaces, dollar signs and a `\\boxed{}` around the solution make no difference, but the
    same number written in another way does not match.

    Args:
        completions (`list`): Texts, or lists of messages, of which the last one counts.
        solution (`list[str]`): The right answer for each completion.
    """
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    answers = [_bare(_last_boxed(text)) for text in texts]
    solutions = [_bare(_last_boxed(answer) or answer) for answer in solution]
    return [float(answer is not None and answer == right) for answer, right in zip(answers, solutions, strict=True)]


def _last_boxed(text: str) -> str | None:
    """Find the text inside the last `\\boxed{...}`, which may have braces itself; None if no brace closes it."""
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
