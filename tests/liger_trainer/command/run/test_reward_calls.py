"""Errors and wrong results of a recipe's reward functions are reported in one line with the function's name."""

import asyncio

import pytest
import torch
from recipe_fixtures import command, write_model, write_recipe

from liger_trainer.command.run.reward_calls import checked_reward
from liger_trainer.errors import RewardError

PROMPTS, COMPLETIONS = ["w3", "w3"], ["w4", "w5"]


def number(completions, **columns):
    return 1.0


def short(completions, **columns):
    return [1.0]


def texts(completions, **columns):
    return ["good" for _ in completions]


def broken(completions, **columns):
    return [text["score"] for text in completions]


WRONG = {
    number: "'my.number', which returned 1.0; return a list of 2 numbers",
    short: "'my.short', which returned 1 values; return a list of 2 numbers",
    texts: "'my.texts', which returned 'good' among them; return a list of 2 numbers",
    broken: r"'my.broken', which raised TypeError in line \d+ of .*test_reward_calls.py: string indices",
}


@pytest.mark.parametrize("reward", WRONG, ids=lambda reward: reward.__name__)
def test_a_wrong_reward_names_its_function(reward):
    with pytest.raises(RewardError, match=WRONG[reward]):
        checked_reward(f"my.{reward.__name__}", reward)(prompts=PROMPTS, completions=COMPLETIONS)


@pytest.mark.parametrize("rewards", [[1, None], (0.5, 2.0), torch.tensor([1.0, 2.0]), [torch.tensor(1.0), True]])
def test_numbers_pass_as_they_are(rewards):
    def mine(completions, **columns):
        return rewards

    checked = checked_reward("my.mine", mine)
    assert checked(prompts=PROMPTS, completions=COMPLETIONS) == list(rewards)
    assert checked.__name__ == "mine", "TRL logs rewards by this name"


def test_asynchronous_rewards():
    async def slow(completions, **columns):
        return [1.0 for _ in completions]

    async def wrong(completions, **columns):
        return 1.0

    assert asyncio.run(checked_reward("my.slow", slow)(prompts=PROMPTS, completions=COMPLETIONS)) == [1.0, 1.0]
    with pytest.raises(RewardError, match="'my.wrong', which returned 1.0"):
        asyncio.run(checked_reward("my.wrong", wrong)(prompts=PROMPTS, completions=COMPLETIONS))


def test_an_object_without_a_name():
    class Length:
        def __call__(self, completions, **columns):
            return [float(len(text)) for text in completions]

    checked = checked_reward("my.length", Length())
    assert checked(prompts=PROMPTS, completions=COMPLETIONS) == [2.0, 2.0]
    assert checked.__name__ == "Length"


def test_a_training_ends_in_one_line(tmp_path, capsys):
    write_model(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w3 w4"}\n' * 4)
    (tmp_path / "numbered_rewards.py").write_text("def number(completions, **columns):\n    return 1.0\n")
    path = write_recipe(
        tmp_path,
        trainer="grpo",
        dataset_name="prompts.jsonl",
        prompt_template=None,
        max_length=None,
        reward_funcs=["numbered_rewards.number"],
        num_generations=2,
        max_completion_length=4,
    )
    code, _, err = command(capsys, "train", path)
    assert code == 2 and "error: " in err
    assert "reward_funcs has 'numbered_rewards.number', which returned 1.0; return a list of 2 numbers" in err
    assert "Traceback" not in err
