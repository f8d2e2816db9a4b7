"""Misspelt keys, told before TRL and transformers are imported."""

import dataclasses
import subprocess
import sys

import pytest
from recipe_fixtures import command, write_recipe
from trl import ModelConfig

import liger_trainer
from liger_trainer.command.early_keys import known_names
from liger_trainer.command.recipe import TRAINERS, RecipeArguments


@pytest.mark.parametrize("name", TRAINERS)
def test_every_key_of_every_trainer_is_known(name):
    """Else a right key would be refused."""
    classes = (RecipeArguments, ModelConfig, getattr(liger_trainer, TRAINERS[name].config))
    assert {field.name for cls in classes for field in dataclasses.fields(cls)} <= known_names()


def test_a_misspelt_option_is_told_without_the_slow_imports():
    code = (
        "import sys\n"
        "from liger_trainer.command.main import main\n"
        "code = main(['train', 'quickstart', '--lerning_rate', '1'])\n"
        "assert code == 2 and not {'trl', 'torch', 'transformers'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "liger-trainer: error: --lerning_rate is not an option. Did you mean --learning_rate?\n"


@pytest.mark.parametrize(
    "keys, words, message",
    [
        (
            {"lerning_rate": 1},
            [],
            "'lerning_rate' (with value 1) is not a key of a recipe. Did you mean",
        ),
        ({}, ["--max-stesp=3"], "--max_stesp is not an option. Did you mean --max_steps?"),
        ({}, ["--no_use_ligr"], "--no_use_ligr is not an option."),
    ],
)
def test_messages(keys, words, message, tmp_path, capsys):
    code, _, err = command(capsys, "train", write_recipe(tmp_path, **keys), *words)
    assert code == 2 and message in err
