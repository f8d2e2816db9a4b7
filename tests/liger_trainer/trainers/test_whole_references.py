"""A reference has tensors without memory where its weights were not read. No values are made up for them."""

import torch
from tiny_models import tiny_model

from liger_trainer.trainers import fsdp2 as whole_references


def test_memory_for_what_is_sent_and_for_nothing_else():
    """The frequencies of rope are in no state dict. With memory, they would be whatever it held before."""
    model = tiny_model("llama", tie_word_embeddings=True).to("meta")
    whole_references._allocate_on_cpu(model)
    model.tie_weights()
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.rotary_emb.inv_freq.is_meta
    model.model.rotary_emb.register_buffer("sent", torch.ones(3, device="meta"))
    whole_references._allocate_on_cpu(model)
    assert not model.model.rotary_emb.sent.is_meta
