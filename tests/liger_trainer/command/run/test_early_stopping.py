"""`early_stopping_patience` in a recipe: when it stops, what it saves then, and what it needs."""

import json
import re

import pytest
from recipe_fixtures import command, write_recipe

from liger_trainer.command.recipe.read import parse_recipe
from liger_trainer.errors import RecipeError

KEYS = {
    "early_stopping_patience": 2,
    "load_best_model_at_end": True,
    "eval_fraction": 0.25,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
}


def test_stops_and_saves_the_best_model(folder, capsys):
    """The learning rate makes evaluations worse soon."""
    from safetensors.torch import load_file

    code, out, err = command(capsys, "train", write_recipe(folder, **KEYS, max_steps=40, learning_rate=0.2))
    assert code == 0, err
    state = json.loads((folder / "out" / "trainer_state.json").read_text())
    evaluations = [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
    best = state["best_global_step"]
    assert best == 1 + min(range(len(evaluations)), key=evaluations.__getitem__)
    assert state["global_step"] == len(evaluations) == best + 2 < 40
    said = f"eval_loss was best at step {best}, with {evaluations[best - 1]:.3f}, and that model is saved"
    assert f"\n  steps    {best + 2} of 40, stopped early: {said}\n" in out
    saved = load_file(folder / "out" / "model.safetensors")
    kept = load_file(folder / "out" / f"checkpoint-{best}" / "model.safetensors")
    assert all(saved[name].equal(kept[name]) for name in kept)


def test_a_run_to_the_end_says_nothing_of_it(folder, capsys):
    code, out, err = command(capsys, "train", write_recipe(folder, **KEYS, max_steps=3, learning_rate=1e-4))
    assert code == 0, err
    assert re.search(r"^  steps    3$", out, re.M), out


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"load_best_model_at_end": False}, "early_stopping_patience is 2, which has no effect without load_best"),
        (
            {"eval_strategy": "no", "load_best_model_at_end": False, "eval_steps": None, "eval_fraction": None},
            "has no effect without load_best_model_at_end: true",
        ),
        ({"early_stopping_patience": 0}, "early_stopping_patience is 0; expected 1 or more"),
    ],
)
def test_what_it_needs(keys, message, tmp_path):
    with pytest.raises(RecipeError, match=message):
        parse_recipe(str(write_recipe(tmp_path, **KEYS | keys)))


def test_no_evaluation_on_the_command_line_drops_all_that_depends_on_it(tmp_path):
    """`load_best_model_at_end` depends on evaluations, and early stopping depends on it."""
    recipe = parse_recipe(str(write_recipe(tmp_path, **KEYS)), ["--eval_strategy", "no"])
    assert recipe.training.load_best_model_at_end is False
    assert recipe.args.early_stopping_patience is None
