"""The files of a drafter: names, shapes and config as servers read them, and refusals."""

import json

import pytest
import torch
from eagle_brute_force import LAYERS, eagle_target, with_random_drafter
from eagle_servers import ARCHITECTURE, TABLE, sglang_layers, sglang_parameter, vllm_layers, vllm_parameter
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB
from transformers import AutoConfig

from liger_trainer import EagleDrafter
from liger_trainer.eagle.export import export_drafter
from liger_trainer.eagle.files import drafter_folder, has_drafter, read_drafter

SIZES = {"H": 32, "3H": 96, "2H": 64, "I": 48, "Q": 32, "G": 16, "V": VOCAB, "Vd": 60}


@pytest.fixture
def saved(tmp_path):
    drafter = with_random_drafter(eagle_target()).eagle_drafter
    drafter.save_pretrained(tmp_path / "saved" / "eagle_drafter")
    return drafter, tmp_path / "saved" / "eagle_drafter"


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_names_and_shapes_equal_the_table(saved):
    _, folder = saved
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == TABLE.keys()
    for name, (first, second, dtype, parameter) in TABLE.items():
        assert tensors[name].shape == tuple(SIZES[size] for size in (first, second) if size), name
        assert str(tensors[name].dtype) == f"torch.{dtype or 'float32'}", name
        assert vllm_parameter(name) == sglang_parameter(name) == parameter, name


def test_all_tokens(tmp_path):
    """vLLM refuses d2t if the draft vocabulary is the target's, and neither server needs it then."""
    drafter = with_random_drafter(eagle_target(), VOCAB).eagle_drafter
    drafter.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert names == TABLE.keys() - {"d2t", "t2d"}
    assert all(vllm_parameter(name, has_all_tokens=True) == TABLE[name][-1] for name in names)
    for name, tensor in EagleDrafter.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name]), name


def test_the_config_as_servers_read_it(saved):
    """Plain transformers reads it as a Llama config, and so do both servers."""
    _, folder = saved
    config = config_of(folder)
    assert config["architectures"] == [ARCHITECTURE]
    assert vllm_layers(config) == sglang_layers(config) == LAYERS
    assert not config["tie_word_embeddings"] and config["torch_dtype"] == "float32"
    read = AutoConfig.from_pretrained(folder)
    assert read.model_type == "llama" and read.num_hidden_layers == 1
    assert (read.hidden_size, read.intermediate_size, read.head_dim) == (32, 48, 8)
    assert (read.num_attention_heads, read.num_key_value_heads) == (4, 2)
    assert (read.vocab_size, read.draft_vocab_size) == (VOCAB, 60)
    assert read.rope_parameters["rope_theta"] == 10000.0 and read.rope_parameters["rope_type"] == "default"
    assert not hasattr(read, "target_hidden_size") and not read.attention_bias


def test_the_draft_vocabulary_as_servers_read_it(saved):
    """SGLang's hot tokens are d2t plus the draft id, which are the tokens of t2d in order."""
    _, folder = saved
    tensors = load_file(folder / "model.safetensors")
    hot = tensors["d2t"] + torch.arange(60)
    assert torch.equal(hot, tensors["t2d"].nonzero()[:, 0])


def test_round_trip_bit_for_bit(saved, tmp_path):
    drafter, folder = saved
    read = EagleDrafter.from_pretrained(folder.parent)  # the output_dir
    assert read.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name
    assert export_drafter(folder.parent, tmp_path / "out", "org/base") == "org/base"
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == TABLE.keys()
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, drafter.state_dict()[name]), name
    assert config_of(tmp_path / "out")["base_model_name_or_path"] == "org/base"


def test_export_in_another_dtype(saved, tmp_path):
    _, folder = saved
    export_drafter(folder, tmp_path / "out", "org/base", torch.bfloat16)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for n, t in tensors.items() if n not in ("d2t", "t2d")} == {torch.bfloat16}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert config_of(tmp_path / "out")["torch_dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="which is not empty; servers read every file there"):
        export_drafter(folder, tmp_path / "out", "org/base")
    with pytest.raises(ValueError, match="does not say what model it was trained on. Give it as model"):
        export_drafter(folder, tmp_path / "other", None)


def test_published_forms(saved):
    """Reads speculators' layer name and nested config, embeddings in the file, and files without draft vocabulary."""
    drafter, folder = saved
    tensors = load_file(folder / "model.safetensors")
    config = config_of(folder)
    given = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file(given | {"embed_tokens.weight": torch.zeros(VOCAB, 32)}, folder / "model.safetensors")
    layer = {name: config.pop(name) for name in ("hidden_size", "intermediate_size", "head_dim", "num_hidden_layers")}
    (folder / "config.json").write_text(json.dumps(config | {"transformer_layer_config": layer}))
    read, found = read_drafter(folder)
    assert read == drafter.config and found.keys() == TABLE.keys()

    for name in ("d2t", "t2d"):
        del tensors[name]
    whole = tensors | {"lm_head.weight": torch.zeros(VOCAB, 32)}
    save_file(whole, folder / "model.safetensors")
    changed = {k: v for k, v in config.items() if not k.startswith("eagle_")} | layer | {"draft_vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(changed))
    read, found = read_drafter(folder)
    assert read.layers is None and not found["d2t"].any() and found["t2d"].all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_hidden_layers": 2}, "says num_hidden_layers: 2; only drafters with 1 are supported"),
        ({"norm_before_residual": True}, "norm_before_residual: True; only drafters with False"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"target_hidden_size": 64}, "target_hidden_size: 64; only drafters with 32"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "only drafters without scaling are supported"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "only drafters that read three hidden states"),
        ({"draft_vocab_size": 59}, "lm_head.weight is .60, 32., and the config says .59, 32."),
        ({"intermediate_size": None}, "the config says"),
    ],
)
def test_configs_that_contradict(change, message, saved):
    _, folder = saved
    values = config_of(folder) | change
    if change == {"intermediate_size": None}:
        del values["intermediate_size"]
        message = "has no intermediate_size, which the config of an EAGLE-3 drafter needs. Add it"
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        read_drafter(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("fc.weight"), "fc.weight is missing"),
        (lambda t: t.update(more=torch.zeros(1)), "more does not belong to a drafter"),
        (lambda t: t.update(d2t=t["d2t"] + 1), "do not name the same tokens"),
        (lambda t: t.update(d2t=t["d2t"].int()), "d2t .torch.int32.*expected int64"),
    ],
)
def test_tensors_that_contradict(change, message, saved):
    _, folder = saved
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        read_drafter(folder)


def test_folders_without_a_drafter(tmp_path):
    eagle_target().save_pretrained(tmp_path / "model")
    assert not has_drafter(tmp_path / "model")
    with pytest.raises(ValueError, match="has no EAGLE-3 drafter"):
        drafter_folder(tmp_path / "model")
