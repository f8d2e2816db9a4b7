"""From a model's answers to a directory for servers, as a user does it: train, eagle-eval, export."""

import json
import re

import pytest
import torch
from eagle_brute_force import eagle_target
from eagle_servers import TABLE
from recipe_fixtures import command, write_recipe, write_rows
from safetensors.torch import load_file
from tiny_models import tiny_tokenizer

from liger_trainer import EagleDrafter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eagle")
    eagle_target().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    write_rows(folder / "rows.jsonl")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def eagle_recipe(folder, **keys):
    own = {"trainer": "eagle", "eagle_steps": 3, "eagle_draft_vocab_size": 50, "eagle_layers": [0, 1, 3]}
    return write_recipe(folder, **(own | keys))


def test_from_answers_to_servers(folder, capsys):
    code, out, err = command(capsys, "train", eagle_recipe(folder))
    assert code == 0, err
    assert re.search(r"^  steps +4$", out, re.M)
    assert not (folder / "out" / "model.safetensors").exists(), "the model stays as it was"

    prompts = ("--prompts", folder / "rows.jsonl", "--max_new_tokens", 12, "--max_rows", 3, "--steps", 2)
    code, out, err = command(capsys, "eagle-eval", folder / "model", folder / "out", *prompts)
    assert code == 0, err
    assert float(re.search(r"^ +tokens per forward pass +(\d\.\d+)", out, re.M)[1]) >= 1
    assert "EAGLE-3: 2 steps, 50 tokens to guess from" in out and "after 3 prompts" in out

    code, out, err = command(capsys, "export", folder / "out", "--output", folder / "served")
    assert code == 0, err
    assert f"{folder / 'served'}: for {folder / 'model'}" in out
    served = load_file(folder / "served" / "model.safetensors")
    trained = EagleDrafter.from_pretrained(folder / "out").state_dict()
    assert served.keys() == TABLE.keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in served.items())
    code, _, err = command(capsys, "export", folder / "out", "--output", folder / "served")
    assert code == 2 and "which is not empty" in err

    words = ("--model", "org/other", "--dtype", "bfloat16")
    code, out, err = command(capsys, "export", folder / "out", "--output", folder / "other", *words)
    assert code == 0, err
    config = json.loads((folder / "other" / "config.json").read_text())
    assert config["base_model_name_or_path"] == "org/other" and config["torch_dtype"] == "bfloat16"


def test_a_recipe_that_goes_on_with_another_vocabulary_is_refused(folder, capsys):
    keys = {"output_dir": str(folder / "again"), "save_strategy": "steps", "save_steps": 2}
    code, _, err = command(capsys, "train", eagle_recipe(folder, **keys))
    assert code == 0, err
    words = ("--resume_from_checkpoint", folder / "again" / "checkpoint-2", "--eagle_draft_vocab_size", 40)
    code, _, err = command(capsys, "train", eagle_recipe(folder, **keys), *words)
    assert code == 2 and "eagle_draft_vocab_size" in err


def test_refusals(folder, tmp_path, capsys):
    code, _, err = command(capsys, "eagle-eval", folder / "model", tmp_path, "--prompts", folder / "rows.jsonl")
    assert code == 2 and "has no EAGLE-3 drafter" in err
    words = ("--prompts", folder / "rows.jsonl", "--steps", 0)
    code, _, err = command(capsys, "eagle-eval", folder / "model", tmp_path, *words)
    assert code == 2 and "--steps is 0; expected 1 or more" in err
    code, _, err = command(capsys, "export", tmp_path, "--output", tmp_path / "served")
    assert code == 2 and "neither an EAGLE-3 drafter nor Medusa heads nor a separate MTP head" in err
    code, _, err = command(capsys, "verify", eagle_recipe(folder))
    assert code == 2 and "TRL has no trainer of drafters" in err
    code, _, err = command(capsys, "fit", eagle_recipe(folder))
    assert code == 2 and "cannot estimate a step with LigerEagleTrainer" in err


@pytest.mark.slow
def test_verify_leaves_an_mtp_head_out(folder, capsys):
    """Its small copy has no checkpoint to load the head from. The rest of the recipe is verified."""
    path = write_recipe(folder, train_mtp=True, mtp_targets="soft", max_steps=2)
    code, out, err = command(capsys, "verify", path)
    assert code == 0, out + err
    assert "left out of this recipe: train_mtp, mtp_targets" in out
