"""MTP heads that are layers beyond the depth, as DeepSeek's and GLM's, with experts that are stored one by one."""

import copy
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from base_checkpoints import names_of, tensor_of
from mtp_bases import HIDDEN as SIZE
from mtp_bases import LAYER, mtp_trainer
from mtp_bases import write_layer_base as write_base
from peft import LoraConfig
from recipe_fixtures import command, write_recipe
from safetensors.torch import load_file, save_file
from tiny_models import ragged_rows, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM
from trl import SFTTrainer

from liger_trainer.base_weights.unloaded import find_checkpoint
from liger_trainer.head.flat_rows import one_row
from liger_trainer.mtp.predictor import load_predictor, predict

TYPES = ("deepseek_v3", "glm4_moe")
VOCAB = 131


def is_copy(name):
    return name.endswith(("embed_tokens.weight", "shared_head.head.weight"))


@pytest.mark.parametrize("kind", TYPES)
def test_saved_under_the_names_of_the_base(kind, tmp_path):
    extra = write_base(tmp_path / "base", kind)
    assert f"{LAYER}mlp.experts.0.gate_proj.weight" in extra, "experts one by one"
    trainer = mtp_trainer(tmp_path / "base", tmp_path / "out")
    state = trainer.model.state_dict()
    for name, tensor in extra.items():
        assert torch.equal(state[name], tensor), name
    before = {name: p.detach().clone() for name, p in trainer.model.mtp.named_parameters()}
    trainer.train()
    for name, p in trainer.model.mtp.named_parameters():
        assert not torch.equal(p, before[name]), name
    trainer.save_model()
    assert names_of(tmp_path / "out") == names_of(tmp_path / "base")
    assert trainer.kept_weights.tensors == 0, "nothing of the base is copied"
    state = trainer.model.state_dict()
    for name in extra:
        assert torch.equal(tensor_of(tmp_path / "out", name), state[name]), name
    assert torch.equal(state[f"{LAYER}shared_head.head.weight"], trainer.model.lm_head.weight)
    assert torch.equal(state[f"{LAYER}embed_tokens.weight"], trainer.model.model.embed_tokens.weight)

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    head = load_predictor(again, find_checkpoint(str(tmp_path / "out")))
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, trainer.model.mtp.state_dict()[name]), name


@pytest.mark.parametrize("kind", TYPES)
def test_the_head_is_the_published_one(kind, tmp_path):
    """Its output, with transformers' own decoder layer and all else written out in float64."""
    extra = write_base(tmp_path / "base", kind)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64, experts_implementation="eager")
    head = load_predictor(model, find_checkpoint(str(tmp_path / "base")))
    ids = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(3))
    hidden = model.model(input_ids=ids).last_hidden_state[0].detach()
    got = predict(head, hidden, model.model.embed_tokens.weight, one_row(ids))[:-1]

    def norm(x, name):
        weight = extra[f"{LAYER}{name}.weight"].double()
        return x * (x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).rsqrt() * weight

    embeds = F.embedding(ids[0, 1:], model.model.embed_tokens.weight)
    x = torch.cat([norm(embeds, "enorm"), norm(hidden[:-1], "hnorm")], -1) @ extra[f"{LAYER}eh_proj.weight"].double().T
    layer = copy.deepcopy(model.model.layers[1])
    own = layer.state_dict()
    for name, tensor in own.items():
        if name.startswith("mlp.experts."):
            for e in range(len(tensor)):
                parts = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
                stored = [extra[f"{LAYER}mlp.experts.{e}.{part}_proj.weight"] for part in parts]
                tensor[e] = torch.cat(stored)
        else:
            tensor.copy_(extra[LAYER + name])
    positions = torch.arange(len(x))[None]
    mask = torch.full((len(x), len(x)), float("-inf"), dtype=x.dtype).triu(1)[None, None]
    angles = model.model.rotary_emb(x[None], positions)
    out = layer(x[None], position_embeddings=angles, attention_mask=mask, position_ids=positions)
    out = out[0] if isinstance(out, torch.Tensor) else out[0][0]
    torch.testing.assert_close(got, norm(out, "shared_head.norm"), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_are_the_ones_of_a_loaded_layer(kind, dtype, tmp_path):
    """In 16 bit too, the router and the rotary frequencies of a loaded model are fp32."""
    extra = write_base(tmp_path / "base", kind)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    head = load_predictor(model, find_checkpoint(str(tmp_path / "base")))
    for (name, own), (_, loaded) in zip(
        head.layers[0].state_dict().items(), model.model.layers[1].state_dict().items(), strict=True
    ):
        assert own.dtype == loaded.dtype, name
    for name in ("mlp.gate.weight", "mlp.gate.e_score_correction_bias"):
        own = head.layers[0].state_dict()[name]
        assert torch.equal(own, extra[LAYER + name].to(own.dtype)), name  # older transformers round the router
    for own, loaded in zip(head.rotary_emb.buffers(), model.model.rotary_emb.buffers(), strict=True):
        assert own.dtype == torch.float32
        assert torch.equal(own, loaded)
    assert {head.fc.weight.dtype, head.norm.weight.dtype, head.pre_fc_norm_hidden.weight.dtype} == {dtype}


def write_mtp_base(folder):
    """Write a tiny Qwen3-Next with an MTP head `mtp.*` that stores each expert separately. Return its tensors."""
    model = tiny_model("qwen3_next", mtp_num_hidden_layers=1)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    shapes = {f"mtp.{name}.weight": (SIZE,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes["mtp.fc.weight"] = (SIZE, 2 * SIZE)
    for name, tensor in saved.items():
        if name.startswith("model.layers.1."):
            shapes[name.replace("model.layers.1.", "mtp.layers.0.")] = tensor.shape
    extra = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(saved | extra, folder / "model.safetensors", {"format": "pt"})
    return extra


@pytest.mark.parametrize("write", [partial(write_base, kind="glm4_moe"), write_mtp_base], ids=["layer", "mtp"])
def test_a_head_is_called_untrained_only_if_it_is(write, tmp_path, capsys):
    write(tmp_path / "base")
    for train_mtp in (True, False):
        mtp_trainer(tmp_path / "base", tmp_path / "out", train_mtp=train_mtp, max_steps=1).train()
        assert ("They are not trained" in capsys.readouterr().err) is not train_mtp


def test_experts_of_a_head_named_mtp(tmp_path):
    extra = write_mtp_base(tmp_path / "base")
    assert "mtp.layers.0.mlp.experts.3.up_proj.weight" in extra
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = mtp_trainer(tmp_path / "base", tmp_path / "out", **options)
    state = trainer.model.state_dict()
    for name, tensor in extra.items():
        assert torch.equal(state[name], tensor), name
    trainer.train()
    trainer.save_model()
    assert names_of(tmp_path / "out") == names_of(tmp_path / "base")
    state = trainer.model.state_dict()
    for name in extra:
        assert torch.equal(tensor_of(tmp_path / "out", name), state[name]), name
    resumed = mtp_trainer(tmp_path / "base", tmp_path / "out", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    for name, tensor in trainer.model.mtp.state_dict().items():
        torch.testing.assert_close(resumed.model.mtp.state_dict()[name], tensor, rtol=1e-6, atol=1e-7)


def test_a_resumed_run_continues(tmp_path):
    write_base(tmp_path / "base", "deepseek_v3")
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = mtp_trainer(tmp_path / "base", tmp_path / "out", **options)
    whole.train()
    resumed = mtp_trainer(tmp_path / "base", tmp_path / "out", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    for name, tensor in whole.model.mtp.state_dict().items():
        torch.testing.assert_close(resumed.model.mtp.state_dict()[name], tensor, rtol=1e-6, atol=1e-7)


def test_the_best_model_has_its_head(tmp_path):
    write_base(tmp_path / "base", "glm4_moe")
    each = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_num_tokens", "greater_is_better": False}
    trainer = mtp_trainer(tmp_path / "base", tmp_path / "out", **each, **best)
    trainer.train()
    folder = Path(trainer.state.best_model_checkpoint)
    assert folder.name != "checkpoint-3"
    state = trainer.model.state_dict()
    for name in names_of(folder):
        if name.startswith(LAYER):
            assert torch.equal(state[name], tensor_of(folder, name)), name
    assert torch.equal(state["lm_head.weight"], tensor_of(folder, "lm_head.weight"))


def test_beside_an_adapter_it_is_saved_and_merged(tmp_path, capsys):
    extra = write_base(tmp_path / "base", "glm4_moe")
    lora = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "o_proj"])}
    trainer = mtp_trainer(tmp_path / "base", tmp_path / "out", trainer_options=lora)
    trainer.train()
    trainer.save_model()
    code, _, err = command(capsys, "merge", tmp_path / "out", tmp_path / "merged", "--model", tmp_path / "base")
    assert code == 0, err
    assert names_of(tmp_path / "merged") == names_of(tmp_path / "base")
    state = trainer.model.get_base_model().state_dict()
    for name, tensor in extra.items():
        merged = tensor_of(tmp_path / "merged", name)
        assert torch.equal(merged, state[name]), name
        if ".experts." not in name:  # no token may have come to one
            assert torch.equal(merged, tensor) == (is_copy(name) or name.endswith("correction_bias")), name


def test_a_model_with_such_a_head_is_copied(tmp_path):
    write_base(tmp_path / "base", "glm4_moe")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    load_predictor(model, find_checkpoint(str(tmp_path / "base")))
    state = model.state_dict()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        other.load_state_dict(state)
        for name, tensor in state.items():
            assert torch.equal(other.state_dict()[name], tensor), name


def test_heads_that_are_others(tmp_path):
    write_base(tmp_path / "a", "glm4_moe", without=(f"{LAYER}self_attn.o_proj.weight",))
    with pytest.raises(ValueError, match=r"the checkpoint lacks model.layers.2.self_attn.o_proj.weight"):
        mtp_trainer(tmp_path / "a", tmp_path / "out")
    extra = write_base(tmp_path / "b", "glm4_moe")
    weights = load_file(tmp_path / "b" / "model.safetensors")
    more = weights | {f"{LAYER}self_attn.indexer.wk.weight": torch.zeros(2, 2)}
    save_file(more, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"Glm4MoeModel lacks model.layers.2.self_attn.indexer.wk.weight"):
        mtp_trainer(tmp_path / "b", tmp_path / "out")
    two = {name.replace("layers.2.", "layers.3."): tensor.clone() for name, tensor in extra.items()}
    save_file(weights | two, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    config = tmp_path / "b" / "config.json"
    config.write_text(config.read_text().replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 2'))
    several = r"num_nextn_predict_layers is 2 in .*, with the layers model.layers.2.\*, model.layers.3.\*, but only .*"
    with pytest.raises(ValueError, match=f"{several} Remove train_mtp"):
        mtp_trainer(tmp_path / "b", tmp_path / "out", rows=ragged_rows())
    with pytest.raises(ValueError, match=f"{several} Use another model"):
        mtp_trainer(tmp_path / "b", tmp_path / "out", rows=ragged_rows(), alone=True)


def test_several_layers_named_mtp(tmp_path):
    """Servers run one layer for each guess. A head that ran both for a guess would be another function."""
    extra = write_mtp_base(tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    for name, tensor in extra.items():
        if ".layers.0." in name:
            weights[name.replace(".layers.0.", ".layers.1.")] = tensor.clone()
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"has 2 prediction layers, mtp.layers.0.\*, mtp.layers.1.\*, and mtp_num"):
        mtp_trainer(tmp_path / "base", tmp_path / "out")
    config = tmp_path / "base" / "config.json"
    config.write_text(config.read_text().replace('"mtp_num_hidden_layers": 1', '"mtp_num_hidden_layers": 2'))
    with pytest.raises(
        ValueError,
        match=r"mtp_num_hidden_layers is 2 in .*config.json, with the layers mtp.layers.0.\*, mtp.layers.1.\*",
    ):
        mtp_trainer(tmp_path / "base", tmp_path / "out")


@pytest.mark.parametrize("alone", [True, False])
def test_several_layers_are_refused_before_anything_is_read(alone, monkeypatch, tmp_path, capsys):
    """Rows of a real run take minutes to prepare. The config says it, even where the weights are not here yet."""
    write_mtp_base(tmp_path / "base")
    config = tmp_path / "base" / "config.json"
    config.write_text(config.read_text().replace('"mtp_num_hidden_layers": 1', '"mtp_num_hidden_layers": 2'))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    unread = pytest.fail
    monkeypatch.setattr(SFTTrainer, "_prepare_dataset", unread)
    several = "mtp_num_hidden_layers is 2 in .* but only heads of one layer .* all of them are saved unchanged"
    with pytest.raises(ValueError, match=several):
        mtp_trainer(tmp_path / "base", tmp_path / "out", alone=alone, model=model)
    (tmp_path / "base" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=several):
        mtp_trainer(tmp_path / "base", tmp_path / "out", alone=alone, model=str(tmp_path / "base"))

    monkeypatch.setattr("liger_trainer.command.rows.sources.load_rows", unread)
    keys = {"trainer": "mtp"} if alone else {"train_mtp": True}
    recipe = write_recipe(tmp_path, model_name_or_path=str(tmp_path / "base"), **keys)
    code, _, err = command(capsys, "train", recipe)
    assert code == 2 and "mtp_num_hidden_layers is 2" in err
    assert ("Use another model." if alone else "Remove train_mtp.") in err


@pytest.mark.parametrize("write", [partial(write_base, kind="glm4_moe"), write_mtp_base], ids=["layer", "mtp"])
def test_a_quantized_head(write, tmp_path):
    """Published checkpoints in FP8 have scales beside their weights."""
    name = sorted(name for name in write(tmp_path / "base") if name.endswith("o_proj.weight"))[0]
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    quantized = {name: weights[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(weights | quantized, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name} is quantized \(F8_E4M3\) in .* Dequantize the checkpoint first"):
        mtp_trainer(tmp_path / "base", tmp_path / "out")
