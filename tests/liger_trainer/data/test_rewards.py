"""This package's reward functions: which answers get which reward."""

import pytest

from liger_trainer.data.rewards import boxed_answer


@pytest.mark.parametrize(
    "completion, solution, reward",
    [
        ("So it is \\boxed{42}.", "42", 1.0),
        ("First \\boxed{41}, no: \\boxed{ 4 2 }.", "$42$", 1.0),
        ("\\boxed{\\frac{1}{2}}", "The answer is \\boxed{\\frac{1}{2}}", 1.0),
        ([{"role": "assistant", "content": "\\boxed{x+1}"}], "x + 1", 1.0),
        ("\\boxed{42}, but then \\boxed{43}", "42", 0.0),
        ("It is 42.", "42", 0.0),
        ("\\boxed{\\frac{1}{2}", "\\frac{1}{2}", 0.0),  # never closed
        ("\\boxed{}", "0", 0.0),
    ],
)
def test_boxed_answer(completion, solution, reward):
    assert boxed_answer([completion], solution=[solution], prompts=["?"]) == [reward]
