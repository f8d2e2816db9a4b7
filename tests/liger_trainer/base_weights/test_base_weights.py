"""Weights that transformers does not load from a base are saved with the model bit for bit, or config.json says so."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
import transformers
from base_checkpoints import KINDS, assert_kept, names_of, tensor_of, write_base
from packaging import version
from recipe_fixtures import command, write_recipe, write_rows
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Trainer

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.base_weights import shards, unloaded
from liger_trainer.base_weights.unloaded import find_checkpoint, keep_unloaded_weights

ROWS = [{"input_ids": list(range(3, 19)), "labels": list(range(3, 19))}] * 4


def train(base, folder, **options):
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    args = LigerTrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        learning_rate=1e-2,
        save_steps=2,
        **options,
    )
    trainer = LigerTrainer(model, args, train_dataset=ROWS)
    trainer.train()
    trainer.save_model()
    return trainer


def assert_loads(folder, model):
    """Assert that `from_pretrained` of `folder` gives the weights of `model`."""
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_models_and_checkpoints_keep_prediction_layers(kind, tmp_path):
    extra = write_base(tmp_path / "base", kind)
    trainer = train(tmp_path / "base", tmp_path / "out")
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2"):
        assert_kept(folder, extra)
        assert_loads(folder, trainer.model)
        assert names_of(folder) == names_of(tmp_path / "base")  # names that servers look for
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == names_of(folder)
        sizes = [t.num_bytes for file in shards.files_of(folder) for t in shards.tensors_of(file).values()]
        assert index["metadata"]["total_size"] == sum(sizes)
        assert json.loads((folder / "config.json").read_text())[KINDS[kind][0]] == 1
    assert trainer.kept_weights.tensors == 2
    assert trainer.kept_weights.parameters == 2 * 6 * 32
    before = tensor_of(tmp_path / "base", "model.layers.0.input_layernorm.weight")
    assert not torch.equal(tensor_of(tmp_path / "out", "model.layers.0.input_layernorm.weight"), before)


@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v3"])
def test_a_config_without_the_left_out_layers_counts_none(kind, tmp_path):
    extra = write_base(tmp_path / "base", kind)
    trainer = train(tmp_path / "base", tmp_path / "out", keep_unloaded_weights=False)
    assert not names_of(tmp_path / "out") & extra.keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())[KINDS[kind][0]] == 0
    assert_loads(tmp_path / "out", trainer.model)


def test_the_stock_trainer_loses_prediction_layers(tmp_path):
    """The reason for this room. The test fails once transformers keeps them itself."""
    extra = write_base(tmp_path / "base", "qwen3_next")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "out")
    assert not names_of(tmp_path / "out") & extra.keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    assert issubclass(LigerTrainer, Trainer)


def test_a_model_in_shards(tmp_path, monkeypatch):
    """A base and a saved model in several files, with kept weights in several files too; the numbering counts all."""
    extra = write_base(tmp_path / "base", "qwen3_next", shard_size="20KB")
    base = find_checkpoint(str(tmp_path / "base"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "out", max_shard_size="20KB")
    monkeypatch.setattr(shards.add_shards, "__defaults__", (400,))
    keep_unloaded_weights(model, base, tmp_path / "out")
    assert_kept(tmp_path / "out", extra)
    assert_loads(tmp_path / "out", model)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]


def test_saving_twice_and_then_without(tmp_path):
    """Files of an earlier save do not stay if a later save has no place for them."""
    extra = write_base(tmp_path / "base", "qwen3_next")
    base = find_checkpoint(str(tmp_path / "base"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    for keep in (True, True, False):
        model.save_pretrained(tmp_path / "out")
        keep_unloaded_weights(model, base, tmp_path / "out", keep)
        assert (names_of(tmp_path / "out") & extra.keys() == extra.keys()) == keep
        assert_loads(tmp_path / "out", model)
    assert [path.name for path in (tmp_path / "out").glob("model*")] == ["model.safetensors"]


def test_resuming_reads_a_checkpoint_by_name(tmp_path, monkeypatch):
    write_base(tmp_path / "base", "qwen3_5_text")
    trainer = train(tmp_path / "base", tmp_path / "out")
    loads = []
    monkeypatch.setattr(type(trainer.model), "from_pretrained", lambda *a, **k: loads.append(a))
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    for parameter in trainer.model.parameters():
        parameter.data.zero_()
    trainer._load_from_checkpoint(str(tmp_path / "out" / "checkpoint-2"))
    assert not loads
    for name, tensor in trainer.model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def fewer_layers(base, folder):
    return AutoModelForCausalLM.from_pretrained(base, num_hidden_layers=1)


def more_tokens(base, folder):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    return model


@pytest.mark.parametrize(("change", "said"), [(fewer_layers, "num_hidden_layers was 2"), (more_tokens, "tokens")])
def test_layers_that_no_longer_fit_are_left_out(change, said, tmp_path):
    extra = write_base(tmp_path / "base", "deepseek_v3")
    table = tensor_of(tmp_path / "base", "model.embed_tokens.weight")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights["model.layers.2.embed_tokens.weight"] = table.clone()
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    model = change(tmp_path / "base", tmp_path / "out")
    model.save_pretrained(tmp_path / "out")
    kept = keep_unloaded_weights(model, find_checkpoint(str(tmp_path / "base")), tmp_path / "out")
    assert said in str(kept)
    assert kept.tensors == 0
    assert not names_of(tmp_path / "out") & extra.keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_quantised_prediction_layers_of_an_unquantised_model(tmp_path):
    extra = write_base(tmp_path / "base", "qwen3_next", torch.float8_e4m3fn)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base = find_checkpoint(str(tmp_path / "base"))
    model.save_pretrained(tmp_path / "out")
    assert "is quantized (F8_E4M3)" in str(keep_unloaded_weights(model, base, tmp_path / "out"))
    model.save_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}  # the model is saved as loaded
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert keep_unloaded_weights(model, base, tmp_path / "out").reason is None
    assert_kept(tmp_path / "out", extra)


def test_a_base_that_is_gone_costs_no_model(tmp_path):
    write_base(tmp_path / "base", "qwen3_next")
    base = find_checkpoint(str(tmp_path / "base"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "out")
    (tmp_path / "base" / "model.safetensors").unlink()
    assert "no longer in" in str(keep_unloaded_weights(model, base, tmp_path / "out"))
    assert_loads(tmp_path / "out", model)


def cut_off(file):
    return file.read_bytes()[:-200]


def saved_again(file):
    """Save the same names at other offsets, as after a download of another revision."""
    weights = load_file(file)
    weights["lm_head.weight"] = weights["lm_head.weight"].double()
    save_file(weights, file.with_name("new"), {"format": "pt"})
    return file.with_name("new").read_bytes()


@pytest.mark.parametrize("change", [cut_off, saved_again])
def test_a_base_that_has_changed_costs_no_model(change, tmp_path):
    """And it does not take other bytes for the base's weights."""
    extra = write_base(tmp_path / "base", "qwen3_next")
    base = find_checkpoint(str(tmp_path / "base"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "out")
    file = tmp_path / "base" / "model.safetensors"
    (tmp_path / "new").write_bytes(change(file))
    os.replace(tmp_path / "new", file)  # the model itself may still read the old file
    assert f"no longer in {file}" in str(keep_unloaded_weights(model, base, tmp_path / "out"))
    assert not names_of(tmp_path / "out") & extra.keys()
    assert_loads(tmp_path / "out", model)


def test_a_copy_that_fails_leaves_the_saved_model_whole(tmp_path, monkeypatch):
    write_base(tmp_path / "base", "qwen3_next")
    base = find_checkpoint(str(tmp_path / "base"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "out")

    def fail(tensors, out):
        raise OSError("No space left on device")

    monkeypatch.setattr(shards, "_copy", fail)
    with pytest.raises(OSError, match="No space"):
        keep_unloaded_weights(model, base, tmp_path / "out")
    assert_loads(tmp_path / "out", model)
    assert not list((tmp_path / "out").glob("*.part"))


def test_a_model_that_was_not_loaded_gets_nothing(tmp_path):
    """Its config names a base's folder, but its weights are new."""
    write_base(tmp_path / "base", "qwen3_next")
    model = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(tmp_path / "base").config)
    args = LigerTrainingArguments(str(tmp_path / "out"), report_to=[], use_cpu=True)
    assert LigerTrainer(model, args, train_dataset=ROWS).base_checkpoint is None


def test_saving_over_the_base_is_refused(tmp_path):
    write_base(tmp_path / "base", "qwen3_next")
    with pytest.raises(ValueError, match="output_dir .* the folder of the base"):
        train(tmp_path / "base", tmp_path / "base")


def test_a_value_that_is_not_a_boolean_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep_unloaded_weights is 'no'"):
        LigerTrainingArguments(str(tmp_path), keep_unloaded_weights="no")


def test_the_command_trains_and_merges(tmp_path, capsys):
    extra = write_base(tmp_path / "model", "qwen3_5_text")
    write_rows(tmp_path / "rows.jsonl")
    recipe = write_recipe(tmp_path, max_steps=2, bf16=False)
    code, out, err = command(capsys, "train", recipe, "--output_dir", tmp_path / "whole")
    assert code == 0, err
    assert "kept     2 tensors of the base" in out
    assert "not trained" in out
    assert_kept(tmp_path / "whole", extra)

    lora = ("--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj")
    code, out, err = command(capsys, "train", recipe, "--output_dir", tmp_path / "adapter", *lora)
    assert code == 0, err
    assert not list((tmp_path / "adapter").glob("model*"))
    assert "tensors of the base" not in out
    code, out, err = command(capsys, "merge", tmp_path / "adapter", tmp_path / "merged")
    assert code == 0, err
    assert "2 tensors of the base" in out
    assert_kept(tmp_path / "merged", extra)
    code, out, err = command(capsys, "merge", tmp_path / "adapter", tmp_path / "without", "--without_unloaded_weights")
    assert code == 0, err
    assert not names_of(tmp_path / "without") & extra.keys()
    assert json.loads((tmp_path / "without" / "config.json").read_text())["mtp_num_hidden_layers"] == 0


def test_checkpoints_that_number_their_layers_otherwise(tmp_path):
    """Numbers beyond the depth that config.json does not count are layers that the class loads under other names."""
    write_base(tmp_path / "base", "deepseek_v3")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["num_nextn_predict_layers"] = 0
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "out")
    kept = keep_unloaded_weights(model, find_checkpoint(str(tmp_path / "base")), tmp_path / "out")
    assert (kept.tensors, kept.reason) == (0, None)


def test_what_a_class_declares_is_kept_too(tmp_path):
    """It leaves out what every class computes, and what a class leaves out if it differs from the base's."""
    base = tmp_path / "base"
    write_base(base, "qwen3_next")
    weights = load_file(base / "model.safetensors")
    odd = {"model.extra.weight": torch.randn(3), "model.rotary_emb.inv_freq": torch.randn(4)}
    save_file(weights | odd, base / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(base)
    model._keys_to_ignore_on_load_unexpected = [r"extra", r"inv_freq", r"^mtp.*"]
    model.save_pretrained(tmp_path / "out")
    assert keep_unloaded_weights(model, find_checkpoint(str(base)), tmp_path / "out").tensors == 3
    assert torch.equal(tensor_of(tmp_path / "out", "model.extra.weight"), odd["model.extra.weight"])
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"architectures": ["Another"]}))
    model.save_pretrained(tmp_path / "out")
    assert keep_unloaded_weights(model, find_checkpoint(str(base)), tmp_path / "out").tensors == 2


def test_a_base_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    """The base is at its main branch or at a revision. Missing files are not looked for elsewhere."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    here = tmp_path / "models--org--model"
    for revision, kind in (("main", "qwen3_next"), ("old", "deepseek_v3")):
        commit = revision[0] * 40
        write_base(here / "snapshots" / commit, kind)
        (here / "refs").mkdir(exist_ok=True)
        (here / "refs" / revision).write_text(commit)
    assert find_checkpoint("org/model").config["model_type"] == "qwen3_next"
    assert find_checkpoint("org/model", "old").predicts.keys() == set(KINDS["deepseek_v3"][1:])
    (here / "snapshots" / ("o" * 40)).rename(here / "part")
    (here / "snapshots" / ("o" * 40)).mkdir()
    (here / "part").rename(here / "snapshots" / ("o" * 40) / "part")
    assert find_checkpoint("org/model", "old", "part").predicts.keys() == set(KINDS["deepseek_v3"][1:])
    assert "'org/another' is neither" in find_checkpoint("org/another").unread
    assert "is neither" in find_checkpoint(str(tmp_path / "gone" / "for" / "good")).unread


@pytest.mark.parametrize("kind", ["deepseek_v3", "llama"])
def test_a_base_that_is_not_in_safetensors(kind, tmp_path):
    """Its contents are unknown. But config.json does not count layers that the saved model lacks."""
    model = tiny_model(kind, **({"num_nextn_predict_layers": 1} if kind == "deepseek_v3" else {}))
    model.save_pretrained(tmp_path / "base")
    torch.save(model.state_dict(), tmp_path / "base" / "pytorch_model.bin")
    (tmp_path / "base" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "out")
    kept = keep_unloaded_weights(model, find_checkpoint(str(tmp_path / "base")), tmp_path / "out")
    if kind == "llama":
        assert str(kept) == ""
    else:
        assert "only safetensors are read" in str(kept) and "pytorch_model.bin" in str(kept)
        assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_a_base_with_a_file_missing(tmp_path):
    write_base(tmp_path / "base", "qwen3_next", shard_size="20KB")
    (tmp_path / "base" / "model-mtp.safetensors").unlink()
    assert "model-mtp.safetensors is missing" in find_checkpoint(str(tmp_path / "base")).unread


@pytest.mark.parametrize("sees", [True, False])
def test_the_decoder_of_a_model_of_images(sees, tmp_path):
    """Loaded without its tower, a model keeps the prediction layers but not the tower."""
    text = tiny_model("qwen3_5_text").config.to_dict() | {"mtp_num_hidden_layers": 1}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_5", text_config=text | {"rope_parameters": rope}, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    extra = {"mtp.fc.weight": torch.randn(3, 4).bfloat16()}
    save_file(weights | extra, tmp_path / "base" / "model.safetensors", {"format": "pt"})

    model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "out")
    keep_unloaded_weights(model, find_checkpoint(str(tmp_path / "base")), tmp_path / "out")
    assert_kept(tmp_path / "out", extra)
    assert any("visual" in name for name in names_of(tmp_path / "out")) == sees
    if not sees:
        assert_loads(tmp_path / "out", model)


def test_each_type_that_ignores_prediction_layers_is_recognised():
    """Each name with `mtp` that a class of transformers ignores is recognised as a prediction layer."""
    folder = Path(transformers.__file__).parent / "models"
    seen = set()
    for path in folder.glob("*/modeling_*.py"):
        for listed in re.findall(r"_keys_to_ignore_on_load_unexpected = \[(.*?)\]\n", path.read_text(), re.DOTALL):
            for pattern in re.findall(r'r?"([^"]*mtp[^"]*)"', listed):
                name = re.sub(r"\(\^\|\\\.\)|\(language_model\\\.\)\?|[\^\\]|\.?\*", "", pattern).rstrip(".")
                assert unloaded._PREDICTS.search(f"{name}.0.weight"), (path.name, pattern)
                seen.add(path.parent.name)
    listed_here = set(re.findall(r"\w+", unloaded.__doc__.partition("with `mtp`:")[2].partition("- as layers")[0]))
    assert seen <= listed_here or version.parse(transformers.__version__) > version.parse("5.24"), seen - listed_here
    assert len(seen) >= 10


def test_the_best_checkpoint_is_loaded_and_a_run_goes_on(tmp_path):
    """Both read a checkpoint in several files that has names unknown to the model."""
    extra = write_base(tmp_path / "base", "qwen3_next")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    options = {"per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "save_steps": 2, "eval_steps": 2}
    args = LigerTrainingArguments(
        str(tmp_path / "out"),
        max_steps=4,
        learning_rate=1.0,
        eval_strategy="steps",
        load_best_model_at_end=True,
        **options,
    )
    trainer = LigerTrainer(model, args, train_dataset=ROWS, eval_dataset=ROWS)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert_kept(Path(best), extra)
    assert_loads(Path(best), trainer.model)

    uninterrupted = tensor_of(tmp_path / "out" / "checkpoint-4", "lm_head.weight")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    args = LigerTrainingArguments(str(tmp_path / "again"), max_steps=4, learning_rate=1.0, **options)
    trainer = LigerTrainer(model, args, train_dataset=ROWS)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    torch.testing.assert_close(tensor_of(tmp_path / "again" / "checkpoint-4", "lm_head.weight"), uninterrupted)
