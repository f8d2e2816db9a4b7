"""What is asked of a model before its padding is left out, and what asking leaves behind."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCAB
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)
from varlen_batches import ON, assert_same_step, batch, patched, rows_of, step

from liger_trainer import apply_liger


class WithConvolution(LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        self.before = nn.Conv1d(config.hidden_size, config.hidden_size, 3, padding=2)
        self.post_init()

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        mixed = self.before(embeds.transpose(1, 2))[..., : embeds.shape[1]].transpose(1, 2)
        return super().forward(inputs_embeds=embeds + mixed, **kwargs)


class WithMean(LlamaModel):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.last_hidden_state = outputs.last_hidden_state + outputs.last_hidden_state.mean(1, keepdim=True)
        return outputs


class WithItsOwnPositions(LlamaModel):
    """Numbers what it is given, whatever `position_ids` says."""

    def __init__(self, config):
        super().__init__(config)
        self.places = nn.Embedding(64, config.hidden_size)
        self.post_init()

    def forward(self, input_ids=None, inputs_embeds=None, position_ids=None, **kwargs):
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        places = self.places(torch.arange(embeds.shape[1], device=embeds.device))
        return super().forward(inputs_embeds=embeds + places, **kwargs)


class WithASizeOfItsOwn(LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        self.wide = nn.Linear(config.hidden_size, config.width_of_its_own)
        self.post_init()


def lm(backbone):
    class RemoteForCausalLM(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model = backbone(config)
            self.post_init()

    return RemoteForCausalLM


class WithALossOfPadding(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        outputs = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if labels is not None:
            outputs.loss = outputs.loss + 0.01 * outputs.logits[:, :-1].logsumexp(-1).square().mean()
        return outputs


class WithoutShift(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        outputs = super().forward(input_ids=input_ids, **kwargs)
        if labels is not None:
            outputs.loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return outputs


def made(model_class, device="cpu", **options):
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa",
    }  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return model_class(LlamaConfig(**sizes | options)).train()


@pytest.mark.parametrize(
    "model_class, reason",
    [
        (lm(WithConvolution), "differs"),
        (lm(WithMean), "differs"),
        (lm(WithItsOwnPositions), "differs"),
        (WithALossOfPadding, "differs"),
        (WithoutShift, "differs"),
        (lm(WithASizeOfItsOwn), "parameters; its config has sizes that are not known"),
    ],
    ids=["convolution", "mean", "own positions", "loss of padding", "loss without shift", "own size"],
)
def test_a_model_of_somebody_else_s_code_is_refused(model_class, reason, tokens):
    model, call = made(model_class, width_of_its_own=200_000), batch()
    call["labels"][0, call["attention_mask"][0].sum()] = 5  # predicted from the last real token, or on padding
    want = step(model, call)
    report = apply_liger(model, ON)["varlen_attention"]
    assert not report.swapped and reason in report.unsuited["model"]
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == []


def test_packed_rows_stay_apart_where_stock_lets_them_see_each_other():
    """BioGPT's own code does not hand positions to the mask."""
    config = AutoConfig.for_model(
        "biogpt", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, activation_dropout=0.0, layerdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    padded, flat = batch(prompt=1), dict(DataCollatorWithFlattening()(rows_of(batch(prompt=1))))
    want, want_packed = step(model, padded), step(model, flat)
    assert abs(want[0] - want_packed[0]) > 5e-5 * want[0]
    patched(model)
    assert_same_step(step(model, padded), want)
    assert_same_step(step(model, flat), want)


def test_random_numbers_precision_and_device_are_as_before(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    before = torch.get_rng_state()
    model = made(LlamaForCausalLM, "meta")
    torch.set_rng_state(before)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    seeded.clear()
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            patched(model)
            assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
        assert torch.get_default_dtype() == torch.bfloat16 and torch.get_default_device().type == "meta"
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert torch.equal(torch.get_rng_state(), before) and seeded == [], "the generators of GPUs are the user's"


def test_under_deterministic_algorithms():
    model, call = made(LlamaForCausalLM), batch()
    want = step(model, call)
    torch.use_deterministic_algorithms(True)
    try:
        patched(model)
        assert_same_step(step(model, call), want)
    finally:
        torch.use_deterministic_algorithms(False)
