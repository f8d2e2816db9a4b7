"""Small copies of models have a layer of each kind, and heads with parts in proportion."""

import pytest
import torch
from architectures import small_config as tiny_config
from image_models import image_step
from tiny_models import assert_same_step
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    Mistral4ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from liger_trainer import apply_liger
from liger_trainer.varlen.proof.small_model import small_config, small_copy

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 131,
}


def padded():
    ids = torch.randint(3, 40, (2, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 13:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("dense, want", [([0, 1], [0]), ([], []), ([1], [1]), ([0, 1, 2, 3, 4, 5], [0, 1])])
def test_a_layer_with_experts_and_one_without(dense, want):
    small = small_config(Qwen3MoeConfig(num_hidden_layers=6, mlp_only_layers=dense, **SIZES))
    assert small.num_hidden_layers == 2 and small.mlp_only_layers == want


def test_experts_that_begin_at_the_third_layer(tokens):
    config = Qwen3MoeConfig(num_hidden_layers=4, mlp_only_layers=[0, 1], output_router_logits=False, **SIZES)
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa").train()
    want = image_step(model, padded())
    report = apply_liger(model)["varlen_attention"]
    tokens.clear()
    assert_same_step(image_step(model, padded()), want, rtol=2e-5)  # 1.05e-5 on some processors
    assert tokens == [37] and not report.unsuited


def test_a_part_of_a_head_that_turns(tokens):
    """Mistral 4 rotates half of a head, and scales queries by their position."""
    config = tiny_config("mistral4")
    config.rope_parameters |= {"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5}
    config.head_dim = config.qk_rope_head_dim + config.qk_nope_head_dim
    torch.manual_seed(0)
    model = Mistral4ForCausalLM._from_config(config, attn_implementation="sdpa").train()
    want = image_step(model, padded())
    report = apply_liger(model)["varlen_attention"]
    tokens.clear()
    assert_same_step(image_step(model, padded()), want, rtol=2e-5)  # 1.05e-5 on some processors
    assert tokens == [37] and not report.unsuited
    small = small_config(model.config)
    assert small.head_dim == small.qk_rope_head_dim + small.qk_nope_head_dim


@pytest.mark.parametrize(
    "name, want",
    [
        ("bamba", ["linear_attention", "full_attention"]),
        ("jamba", ["linear_attention", "full_attention"]),
        ("kimi_linear", ["linear_attention", "full_attention"]),
        ("mamba2", ["linear_attention", "linear_attention"]),
        ("qwen3_5_text", ["linear_attention", "full_attention"]),
        ("lfm3", ["conv", "full_attention", "sliding_attention"]),
        ("zamba", ["linear_attention", "hybrid", "hybrid"]),
        ("zamba2", ["linear_attention", "hybrid", "hybrid"]),
    ],
)
def test_of_the_sizes_of_a_checkpoint_it_keeps_states_and_attention(name, want):
    """The config is transformers' default at real size. The copy has to be small, and has to run."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    real = AutoConfig.for_model(name, **({"attn_layer_indices": [9, 18]} if name == "bamba" else {}))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(tiny_config(name)).base_model
    module.config = real
    copy = small_copy(module, 0, "eager" if name == "mamba2" else "sdpa")
    assert copy.config.layer_types == want
    states = copy(input_ids=torch.arange(3, 10)[None], use_cache=False)[0]
    assert states.shape == (1, 7, 64) and states.isfinite().all()
    if name.startswith("zamba"):
        shared = [layer.shared_transf if name == "zamba" else layer.shared_transformer for layer in copy.layers[1:]]
        first, second = (part.self_attn.q_proj.weight for part in shared)
        assert first is second


def test_a_size_of_zero_stays_zero():
    if "glm5_next" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no glm5_next")
    config = AutoConfig.for_model("glm5_next").get_text_config()
    assert config.qk_rope_head_dim == 0 and small_config(config).qk_rope_head_dim == 0


def test_layers_that_reuse_keys_and_values_of_others(tokens):
    """As in Gemma 4 E2B: for each kind of layer, one that makes keys and values, and one that reuses another's."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 3
    sizes = tiny_config("gemma4_text").to_dict()
    del sizes["per_layer_config"]  # of its two layers
    layers = {"layer_types": kinds, "num_hidden_layers": 9, "num_kv_shared_layers": 4}
    config = AutoConfig.for_model(**sizes | layers)
    small = small_config(config)
    assert small.layer_types == ["sliding_attention", "full_attention"] * 2
    assert small.num_kv_shared_layers == 2
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    want = image_step(model, padded())
    report = apply_liger(model)["varlen_attention"]
    tokens.clear()
    assert_same_step(image_step(model, padded()), want, rtol=2e-5)  # 1.05e-5 on some processors
    assert tokens == [37] and not report.unsuited
