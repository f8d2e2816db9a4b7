"""Reward functions by dotted path: where they are found, what counts as one, and the error of a broken module."""

import os
import subprocess
import sys

import pytest
from recipe_fixtures import ROOT, command, write_model, write_recipe

from liger_trainer.command.rows.rewards import find_reward
from liger_trainer.errors import RecipeError

REWARDS = """
import functools, os
from os import system

def brief(completions, **columns):
    return [-float(len(text)) for text in completions]

class Length:
    def __init__(self):
        self.__name__ = "length"
    def __call__(self, completions, **columns):
        return [0.0 for _ in completions]

class Nameless:
    def __call__(self, completions, **columns):
        return [0.0 for _ in completions]

length, nameless, half = Length(), Nameless(), functools.partial(brief, scale=0.5)
number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`write(name, text)` makes a module in a folder that is not on Python's path. It is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(name, text=REWARDS, folder=tmp_path):
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(text)
        return name

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_modules_are_found_next_to_the_recipe_and_in_the_working_directory(tmp_path, module, monkeypatch):
    recipes, work = tmp_path / "recipes", tmp_path / "work"
    module("rewards_of_recipe", folder=recipes)
    module("rewards_of_work", folder=work)
    module("rewards_of_both", "def which(completions, **columns): return 'recipe'", recipes)
    module("rewards_of_both", "def which(completions, **columns): return 'work'", work)
    monkeypatch.chdir(work)
    for name in ("rewards_of_recipe", "rewards_of_work"):
        assert find_reward(f"{name}.brief", recipes).__name__ == "brief"
    assert find_reward("rewards_of_both.which", recipes)([]) == "recipe"
    with pytest.raises(RecipeError, match="'rewards_of_nobody.brief'; expected boxed_answer"):
        find_reward("rewards_of_nobody.brief", recipes)


def test_an_installed_module_is_not_hidden(tmp_path, module):
    """A file next to the recipe may share a library's name; other libraries still import the real one."""
    module("wave", "def brief(completions): return []")
    sys.modules.pop("wave", None)
    with pytest.raises(RecipeError, match="'wave.brief'; expected boxed_answer"):
        find_reward("wave.brief", tmp_path)


def test_what_counts_as_a_function(tmp_path, module):
    name = module("rewards_of_kinds")
    assert find_reward(f"{name}.length", tmp_path)(["a"]) == [0.0]
    assert find_reward(f"{name}.half", tmp_path).keywords == {"scale": 0.5}
    for attribute in ("Length", "os", "number", "missing"):
        with pytest.raises(RecipeError, match="; expected boxed_answer or the dotted path of a function"):
            find_reward(f"{name}.{attribute}", tmp_path)


def test_a_function_that_could_not_be_called(tmp_path, module):
    name = module(
        "rewards_without_columns", "def brief(completions, solution):\n    return [0.0 for _ in completions]\n"
    )
    with pytest.raises(RecipeError, match=r"only takes completions, solution\. .* end its parameters with \*\*columns"):
        find_reward(f"{name}.brief", tmp_path)


@pytest.mark.parametrize("text, error", [("def brief(:", SyntaxError), ("import no_such_library", ModuleNotFoundError)])
def test_an_error_of_a_module_is_raised_as_it_is(text, error, tmp_path, module):
    name = module(f"rewards_broken_{error.__name__}", text)
    with pytest.raises(error):
        find_reward(f"{name}.brief", tmp_path)


@pytest.mark.slow
def test_the_installed_command_finds_them(tmp_path):
    """A script's sys.path[0] is its own folder. For scripts that pip installs, that is elsewhere."""
    folder, scripts = tmp_path / "recipe", tmp_path / "bin"
    folder.mkdir()
    scripts.mkdir()
    write_model(folder / "model")
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "rows.jsonl").write_text('{"prompt": "w4 w5"}\n' * 8)
    (scripts / "liger-trainer").write_text(
        "import sys\nfrom liger_trainer.command.main import main\nsys.exit(main())\n"
    )
    path = write_recipe(
        folder,
        trainer="grpo",
        prompt_template=None,
        reward_funcs=["my_rewards.brief", "my_rewards.nameless"],
        num_generations=2,
        max_completion_length=4,
        per_device_train_batch_size=4,
        max_steps=1,
        max_length=None,
        use_cpu=True,
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, scripts / "liger-trainer", "train", path],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "rewards/brief/mean" in done.stdout and "rewards/Nameless/mean" in done.stdout


def test_help_says_that_naming_a_module_runs_it(capsys):
    code, out, _ = command(capsys, "train", "quickstart", "--help", "reward_funcs")
    assert code == 0 and "imports its module, which runs the module's code" in " ".join(out.split())
