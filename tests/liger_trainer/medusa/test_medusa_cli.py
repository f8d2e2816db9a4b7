"""From prompts to a directory for servers, as a user goes: medusa-data, train, medusa-eval, medusa-export."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from recipe_fixtures import command, write_model, write_recipe, write_rows
from tiny_models import tiny_tokenizer

from liger_trainer.command.recipe import parse_recipe
from liger_trainer.command.run import _heads_evaluation
from liger_trainer.errors import RecipeError
from liger_trainer.medusa.export import load_heads
from liger_trainer.medusa.prompts import answer, encode, read_prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that ends most of its answers, with prompts for it."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("medusa")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    prompts = read_prompts(str(folder / "rows.jsonl"), chat=False)
    texts = answer(model, [encode(tiny_tokenizer(), p) for p in prompts], set(), 24)
    late = [text[8:] for text in texts]
    model.generation_config.eos_token_id = max(range(131), key=lambda token: sum(token in text for text in late))
    model.save_pretrained(folder / "model")
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def medusa_recipe(folder, **keys):
    keys = {"trainer": "medusa", "medusa_num_heads": 2, "dataset_name": "answers.jsonl", "prompt_template": None} | keys
    return write_recipe(folder, **keys)


def printed(out):
    """Return the tokens per pass in the printed table."""
    return float(re.search(r"^ +tokens per forward pass +(\d\.\d+)", out, re.M)[1])


def test_from_prompts_to_servers(folder, cache, capsys):
    prompts = ("--prompts", folder / "rows.jsonl")
    rows = folder / "answers.jsonl"
    code, out, err = command(
        capsys, "medusa-data", folder / "model", *prompts, "--output", rows, "--max_new_tokens", 40
    )
    assert code == 0, err
    written = len(rows.read_text().splitlines())
    assert f"{rows}: {written} rows written" in out and written >= 6
    assert "12 of 12 prompts" in err

    recipe = medusa_recipe(folder, eval_fraction=0.25, medusa_eval_rows=2, medusa_eval_max_new_tokens=16)
    code, out, err = command(capsys, "train", recipe)
    assert code == 0, err
    assert re.search(r"^  steps +4$", out, re.M)
    assert "greedy text after 2 prompts" in out and printed(out) >= 1
    report = json.loads((folder / "out" / "medusa_report.json").read_text())
    assert report["rows"] == 2 and report["heads"]["medusa_num_heads"] == 2
    assert not (folder / "out" / "model.safetensors").exists(), "stage 1 leaves the model as it was"

    numbers = folder / "eval" / "numbers.json"
    code, out, err = command(
        capsys, "medusa-eval", folder / "model", folder / "out", *prompts, "--max_new_tokens", 12, "--max_rows", 3,
        "--output", numbers,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(numbers.read_text())
    assert round(report["chain"], 3) == printed(out) >= 1 and report["rows"] == 3

    code, out, err = command(capsys, "medusa-export", folder / "out", "--output", folder / "served")
    assert code == 0, err
    assert f"{folder / 'served'}: for {folder / 'model'}, format all" in out
    trained, served = load_heads(folder / "out"), load_heads(folder / "served")
    assert trained[1][0].linear.bias.abs().max() > 0, "they were trained"
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, served.state_dict()[name])
    code, _, err = command(capsys, "medusa-export", folder / "out", "--output", folder / "served")
    assert code == 2 and "which is not empty" in err


def test_stage_2_serves_the_trained_model(folder, cache, capsys):
    recipe = medusa_recipe(folder, dataset_name="rows.jsonl", prompt_template="alpaca", medusa_stage=2,
                           medusa_tied=False, output_dir=str(folder / "two"))  # fmt: skip
    code, _, err = command(capsys, "train", recipe)
    assert code == 0, err
    prompts = ("--prompts", folder / "rows.jsonl", "--max_rows", 2, "--max_new_tokens", 8)
    code, out, err = command(capsys, "medusa-eval", folder / "two", folder / "two", *prompts)
    assert code == 0, err
    assert "2 untied heads" in out and printed(out) >= 1
    code, out, err = command(
        capsys, "medusa-export", folder / "two", "--output", folder / "two_served", "--format", "vllm",
        "--dtype", "bfloat16",
    )  # fmt: skip
    assert code == 0, err
    config = json.loads((folder / "two_served" / "config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "two"), "not the model it was trained from"
    heads = load_heads(folder / "two_served")
    assert heads[0].lm_head.weight.dtype == torch.bfloat16 and not heads.config.tied


def test_stage_2_with_lora_is_merged_for_servers(folder, cache, capsys):
    """The output directory evaluates as it is; servers get the merged model, and the same heads."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    out_dir, merged = folder / "lora", folder / "merged"
    recipe = medusa_recipe(folder, dataset_name="rows.jsonl", prompt_template="alpaca", medusa_stage=2, use_peft=True,
                           lora_target_modules=["q_proj", "down_proj"], output_dir=str(out_dir))  # fmt: skip
    code, _, err = command(capsys, "train", recipe)
    assert code == 0, err
    numbers = folder / "lora.json"
    prompts = ("--prompts", folder / "rows.jsonl", "--max_rows", 2, "--max_new_tokens", 8, "--output", numbers)
    code, out, err = command(capsys, "medusa-eval", out_dir, out_dir, *prompts)
    assert code == 0, err
    with_adapter = json.loads(numbers.read_text())["accuracy"]

    code, _, err = command(capsys, "medusa-export", out_dir, "--output", folder / "lora_served")
    assert code == 2 and "holds an adapter" in err
    AutoPeftModelForCausalLM.from_pretrained(out_dir).merge_and_unload().save_pretrained(merged)
    tiny_tokenizer().save_pretrained(merged)
    code, out, err = command(capsys, "medusa-export", out_dir, "--model", merged, "--output", folder / "lora_served")
    assert code == 0, err
    config = json.loads((folder / "lora_served" / "config.json").read_text())
    assert config["base_model_name_or_path"] == str(merged)
    ids = torch.tensor([[5, 9, 11, 40, 3]])
    plain, tuned = AutoModelForCausalLM.from_pretrained(merged), AutoPeftModelForCausalLM.from_pretrained(out_dir)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, tuned(ids).logits, rtol=1e-4, atol=1e-4)
    code, out, err = command(capsys, "medusa-eval", merged, folder / "lora_served", *prompts)
    assert code == 0, err
    assert json.loads(numbers.read_text())["accuracy"] == with_adapter


def test_mistakes_exit_2(folder, capsys, tmp_path):
    rows = ("--prompts", folder / "rows.jsonl")
    for argv, message in (
        (("medusa-eval", folder / "model", folder / "model", *rows), "has no medusa_lm_head.safetensors"),
        (("medusa-eval", folder / "model", "x", *rows, "--output", "x.txt"), "output is 'x.txt'; expected a file"),
        (("medusa-eval", folder / "none", "x", *rows), "there is no such folder"),
        (("medusa-data", folder / "model", "--prompts", "none", "--output", "o.jsonl"), "prompts is 'none'; expected"),
        (("medusa-export", folder / "model", "--output", tmp_path / "o"), "Give the output_dir of a Medusa training"),
    ):  # fmt: skip
        code, out, err = command(capsys, *argv)
        assert code == 2 and message in err, (argv, err)


def test_evaluation_at_the_end_needs_rows_and_one_process(folder):
    with pytest.raises(RecipeError, match="medusa_eval_rows is 4, but there are no rows to evaluate on"):
        parse_recipe(str(medusa_recipe(folder, medusa_eval_rows=4)))
    parse_recipe(str(medusa_recipe(folder, medusa_eval_rows=4, eval_fraction=0.5)))
    trainer = SimpleNamespace(args=SimpleNamespace(medusa_eval_rows=4, world_size=2))
    with pytest.raises(RecipeError, match="works with one process only"):
        _heads_evaluation(trainer, None)
    for key, message in (("medusa_eval_rows", -1), ("medusa_eval_max_new_tokens", 1)):
        with pytest.raises(RecipeError, match=f"{key} is {message}; expected"):
            parse_recipe(str(medusa_recipe(folder, **{key: message})))


def test_rows_without_a_prompt_are_found_before_training(folder, cache, capsys):
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"w{i} w4 w5"}) + "\n" for i in range(3, 12)))
    recipe = medusa_recipe(folder, dataset_name="text.jsonl", eval_fraction=0.3, medusa_eval_rows=2,
                           output_dir=str(folder / "none"))  # fmt: skip
    code, _, err = command(capsys, "train", recipe)
    assert code == 2 and "medusa_eval_rows is 2: Row 0 of the prompts has text; expected one of" in err
    assert not list(folder.glob("none/*")), "nothing was trained"
