"""Exported heads, read as each server reads them (`medusa_readers.py`), give the same logits or an error."""

import json
from types import SimpleNamespace

import pytest
import torch
from medusa_readers import read, renamed, tgi, vllm
from safetensors.torch import save_file
from tiny_models import VOCAB, tiny_model

from liger_trainer.medusa.export import export_heads, lm_head_of, load_heads, served_model
from liger_trainer.medusa.heads import MedusaHeads

H = 32


def random_heads(model, num_heads=3, num_layers=1, tied=True, seed=7):
    heads = MedusaHeads.for_model(model, num_heads, num_layers, tied)
    torch.manual_seed(seed)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.requires_grad_(False)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama").requires_grad_(False)


def exported(model, folder, heads, **options):
    return export_heads(heads, str(folder), "org/base", lm_head_of(model) if heads.config.tied else None, **options)


@pytest.mark.parametrize("tied, num_layers", [(True, 1), (True, 2), (False, 1), (False, 2), (False, 0)])
def test_one_directory_for_all(model, tmp_path, tied, num_layers):
    heads = random_heads(model, num_layers=num_layers, tied=tied)
    x = torch.randn(5, H)
    want = heads.logits(x, model.lm_head)
    assert not torch.allclose(want[0], want[1]), "the heads differ, so a mixed-up one would show"
    folder = tmp_path / "out"
    assert exported(model, folder, heads) == str(folder)
    assert torch.equal(load_heads(folder).logits(x, model.lm_head), want)
    assert torch.equal(MedusaHeads.from_pretrained(folder).logits(x, model.lm_head), want)
    torch.testing.assert_close(vllm(folder, x), want)
    for num_speculate in (3, 2) if not tied or num_layers == 1 else ():  # a server may use fewer heads than there are
        torch.testing.assert_close(tgi(folder, x, model.lm_head.weight, num_speculate), want[:num_speculate])
    config = read(folder)[0]
    assert config["base_model_name_or_path"] == "org/base"
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, num_layers)


@pytest.mark.parametrize("tied, num_layers", [(True, 2), (False, 1)])
def test_vllm_names(model, tmp_path, tied, num_layers):
    """Checkpoints with vLLM's own names are read too."""
    heads = random_heads(model, num_layers=num_layers, tied=tied)
    x = torch.randn(5, H)
    heads.save_pretrained(tmp_path)
    tensors = {renamed(name, num_layers): tensor for name, tensor in heads.state_dict().items()}
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    assert torch.equal(load_heads(tmp_path).logits(x, model.lm_head), heads.logits(x, model.lm_head))


def test_the_biases_count(model, tmp_path):
    """vLLM's default for `medusa_fc_bias` is false. Heads read without their biases are wrong."""
    heads = random_heads(model)
    x = torch.randn(5, H)
    exported(model, tmp_path / "out", heads)
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "medusa_fc_bias"}))
    assert (vllm(tmp_path / "out", x) - heads.logits(x, model.lm_head)).abs().max() > 0.1


def test_dtype(model, tmp_path):
    heads = random_heads(model)
    exported(model, tmp_path / "out", heads, dtype=torch.bfloat16)
    _, _, tensors = read(tmp_path / "out")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert torch.equal(load_heads(tmp_path / "out")[0][0].linear.weight, heads[0][0].linear.weight.bfloat16())
    assert load_heads(tmp_path / "out", torch.float32)[0][0].linear.weight.dtype == torch.float32


def test_published_checkpoint(model, tmp_path):
    """It has only FasterDecoding's own keys. A tied one does not show the vocabulary."""
    heads = random_heads(model, tied=False)
    save_file(dict(heads.state_dict()), tmp_path / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "org/base"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_heads(tmp_path)
    x = torch.randn(2, H)
    assert torch.equal(loaded.logits(x, model.lm_head), heads.logits(x, model.lm_head))
    assert loaded.config.vocab_size == VOCAB and loaded.config.hidden_size == H and not loaded.config.tied
    save_file(dict(random_heads(model).state_dict()), tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match="has no vocab_size, and the tensors of tied heads do not show it"):
        load_heads(tmp_path)


WRONG = {
    "count": ({"medusa_num_heads": 2}, {}, "says medusa_num_heads: 2, but the tensors in .* say 3.*correct it"),
    "layers": ({"medusa_num_layers": 2}, {}, "says medusa_num_layers: 2, but the tensors .* say 1"),
    "tied": ({"medusa_tied": True}, {}, "says medusa_tied: True, but the tensors .* say False"),
    "width": ({"hidden_size": 64}, {}, "says hidden_size: 64, but the tensors .* say 32"),
    "a head without its projection": (
        {},
        {"1.1.weight": None},
        "different shapes.*\n.*Missing key.*1.1.weight",
    ),
    "a block without its bias": ({}, {"2.0.linear.bias": None}, "Missing key.*2.0.linear.bias"),
    "a narrower head": ({}, {"2.1.weight": torch.ones(7, H)}, "size mismatch for 2.1.weight"),
    "a stranger": ({}, {"lm_head.weight": torch.ones(7, H)}, "lm_head.weight does not name a part of a Medusa head"),
}


@pytest.mark.parametrize("keys, changed, message", WRONG.values(), ids=WRONG)
def test_config_and_tensors_that_disagree(model, tmp_path, keys, changed, message):
    heads = random_heads(model, tied=False)
    heads.save_pretrained(tmp_path)
    tensors = {k: v for k, v in (dict(heads.state_dict()) | changed).items() if v is not None}
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | keys
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_heads(tmp_path)


def test_refusals(model, tmp_path):
    heads, untied = random_heads(model), random_heads(model, tied=False)
    cases = (
        (heads, {"lm_head": None}, "lm_head is None, but the heads are tied"),
        (heads, {"lm_head": torch.nn.Linear(H, VOCAB)}, "has a bias, which TGI and vLLM ignore"),
        (
            heads,
            {"lm_head": torch.nn.Linear(H, 7, bias=False)},
            r"\(7, 32\), but the heads were trained on \(131, 32\)",
        ),
        (heads, {"lm_head": SimpleNamespace(base_layer=1)}, "The LM head has an adapter"),
    )
    for which, options, message in cases:
        options = {"lm_head": model.lm_head} | options
        with pytest.raises(ValueError, match=message):
            export_heads(which, str(tmp_path / "out"), "org/base", **options)
        assert not (tmp_path / "out").exists(), "nothing is written"
    exported(model, tmp_path / "out", untied)
    with pytest.raises(ValueError, match="is not empty; servers read every file there"):
        exported(model, tmp_path / "out", untied)
    with pytest.raises(ValueError, match="has neither medusa_lm_head.safetensors nor .* Give the output_dir"):
        load_heads(tmp_path)
    (tmp_path / "out" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json"):
        load_heads(tmp_path / "out")


def test_which_model_is_served(model, tmp_path):
    """After stage 1 the frozen model; after stage 2 the trained model saved with the heads, never its base."""
    heads = random_heads(model)
    heads.config = type(heads.config)(3, 1, True, H, VOCAB, "org/base")
    folder = tmp_path / "out" / "medusa_heads"
    heads.save_pretrained(folder)
    assert served_model(tmp_path / "out", load_heads(tmp_path / "out")) == "org/base"
    assert served_model(folder, load_heads(folder)) == "org/base"
    model.save_pretrained(tmp_path / "out")
    assert served_model(tmp_path / "out", load_heads(tmp_path / "out")) == str(tmp_path / "out")
    assert served_model(folder, load_heads(folder)) == str(tmp_path / "out")
    (tmp_path / "out" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds an adapter.*Merge it"):
        served_model(tmp_path / "out", heads)
    heads.config = type(heads.config)(3, 1, True, H, VOCAB)
    with pytest.raises(ValueError, match="do not say what model they were trained on"):
        served_model(tmp_path, heads)
