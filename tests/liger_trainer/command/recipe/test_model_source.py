"""Errors about a model that cannot be found name what the user typed."""

import pytest
from recipe_fixtures import command

from liger_trainer.command.recipe.model_source import find_model
from liger_trainer.errors import RecipeError


@pytest.mark.parametrize("key", ["model_name_or_path", "teacher_model_name_or_path"])
def test_an_error_names_the_key(key):
    with pytest.raises(RecipeError, match=rf"^{key} is './nowhere', but that folder does not exist"):
        find_model("./nowhere", key=key)


@pytest.mark.parametrize("name", ["./nowhere", "no-such-model"])
@pytest.mark.parametrize("words", [["doctor"], ["chat"]], ids=" ".join)
def test_a_command_names_its_argument(words, name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = command(capsys, *words, name)
    assert code == 2 and f"MODEL is {name!r}" in err and "model_name_or_path" not in err
