"""From rows to files for servers with `trainer: mtp`: train, mtp-eval, export; and what `export_head` writes."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from base_checkpoints import names_of, tensor_of
from mtp_bases import mtp_trainer, write_base, write_layer_base
from recipe_fixtures import command, write_recipe, write_rows
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from liger_trainer.mtp.export import base_of, export_head


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def train_head(folder, **options):
    """A base in several files, and a head that was trained on it. Return the tensors of the base's own head."""
    extra = write_base(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model.save_pretrained(folder / "base", max_shard_size="20KB")
    names = {**load_index(folder / "base"), **dict.fromkeys(extra, "model-mtp.safetensors")}
    write_index(folder / "base", names)
    save_file(extra, folder / "base" / "model-mtp.safetensors", {"format": "pt"})
    trainer = mtp_trainer(folder / "base", folder / "out", alone=True, **options)
    trainer.train()
    trainer.save_model()
    return extra, trainer


def load_index(folder):
    (folder / "model.safetensors").unlink(missing_ok=True)
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def write_index(folder, names):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def test_the_exported_model_is_the_base_with_another_head(tmp_path):
    extra, trainer = train_head(tmp_path)
    assert base_of(tmp_path / "out") == str(tmp_path / "base")
    (tmp_path / "base" / "optimizer.pt").write_bytes(b"")
    assert export_head(tmp_path / "out", tmp_path / "served", str(tmp_path / "base")) == len(extra)
    assert names_of(tmp_path / "served") == names_of(tmp_path / "base")
    for name in names_of(tmp_path / "base"):
        got = tensor_of(tmp_path / "served", name)
        if name in extra:
            assert torch.equal(got, trainer.model.get_parameter(name)) and not torch.equal(got, extra[name]), name
        else:
            assert torch.equal(got, tensor_of(tmp_path / "base", name)), name
    served = {path.name for path in (tmp_path / "served").iterdir()}
    base = {path.name for path in (tmp_path / "base").iterdir()}
    assert base - served == {"optimizer.pt"} and served <= base


def test_the_head_gets_the_dtype_of_the_base(tmp_path):
    train_head(tmp_path)
    path = tmp_path / "base" / "model-mtp.safetensors"
    in_16_bit = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(in_16_bit, path, {"format": "pt"})
    export_head(tmp_path / "out", tmp_path / "served", str(tmp_path / "base"))
    for name, tensor in load_file(tmp_path / "out" / "mtp.safetensors").items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor_of(tmp_path / "served", name), tensor.bfloat16()), name


def test_heads_for_other_models(tmp_path):
    train_head(tmp_path, max_steps=1)
    write_layer_base(tmp_path / "other", "glm4_moe")
    with pytest.raises(ValueError, match="is .* in .*out and missing in .*other, so the head is for another model"):
        export_head(tmp_path / "out", tmp_path / "served", str(tmp_path / "other"))
    with pytest.raises(ValueError, match="gone' cannot be read: .* Give its folder as model"):
        export_head(tmp_path / "out", tmp_path / "served", str(tmp_path / "gone"))
    assert not Path(tmp_path / "served").exists()
    with pytest.raises(ValueError, match="which is not empty; servers read every file there"):
        export_head(tmp_path / "out", tmp_path / "out", str(tmp_path / "base"))


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(write_base, id="qwen3_5"),
        pytest.param(partial(write_layer_base, kind="glm4_moe"), id="glm4_moe", marks=pytest.mark.slow),
        pytest.param(partial(write_layer_base, kind="deepseek_v3"), id="deepseek_v3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("targets", ["hard", "soft"])
def test_from_rows_to_servers(write, targets, tmp_path, capsys):
    extra = write(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    recipe = write_recipe(tmp_path, trainer="mtp", mtp_targets=targets, packing=targets == "soft")
    code, out, err = command(capsys, "train", recipe)
    assert code == 0, err
    assert not list((tmp_path / "out").glob("model*")), "the model stays as it was"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- Loss: of the MTP head, mtp_targets: " in card and "nll" not in card
    assert re.search(r"Right guesses of the heads, by position ahead \(training\): \d\.\d{3}", card)

    prompts = ("--prompts", tmp_path / "rows.jsonl", "--max_new_tokens", 12, "--max_rows", 3)
    code, separate, err = command(capsys, "mtp-eval", tmp_path / "model", tmp_path / "out", *prompts)
    assert code == 0, err
    assert "MTP head: one guess" in separate and "after 3 prompts" in separate
    code, out, err = command(capsys, "export", tmp_path / "out", "--output", tmp_path / "served")
    assert code == 0, err
    assert f"{tmp_path / 'model'} with {len(extra)} tensors of the trained head" in out
    code, together, err = command(capsys, "mtp-eval", tmp_path / "served", *prompts)
    assert code == 0, err
    assert together == separate

    stored = load_file(tmp_path / "out" / "mtp.safetensors")
    assert stored.keys() == extra.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor_of(tmp_path / "served", name), tensor), name
    ids = torch.tensor([[5, 9, 7]])
    texts = []
    for folder in ("model", "served"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        texts.append(model.generate(ids, max_new_tokens=8, do_sample=False))
    assert torch.equal(*texts)


def test_refusals(tmp_path, capsys):
    train_head(tmp_path, max_steps=1)
    write_rows(tmp_path / "rows.jsonl")
    prompts = ("--prompts", tmp_path / "rows.jsonl")
    code, _, err = command(capsys, "mtp-eval", tmp_path / "out", *prompts)
    assert code == 2 and "which has an MTP head without its model. Name the model first" in err
    code, _, err = command(capsys, "mtp-eval", tmp_path / "base", tmp_path / "base", *prompts)
    assert code == 2 and "base has no mtp.safetensors" in err
    code, _, err = command(capsys, "export", tmp_path / "out", "--output", tmp_path / "s", "--dtype", "float16")
    assert code == 2 and "--dtype is float16, but an MTP head gets the dtype of its model" in err
    code, _, err = command(capsys, "merge", tmp_path / "out", tmp_path / "s")
    assert code == 2 and "an MTP head for a model that did not change" in err and "liger-trainer export" in err
    code, _, err = command(capsys, "chat", tmp_path / "out")
    assert code == 2 and "an MTP head without its model. Give the model" in err
    shutil.copy(tmp_path / "base" / "config.json", tmp_path / "out" / "adapter_config.json")
    code, _, err = command(capsys, "export", tmp_path / "out", "--output", tmp_path / "served")
    assert code == 2 and "an adapter and the MTP head for it. Merge both" in err
    (tmp_path / "model").symlink_to(tmp_path / "base")
    recipe = write_recipe(tmp_path, trainer="mtp")
    code, _, err = command(capsys, "verify", recipe)
    assert code == 2 and "TRL has no trainer of MTP heads to compare with" in err
    code, _, err = command(capsys, "fit", recipe)
    assert code == 2 and "cannot estimate a step with LigerMTPTrainer" in err
