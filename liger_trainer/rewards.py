"""Reward functions that ship, for `reward_funcs` of a trainer or of a recipe.

A reward function is TRL's: called with `prompts`, `completions` (a list of texts, or of lists of messages), and each
column of the rows, a list each, by keyword, it returns one number per completion, or None to leave one out.
"""

from collections.abc import Callable


def boxed_answer(completions: list, solution: list[str], **columns) -> list[float]:
    """1.0 for a completion whose last `\\boxed{...}` holds the row's `solution`, else 0.0.

    Compared as text: spaces, dollar signs and a `\\boxed{}` around the solution do not count, another way to write the
    same number does.

    Args:
        completions (`list`): Texts, or lists of messages, of which the last counts.
        solution (`list[str]`): The right answer to each.
    """
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    given = [_bare(_last_boxed(text)) for text in texts]
    wanted = [_bare(_last_boxed(answer) or answer) for answer in solution]
    return [float(answer is not None and answer == right) for answer, right in zip(given, wanted, strict=True)]


def _last_boxed(text: str) -> str | None:
    """What stands between the braces of the last `\\boxed{`, braces within it included; None without a whole one."""
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
