"""Reward functions of a recipe: how they are found by name, and recipes that train with them."""

import json

import pytest
import torch
from recipe_fixtures import command, write_model, write_recipe
from tiny_models import tiny_model

from liger_trainer.command.recipe.read import parse_recipe
from liger_trainer.command.rows.rewards import find_reward
from liger_trainer.data.rewards import REWARDS
from liger_trainer.errors import RecipeError


def test_found_by_name_or_dotted_path():
    assert find_reward("boxed_answer") is REWARDS["boxed_answer"]
    assert find_reward("trl.rewards.think_format_reward").__name__ == "think_format_reward"
    with pytest.raises(
        RecipeError, match="Neither the folder of the recipe nor the working directory has a module no_such_module"
    ):
        find_reward("no_such_module.reward")
    with pytest.raises(RecipeError, match="liger_trainer.data.rewards has no function length"):
        find_reward("liger_trainer.data.rewards.length")
    for name in (
        "boxed_anser",
        "json.decoder.no.reward",
        "no_such_module.reward",
        "liger_trainer.data.rewards.length",
        "math.pi",
        "collections.Counter",
    ):
        with pytest.raises(RecipeError, match=f"'{name}'; expected boxed_answer or the dotted path of a function"):
            find_reward(name)


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"trainer": "grpo"},
            "reward_funcs is None; expected a list for grpo, rloo alone",
        ),
        ({"reward_funcs": ["boxed_answer"]}, "reward_funcs is .*boxed_answer.*; expected a list for grpo, rloo alone"),
        ({"trainer": "distillation"}, "LigerDistillationTrainer needs teacher_model_name_or_path"),
    ],
)
def test_what_a_trainer_needs(keys, message, tmp_path):
    if "trainer" in keys:
        keys = keys | {"max_length": None, "per_device_train_batch_size": 8}
    with pytest.raises(RecipeError, match=message):
        parse_recipe(str(write_recipe(tmp_path, **keys)))


CHAT = (
    "{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a chat template, and rows for every trainer here."""
    folder = tmp_path_factory.mktemp("rewards")
    write_model(folder / "model")
    tiny_model("llama", seed=7).save_pretrained(folder / "teacher")
    (folder / "model" / "chat_template.jinja").write_text(CHAT)
    generator = torch.Generator().manual_seed(0)

    def words(n):
        return " ".join(f"w{int(i)}" for i in torch.randint(3, 131, (n,), generator=generator))

    prompts = [{"prompt": words(4), "solution": words(1)} for _ in range(8)]
    marked = [
        {
            "messages": [{"role": "user", "content": words(3)}, {"role": "assistant", "content": words(4)}],
            "label": i % 2 == 0,
        }
        for i in range(8)
    ]
    for name, rows in (("prompts", prompts), ("marked", marked)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


GROUPS = {"num_generations": 2, "max_completion_length": 4, "per_device_train_batch_size": 4}
RECIPES = {
    "kto": {"dataset_name": "marked.jsonl", "prompt_template": "last_turn", "per_device_train_batch_size": 4},
    "grpo": {"dataset_name": "prompts.jsonl", "reward_funcs": ["trainer_parity.letters", "boxed_answer"], **GROUPS},
    "rloo": {"dataset_name": "prompts.jsonl", "reward_funcs": ["trainer_parity.letters"], **GROUPS},
    "distillation": {"dataset_name": "prompts.jsonl", "max_completion_length": 4},
}


def test_a_column_that_a_reward_reads(folder, capsys):
    """`boxed_answer` needs the solution, which the rows have under another name."""
    path = write_recipe(folder, trainer="grpo", max_length=None, **RECIPES["grpo"] | {"prompt_template": None})
    code, _, err = command(capsys, "train", path, "--columns", "{answer: solution}", "--dry_run")
    assert code == 2 and "column solution, but the rows have prompt, answer." in err and "'boxed_answer'" in err
    assert command(capsys, "train", path, "--dry_run")[0] == 0


def test_too_few_rewards(folder, tmp_path, capsys, monkeypatch):
    """TRL counts them only after it has generated the first completions."""
    (tmp_path / "too_few.py").write_text("def one(completions, **columns):\n    return [0.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    keys = RECIPES["grpo"] | {"reward_funcs": ["too_few.one"], "prompt_template": "none", "max_length": None}
    path = write_recipe(folder, trainer="grpo", output_dir=str(tmp_path / "out"), **keys)
    code, _, err = command(capsys, "train", path)
    assert code == 2 and "Traceback" not in err
    assert "reward_funcs has 'too_few.one', which returned " in err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "trainer", [pytest.param(name, marks=() if name in ("kto", "grpo") else pytest.mark.slow) for name in RECIPES]
)
def test_recipe_trains(trainer, folder, capsys):
    keys = {"prompt_template": "none", "max_steps": 2, "max_length": 32 if trainer == "kto" else None}
    if trainer == "distillation":
        keys["teacher_model_name_or_path"] = str(folder / "teacher")
    path = write_recipe(folder, trainer=trainer, output_dir=str(folder / trainer), **(keys | RECIPES[trainer]))
    code, out, err = command(capsys, "train", path)
    assert code == 0, err
    assert "fused_linear_cross_entropy 1/1" in out
    logs = json.loads((folder / trainer / "trainer_state.json").read_text())["log_history"]
    assert len(logs) == 3 and all("loss" in log and log["grad_norm"] > 0 for log in logs[:2])
    if trainer == "grpo":
        assert {"rewards/letters/mean", "rewards/boxed_answer/mean"} <= logs[0].keys()
