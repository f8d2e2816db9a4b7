"""benchmarks/recipes.py starts each shipped recipe with rows for its trainer, and then the commands of its header."""

import json

import pytest
import yaml
from benchmark_scripts import benchmarks_on_path  # noqa: F401
from mtp_bases import mtp_trainer, write_base
from tiny_models import tiny_tokenizer

from liger_trainer.command.recipe.read import parse_recipe, recipe_names
from liger_trainer.mtp.export import export_head
from liger_trainer.paths import shipped


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_gets_rows_of_its_trainer(name, tmp_path):
    import images

    import recipes

    rows = [{"instruction": "Add.", "input": "1 2", "output": "3", "conversations": []}]
    for file in ("alpaca", "dpo", "kto"):
        (tmp_path / f"{file}_en_demo.json").write_text(json.dumps(rows))
    recipes.write_rows(tmp_path, tmp_path)
    options = recipes.parsed(["--data", str(tmp_path), "--folder", str(tmp_path), "--", "--max_steps", "2"])
    given = yaml.safe_load((shipped("recipes") / f"{name}.yaml").read_text())
    words, out = recipes.words_of(name, given, options, tmp_path / "model")
    assert words[:2] == ["train", name]
    recipe = parse_recipe(name, [*words[2:], "--bf16", "false"])
    assert recipe.training.max_steps == 2 and recipe.training.output_dir == str(out)
    assert recipes.RECIPES[name][0] in {**recipes.MODELS, **images.MODELS}
    assert name in options.recipes or name in recipes.SEVERAL_GPUS
    then = [words[0] for words in recipes.after(given, out, tmp_path / "model", tmp_path)]
    heads = {
        "medusa": ["medusa-eval", *["merge"] * ("use_peft" in given), "export"],
        "eagle": ["eagle-eval", "export"],
        "mtp": ["mtp-eval", "export"],
    }
    assert then == heads.get(given.get("trainer"), [])
    stage1 = recipe.training.to_dict().get("medusa_init_heads_from")
    if stage1:
        assert stage1 == str(options.folder / "outputs/llama3_8b/medusa_stage1")


def test_an_mtp_head_is_reloaded_as_it_is_served(tmp_path):
    """From the model that `export` has written, since the training saves the head alone."""
    import recipes

    write_base(tmp_path / "base", layer_types=["full_attention"] * 2)
    out = tmp_path / "out"
    trainer = mtp_trainer(tmp_path / "base", out, alone=True)
    trainer.train()
    trainer.save_model()
    export_head(str(out), f"{out}_servers", str(tmp_path / "base"))
    text = "w5 w9 w30 w7 w101 w12 w40 w5"
    found = recipes.reload(out, [text, "w9"])
    trained, of_base = found["mtp head"]
    assert len(found) == 1 and recipes.why_not_trained(found, "") is None and trained != of_base

    ids = tiny_tokenizer()(text, return_tensors="pt")["input_ids"]
    trainer.compute_loss(trainer.model.train(), {"input_ids": ids, "labels": ids})
    trainer.log({})
    assert trained == pytest.approx(trainer.state.log_history[-1]["mtp_loss"], rel=2e-2), "read in bf16"


def test_completions_of_a_random_model_get_different_rewards():
    import _rewards

    messages = [[{"role": "assistant", "content": "aEx."}], [{"role": "assistant", "content": "xyz"}]]
    assert _rewards.share_of_vowels(messages, prompts=[]) == [0.5, 0.0]
    assert _rewards.share_of_vowels(["", "oo"]) == [0.0, 1.0]


LOGS = "{'reward': '0', 'frac_reward_zero_std': '1'}\n{'reward': '0', 'frac_reward_zero_std': '%s'}\n"


@pytest.mark.parametrize(
    "again, log, why",
    [
        pytest.param({"model": [2.5, 2.75]}, LOGS % "0.5", None, id="trained"),
        pytest.param({"model": [2.5]}, "", None, id="no-adapter"),
        pytest.param({"heads": [float("nan")]}, "", "not finite", id="nan"),
        pytest.param({"mtp head": [2.5, 2.5]}, "", "the loss that it had before", id="idle-head"),
        pytest.param({"model": [2.5, 2.5]}, LOGS % "1", "all completions of a prompt had the same reward", id="equal"),
        pytest.param({"model": [2.5, 2.5]}, LOGS % "0.75", "changes no loss", id="idle"),
        pytest.param({"model": [2.5, 2.5]}, "", "changes no loss", id="idle-sft"),
    ],
)
def test_what_was_not_trained_says_why(again, log, why):
    import recipes

    found = recipes.why_not_trained(again, log)
    assert found is None if why is None else why in found
    assert why is None or ("same reward" in found) == ("same reward" in why)
