"""The proof that a model may leave out padding: what it asks of the model, and what it leaves behind."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCAB, assert_same_step, step
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2DoubleHeadsModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput
from varlen_batches import ON, batch, patched, rows_of

from liger_trainer import apply_liger
from liger_trainer.varlen.proof import backbone as proving


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
    """Numbers its inputs itself, whatever `position_ids` says."""

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


class WithAFlattenedShift(LlamaForCausalLM):
    """Predicts the first token of each row from the last column of the row before."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        outputs = super().forward(input_ids=input_ids, **kwargs)
        if labels is not None:
            outputs.loss = F.cross_entropy(outputs.logits.flatten(0, 1)[:-1], labels.flatten()[1:])
        return outputs


class WithFeatures(LlamaForCausalLM):
    """Returns the mean of each row. With an attribute or an argument set, adds a term of it to the loss."""

    switched = False

    def forward(self, input_ids=None, attention_mask=None, labels=None, weight=0.0, **kwargs):
        states = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        logits, features = self.lm_head(states), states.mean(1)
        loss = self.loss_function(logits, labels, self.config.vocab_size)
        loss = loss + (weight + float(self.switched)) * features.square().sum()
        return ModelOutput(loss=loss, logits=logits, features=features)


class WithoutFeatures(WithFeatures):
    def forward(self, **kwargs):
        outputs = super().forward(**kwargs)
        return ModelOutput(loss=outputs.loss, logits=outputs.logits)


class WithALossOfItsOwn(LlamaForCausalLM):
    switched = False

    def loss_function(self, logits, labels, vocab_size, **kwargs):
        loss = ForCausalLMLoss(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)
        return loss + 0.01 * logits.logsumexp(-1).square().mean() if self.switched else loss


def made(model_class, device="cpu", **options):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attn_implementation": "sdpa",
    }
    torch.manual_seed(0)
    with torch.device(device):
        return model_class(LlamaConfig(**sizes | options)).train()


@pytest.mark.parametrize(
    "model_class, proof, given",
    [
        (lm(WithConvolution), "differs", {}),
        (lm(WithMean), "differs", {}),
        (lm(WithItsOwnPositions), "differs", {}),
        (WithALossOfPadding, "differs", {}),
        (WithoutShift, "differs", {}),
        (WithAFlattenedShift, "differs", {}),
        (WithFeatures, "it returns features", {}),
        (WithoutFeatures, None, {}),
        (WithoutFeatures, None, {"weight": 1.0}),
        (WithALossOfItsOwn, None, {}),
        (lm(WithASizeOfItsOwn), "parameters; its config has sizes that are not known", {}),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else None,
)
def test_a_model_of_the_user_s_code_computes_padding(model_class, proof, given, tokens, monkeypatch):
    """The test also shows the proof's answer, which guards against such code in transformers itself."""
    model, call = made(model_class, width_of_its_own=200_000), batch(prompt=0) | given
    call["labels"][0, call["attention_mask"][0].sum()] = 5  # predicted from the last real token, or on padding
    report = apply_liger(model, ON)["varlen_attention"]
    model.switched, stock = True, made(model_class, width_of_its_own=200_000)
    stock.switched = True
    want = step(stock, call)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == [] and not report.swapped
    assert "not a class of transformers" in report.unsuited["model"] or proof in report.unsuited["model"]
    monkeypatch.setattr(proving, "why_not_transformers_own", lambda model: None)
    reason = apply_liger(model, ON)["varlen_attention"].unsuited.get("model")
    assert reason is None if proof is None else proof in reason


def test_a_model_of_transformers_that_reads_hidden_states_elsewhere(tokens):
    """Its second head reads the last column."""
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout"), 0.0)
    model = GPT2DoubleHeadsModel(GPT2Config(**sizes, **dropout, attn_implementation="sdpa")).train()
    call = batch() | {"mc_labels": torch.zeros(1, dtype=torch.long)}

    def both(model):
        outputs = model(**call, use_cache=False)
        grads = torch.autograd.grad(outputs.loss + outputs.mc_loss, list(model.parameters()))
        return outputs.loss.detach(), dict(enumerate(grads))

    want = both(model)
    report = apply_liger(model, ON)["varlen_attention"]
    tokens.clear()
    assert_same_step(both(model), want)
    assert tokens == [] and "mc_logits" in report.unsuited["transformer"]


def test_packed_rows_stay_apart_where_stock_lets_them_see_each_other():
    """BioGPT's own code does not pass positions to the mask."""
    config = AutoConfig.for_model(
        "biogpt",
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        activation_dropout=0.0,
        layerdrop=0.0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    padded = batch(prompt=1)
    flat = dict(DataCollatorWithFlattening()(rows_of(batch(prompt=1))))
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
