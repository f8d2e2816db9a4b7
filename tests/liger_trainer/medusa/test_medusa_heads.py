"""The heads: what a fresh one computes, their names and files, and models that cannot have them."""

import json

import pytest
import torch
from medusa_brute_force import model_with_heads
from safetensors.torch import load_file
from tiny_models import VOCAB, tiny_model
from trainer_parity import with_lora

from liger_trainer import MedusaHeads
from liger_trainer.medusa.files import MedusaHeadsConfig
from liger_trainer.medusa.heads import attach_heads, heads_detached, heads_of


@pytest.mark.parametrize("tied, num_layers", [(True, 1), (False, 2), (False, 0)])
def test_a_fresh_head_is_the_lm_head_exactly(tied, num_layers):
    model = tiny_model("llama")
    heads = MedusaHeads.for_model(model, 3, num_layers, tied)
    hidden = torch.randn(2, 7, 32)
    logits = heads.logits(hidden, model.lm_head)
    assert logits.shape == (3, 2, 7, VOCAB)
    for own in logits:
        assert torch.equal(own, model.lm_head(hidden))


def test_every_head_has_blocks_of_its_own():
    heads = MedusaHeads.for_model(tiny_model("llama"), 3, 2, tied=False)
    storages = {p.data_ptr() for p in heads.parameters()}
    assert len(storages) == 3 * (2 * 2 + 1)
    assert all((p == 0).all() for name, p in heads.named_parameters() if "linear" in name)


def test_a_head_is_a_unit_of_fsdp2():
    """PyTorch 2.11 refuses lists and dicts of modules as units, even those with a forward."""
    head = MedusaHeads.for_model(tiny_model("llama"), 2, 2, tied=False)[0]
    assert not isinstance(head, (torch.nn.ModuleList, torch.nn.ModuleDict))
    assert [type(part).__name__ for part in head] == ["ResBlock", "ResBlock", "Linear"]


def test_an_own_projection_is_a_copy():
    model = tiny_model("llama")
    heads = MedusaHeads.for_model(model, 2, 1, tied=False)
    with torch.no_grad():
        heads[0].lm_head.weight.zero_()
    assert model.lm_head.weight.abs().sum() > 0 and heads[1].lm_head.weight.abs().sum() > 0


def test_names_in_the_state_dict_and_the_file(tmp_path):
    model = model_with_heads(num_heads=2, num_layers=2, tied=False)
    names = {
        f"{k}.{end}"
        for k in (0, 1)
        for end in ("0.linear.weight", "0.linear.bias", "1.linear.weight", "1.linear.bias", "2.weight")
    }
    assert {n for n in model.state_dict() if "medusa" in n} == {f"medusa_head.{name}" for name in names}
    model.medusa_head.save_pretrained(tmp_path)
    assert load_file(tmp_path / "medusa_lm_head.safetensors").keys() == names
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {
        "medusa_num_heads": 2,
        "medusa_num_layers": 2,
        "medusa_tied": False,
        "hidden_size": 32,
        "vocab_size": VOCAB,
        "base_model_name_or_path": None,
    }


@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded_they_compute_the_same(tied, tmp_path):
    model = model_with_heads(tied=tied)
    model.medusa_head.save_pretrained(tmp_path / "medusa_heads")
    hidden = torch.randn(5, 32)
    for folder in (tmp_path, tmp_path / "medusa_heads"):
        again = MedusaHeads.from_pretrained(folder)
        assert torch.equal(again.logits(hidden, model.lm_head), model.medusa_head.logits(hidden, model.lm_head))
    assert MedusaHeads.from_pretrained(tmp_path, dtype=torch.bfloat16)[0][0].linear.weight.dtype == torch.bfloat16


def test_a_model_without_its_heads_is_the_plain_one():
    model, plain = model_with_heads(), tiny_model("llama")
    heads = heads_of(model)
    with heads_detached(model):
        assert heads_of(model) is None and model.state_dict().keys() == plain.state_dict().keys()
    assert heads_of(model) is heads


def test_heads_hang_on_the_model_inside_an_adapter():
    model = with_lora(tiny_model("llama"), ["q_proj"])
    heads = attach_heads(model, MedusaHeads.for_model(model, 2))
    assert heads_of(model) is model.get_base_model().medusa_head is heads
    assert "MedusaHead" in model.get_base_model()._no_split_modules  # a unit to shard


class Linear8bit(torch.nn.Linear):
    """A linear layer with a product that differs from `F.linear` of its weight."""

    def forward(self, x):
        return super().forward(x)


def test_models_that_cannot_have_heads_are_refused():
    with pytest.raises(ValueError, match="The LM head of LlamaForCausalLM has an adapter"):
        MedusaHeads.for_model(with_lora(tiny_model("llama"), ["lm_head"]), 2)
    with pytest.raises(ValueError, match="The LM head of PhiForCausalLM has a bias"):
        MedusaHeads.for_model(tiny_model("phi"), 2)
    with pytest.raises(ValueError, match="has no LM head"):
        MedusaHeads.for_model(tiny_model("llama").model, 2)
    quantised = tiny_model("llama")
    quantised.lm_head = Linear8bit(32, VOCAB)
    with pytest.raises(ValueError, match="cannot be fused: the forward of Linear8bit is not torch.nn.Linear's own"):
        MedusaHeads.for_model(quantised, 2)


def test_heads_of_another_model_are_refused():
    heads = MedusaHeads.for_model(tiny_model("llama"), 2)
    with pytest.raises(ValueError, match="vocab_size 131, but the LM head of LlamaForCausalLM has 140. Use the model"):
        attach_heads(tiny_model("llama", vocab_size=140), heads)
    with pytest.raises(ValueError, match="hidden_size 32, but the LM head of LlamaForCausalLM has 48. Use the model"):
        attach_heads(tiny_model("llama", hidden_size=48), heads)
    with pytest.raises(ValueError, match="already has Medusa heads"):
        attach_heads(model_with_heads(), heads)


@pytest.mark.parametrize(
    "shape, message",
    [
        ((0, 1, True), "medusa_num_heads is 0; expected 1 or more"),
        ((2, -1, False), "medusa_num_layers is -1; expected 0 or more"),
        ((2, 0, True), "nothing to train"),
    ],
)
def test_bad_shapes(shape, message):
    with pytest.raises(ValueError, match=message):
        MedusaHeadsConfig(*shape, 32, VOCAB)


def test_bad_files(tmp_path):
    with pytest.raises(ValueError, match="has neither medusa_lm_head.safetensors nor .* Give the output_dir"):
        MedusaHeads.from_pretrained(tmp_path)
    heads = MedusaHeads.for_model(tiny_model("llama"), 3, 1, tied=True)
    heads.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value in (("medusa_num_heads", 2), ("medusa_num_layers", 2), ("medusa_tied", False), ("hidden_size", 64)):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(ValueError, match=f"says {key}: {value}, but the tensors in medusa_lm_head.safetensors say"):
            MedusaHeads.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="state_dict and the Medusa heads differ"):
        heads.save_pretrained(tmp_path, {})
