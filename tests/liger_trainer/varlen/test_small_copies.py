"""Small copies of models have a layer of each kind, and heads whose parts are in proportion."""

import pytest
import torch
from architectures import small_config as tiny_config
from image_models import image_step
from transformers import Mistral4ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from varlen_batches import assert_same_step

from liger_trainer import apply_liger
from liger_trainer.patching.small_model import small_config

SIZES = {
    "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 24, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 131,
}  # fmt: skip


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
    assert_same_step(image_step(model, padded()), want)
    assert tokens == [37] and not report.unsuited


def test_a_part_of_a_head_that_turns(tokens):
    """Mistral 4 turns half of a head, and scales queries by their position."""
    config = tiny_config("mistral4")
    config.rope_parameters |= {"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5}
    config.head_dim = config.qk_rope_head_dim + config.qk_nope_head_dim
    torch.manual_seed(0)
    model = Mistral4ForCausalLM._from_config(config, attn_implementation="sdpa").train()
    want = image_step(model, padded())
    report = apply_liger(model)["varlen_attention"]
    tokens.clear()
    assert_same_step(image_step(model, padded()), want)
    assert tokens == [37] and not report.unsuited
    small = small_config(model.config)
    assert small.head_dim == small.qk_rope_head_dim + small.qk_nope_head_dim
