"""From a model's answers to a directory for servers, as a user does it: train, medusa-eval, export and its old name."""

import json
import re

import pytest
import torch
from datasets import Dataset
from recipe_fixtures import command, write_model, write_recipe, write_rows
from tiny_models import tiny_tokenizer

from liger_trainer.command.tools.heads import read_prompts
from liger_trainer.data.answers import answer, encode
from liger_trainer.errors import RecipeError
from liger_trainer.medusa.export import load_heads
from liger_trainer.medusa.prompts import prompt_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that ends most of its answers, with prompts and its answers to them."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("medusa")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    lines = (folder / "rows.jsonl").read_text().splitlines()
    prompts = [prompt_of(json.loads(line), chat=False) for line in lines]
    tokenizer = tiny_tokenizer()
    ids = [encode(tokenizer, prompt) for prompt in prompts]
    late = [text[8:] for text in answer(model, ids, set(), 24)]
    end = max(range(131), key=lambda token: sum(token in text for text in late))
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder / "model")
    texts = zip(prompts, answer(model, ids, {end}, 40), strict=True)
    rows = [{"prompt": prompt, "completion": tokenizer.decode(text[:-1])} for prompt, text in texts if text[-1] == end]
    assert len(rows) >= 6
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def medusa_recipe(folder, **keys):
    keys = {"trainer": "medusa", "medusa_num_heads": 2, "dataset_name": "answers.jsonl", "prompt_template": None} | keys
    return write_recipe(folder, **keys)


def test_prompts_are_read_as_rows_to_train_on(cache, tmp_path):
    rows: list[dict] = [{"instruction": f"w{i} w4", "output": "w5", "prompt": None} for i in range(3, 6)]
    rows.append({"instruction": None, "output": None, "prompt": "w7"})
    plain = [prompt_of(row, True) for row in rows]
    table = Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    table.to_csv(tmp_path / "rows.csv")
    table.to_json(tmp_path / "rows.jsonl")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for kind in ("parquet", "csv", "jsonl", "json"):
        assert read_prompts(str(tmp_path / f"rows.{kind}"), True, None) == plain, kind
    assert read_prompts(str(tmp_path / "rows.json"), True, 2) == plain[:2]


BAD_FILES = {
    "none.json": (None, "'.*none.json', but that file does not exist"),
    "broken.jsonl": ('{"prompt": "w3"}\n{', "which cannot be read: line 2 is not JSON"),
    "empty.jsonl": ("", "which has no rows"),
    "rows.docx": ("w3", "expected a file name that ends in one of .json, .jsonl, .ndjson, .parquet"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_prompts_that_cannot_be_read(name, cache, tmp_path):
    text, message = BAD_FILES[name]
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError, match=f"--prompts is .*{message}"):
        read_prompts(str(tmp_path / name), True, None)


def printed(out):
    """Return the tokens per pass in the printed table."""
    return float(re.search(r"^ +tokens per forward pass +(\d\.\d+)", out, re.M)[1])


def test_from_answers_to_servers(folder, cache, capsys):
    prompts = ("--prompts", folder / "rows.jsonl")
    recipe = medusa_recipe(folder, eval_fraction=0.25, eval_strategy="steps", eval_steps=4)
    code, out, err = command(capsys, "train", recipe)
    assert code == 0, err
    assert re.search(r"^  steps +4$", out, re.M)
    assert not (folder / "out" / "model.safetensors").exists(), "stage 1 leaves the model as it was"

    code, out, err = command(
        capsys, "medusa-eval", folder / "model", folder / "out", *prompts, "--max_new_tokens", 12, "--max_rows", 3
    )
    assert code == 0, err
    assert printed(out) >= 1 and "of greedy text after 3 prompts" in out

    code, out, err = command(capsys, "export", folder / "out", "--output", folder / "served")
    assert code == 0, err
    assert f"{folder / 'served'}: for {folder / 'model'}" in out
    trained, served = load_heads(folder / "out"), load_heads(folder / "served")
    assert trained[1][0].linear.bias.abs().max() > 0, "they were trained"
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, served.state_dict()[name])
    code, _, err = command(capsys, "export", folder / "out", "--output", folder / "served")
    assert code == 2 and "which is not empty" in err


def test_stage_2_serves_the_trained_model(folder, cache, capsys):
    recipe = medusa_recipe(
        folder,
        dataset_name="rows.jsonl",
        prompt_template="alpaca",
        medusa_stage=2,
        medusa_tied=False,
        output_dir=str(folder / "two"),
    )
    code, _, err = command(capsys, "train", recipe)
    assert code == 0, err
    prompts = ("--prompts", folder / "rows.jsonl", "--max_rows", 2, "--max_new_tokens", 8)
    code, out, err = command(capsys, "medusa-eval", folder / "two", folder / "two", *prompts)
    assert code == 0, err
    assert "2 untied heads" in out and printed(out) >= 1
    code, out, err = command(capsys, "export", folder / "two", "--output", folder / "two_served", "--dtype", "bfloat16")
    assert code == 0, err
    config = json.loads((folder / "two_served" / "config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "two"), "not the model it was trained from"
    heads = load_heads(folder / "two_served")
    assert heads[0].lm_head.weight.dtype == torch.bfloat16 and not heads.config.tied


def test_stage_2_with_lora_is_merged_for_servers(folder, cache, capsys):
    """The output directory evaluates as it is. Servers get the merged model and the same heads."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    out_dir, merged = folder / "lora", folder / "merged"
    recipe = medusa_recipe(
        folder,
        dataset_name="rows.jsonl",
        prompt_template="alpaca",
        medusa_stage=2,
        use_peft=True,
        lora_target_modules=["q_proj", "down_proj"],
        output_dir=str(out_dir),
    )
    code, _, err = command(capsys, "train", recipe)
    assert code == 0, err
    prompts = ("--prompts", folder / "rows.jsonl", "--max_rows", 2, "--max_new_tokens", 8)
    code, with_adapter, err = command(capsys, "medusa-eval", out_dir, out_dir, *prompts)
    assert code == 0, err

    code, _, err = command(capsys, "export", out_dir, "--output", folder / "lora_served")
    assert code == 2 and "holds an adapter" in err
    AutoPeftModelForCausalLM.from_pretrained(out_dir).merge_and_unload().save_pretrained(merged)
    tiny_tokenizer().save_pretrained(merged)
    code, out, err = command(capsys, "export", out_dir, "--model", merged, "--output", folder / "lora_served")
    assert code == 0, err
    config = json.loads((folder / "lora_served" / "config.json").read_text())
    assert config["base_model_name_or_path"] == str(merged)
    ids = torch.tensor([[5, 9, 11, 40, 3]])
    plain = AutoModelForCausalLM.from_pretrained(merged)
    tuned = AutoPeftModelForCausalLM.from_pretrained(out_dir)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, tuned(ids).logits, rtol=1e-4, atol=1e-4)
    code, out, err = command(capsys, "medusa-eval", merged, folder / "lora_served", *prompts)
    assert code == 0, err
    assert out == with_adapter


def test_mistakes_exit_2(folder, capsys, tmp_path):
    rows = ("--prompts", folder / "rows.jsonl")
    for argv, message in (
        (("medusa-eval", folder / "model", folder / "model", *rows), "has neither medusa_lm_head.safetensors nor"),
        (("medusa-eval", folder / "none", "x", *rows), "that folder does not exist"),
        (("medusa-eval", folder / "model", folder / "heads", "--prompts", "none"), "prompts is 'none', which"),
        (("export", folder / "model", "--output", tmp_path / "o"), "nor Medusa heads nor"),
    ):
        code, out, err = command(capsys, *argv)
        assert code == 2 and message in err, (argv, err)
