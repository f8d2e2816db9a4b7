"""User code around and inside the backbone trains as in stock."""

import copy
import functools
import types

import pytest
import torch
from architectures import build
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from tiny_models import VOCAB, assert_same_step, step
from torch import nn
from transformers import BertConfig, BertLMHeadModel, DataCollatorWithFlattening, LlamaForCausalLM, LlamaModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from varlen_batches import LENGTHS, ON, batch, model_of, patched, rows_of

from liger_trainer import apply_liger, remove_liger


def mixes_the_row(outputs):
    outputs.last_hidden_state = outputs.last_hidden_state + outputs.last_hidden_state.mean(1, keepdim=True)
    return outputs


def backbone_of_theirs(self, *args, **kwargs):
    return mixes_the_row(type(self).forward(self, *args, **kwargs))


def model_of_theirs(self, *args, **kwargs):
    outputs = type(self).forward(self, *args, **kwargs)
    outputs.loss = outputs.loss + 0.01 * outputs.logits.logsumexp(-1).square().mean()
    return outputs


class MixingLinear(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden + hidden.mean(1, keepdim=True))


def a_forward_on_the_backbone(model):
    model.model.forward = types.MethodType(backbone_of_theirs, model.model)


def a_forward_on_the_model(model):
    model.forward = types.MethodType(model_of_theirs, model)


def a_hook_on_the_backbone(model):
    model.model.register_forward_hook(lambda module, args, outputs: mixes_the_row(outputs))


def a_hook_on_the_head(model):
    model.lm_head.register_forward_pre_hook(lambda module, args: (args[0] + args[0].mean(1, keepdim=True),))


def with_the_mean(module, args, outputs):
    if isinstance(outputs, tuple):
        return outputs[0] + outputs[0].mean(1, keepdim=True), *outputs[1:]
    return outputs + outputs.mean(1, keepdim=True)


def a_hook_on_the_embedding(model):
    model.model.embed_tokens.register_forward_hook(with_the_mean)


def a_hook_on_the_last_norm(model):
    model.model.norm.register_forward_hook(with_the_mean)


def a_hook_on_an_attention(model):
    model.model.layers[1].self_attn.register_forward_hook(with_the_mean)


def a_compiled_backbone(model):
    model.model.compile(backend="eager")


def a_loss_that_is_wrapped(model):
    @functools.wraps(ForCausalLMLoss)  # it copies `__module__`
    def loss(logits, *args, **kwargs):
        return ForCausalLMLoss(logits, *args, **kwargs) + 0.01 * logits.logsumexp(-1).square().mean()

    model.loss_function = loss


def a_linear_layer_of_their_class(model):
    model.model.layers[0].self_attn.q_proj.__class__ = MixingLinear


@pytest.mark.parametrize(
    "theirs, before",
    [
        (a_forward_on_the_backbone, True),
        (a_forward_on_the_backbone, False),
        (a_forward_on_the_model, True),
        (a_hook_on_the_backbone, False),
        (a_hook_on_the_head, True),
        (a_hook_on_the_head, False),
        (a_linear_layer_of_their_class, True),
        (a_linear_layer_of_their_class, False),
        (a_hook_on_the_embedding, False),
        (a_hook_on_the_last_norm, False),
        (a_hook_on_an_attention, False),
        (a_compiled_backbone, False),
        (a_loss_that_is_wrapped, True),
        (a_loss_that_is_wrapped, False),
    ],
)
def test_user_code_sees_what_stock_computes_for_padding(theirs, before, tokens):
    model = model_of()
    stock = model_of()
    call = batch()
    theirs(stock)
    want = step(stock, call)
    if before:
        theirs(model)
    report = apply_liger(model, ON)["varlen_attention"]
    if not before:
        theirs(model)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == [] and (report.skipped or report.unsuited), "the report says why"
    torch._dynamo.reset()


def wrapped(own, change):
    return functools.wraps(own)(lambda *args, **kwargs: change(own, *args, **kwargs))


def states_too(own, self, input_ids, attention_mask, labels, **_):
    states = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    logits = self.lm_head(states)
    loss = self.loss_function(logits, labels, self.config.vocab_size)
    return CausalLMOutputWithPast(loss=loss + states.mean(1).square().sum(), logits=logits)


def the_first_three_see_each_other(own, *, inputs_embeds, attention_mask, **_):
    seen = torch.ones(inputs_embeds.shape[1], inputs_embeds.shape[1]).tril().bool()
    seen[:3, :3] = True
    return seen & attention_mask[:, None, None, :].bool()


@pytest.mark.parametrize(
    "owner, name, change",
    [
        (LlamaForCausalLM, "forward", states_too),
        (LlamaModel, "forward", lambda own, *args, **kwargs: mixes_the_row(own(*args, **kwargs))),
        (LlamaDecoderLayer, "forward", lambda own, self, x, **kwargs: own(self, x, **kwargs) + x.mean(1, True)),
        (LoraLinear, "forward", lambda own, self, x: own(self, x + x.mean(1, True))),
        (modeling_llama, "create_causal_mask", the_first_three_see_each_other),
    ],
)
def test_functions_replaced_in_transformers_or_peft_after_patching_run(owner, name, change, tokens, monkeypatch):
    def made():
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return get_peft_model(model_of(), config)

    model = made()
    stock = made()
    call = batch()
    report = apply_liger(model, ON | {"lora": False})["varlen_attention"]
    monkeypatch.setattr(owner, name, wrapped(getattr(owner, name), change))
    want = step(stock, call)
    assert_same_step(step(model, call), want)
    assert report.skipped, "the report says why"
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == []


def test_a_hook_between_the_backbone_and_the_head(tokens):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=VOCAB, is_decoder=True, attn_implementation="sdpa", **sizes, **dropout)
    model, call = BertLMHeadModel(config).train(), batch()
    patched(model)
    step(model, call)
    assert tokens[-1] == sum(LENGTHS)
    stock = copy.deepcopy(model)
    remove_liger(stock)
    for each in (model, stock):
        each.cls.predictions.transform.register_forward_hook(with_the_mean)
    tokens.clear()
    assert_same_step(step(model, call), step(stock, call))
    assert tokens == []


def test_a_loss_that_is_registered_later(tokens, monkeypatch):
    model = model_of()
    call = batch()
    own = LOSS_MAPPING["ForCausalLM"]

    def with_a_term(logits, labels, vocab_size, **kwargs):
        return own(logits, labels, vocab_size, **kwargs) + 0.01 * logits.logsumexp(-1).square().mean()

    patched(model)
    monkeypatch.setitem(LOSS_MAPPING, "ForCausalLM", with_a_term)
    want = step(model_of(), call)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == []


def test_tuples_have_the_logits_of_padding(tokens):
    model, call = model_of(), batch()
    want = model(**call, use_cache=False, return_dict=False)
    patched(model)
    tokens.clear()
    got = model(**call, use_cache=False, return_dict=False)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5)
    assert tokens == []


def test_router_logits_that_a_call_asks_for(tokens):
    model, call = model_of("qwen3_moe"), batch() | {"output_router_logits": True}
    want = model(**call, use_cache=False)
    patched(model)
    tokens.clear()
    got = model(**call, use_cache=False)
    torch.testing.assert_close(got.router_logits, want.router_logits, rtol=1e-4, atol=1e-5)
    assert tokens == []


def test_masks_by_kind_of_layer(tokens):
    model, call = model_of("gemma3_text"), batch((20, 20))
    causal = torch.ones(20, 20).tril().bool()[None, None]
    call["attention_mask"] = {"full_attention": causal, "sliding_attention": causal.triu(-3)}
    want = step(model, call)
    patched(model)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == []


@pytest.mark.parametrize(
    "kind, lengths, side, used",
    [
        ("longrope", (7, 5, 13), "right", False),
        ("longrope", (7, 5, 20), "right", True),
        ("dynamic", (7, 5, 13), "right", False),
        ("dynamic", (7, 5, 13), "left", True),
    ],
)
def test_frequencies_that_depend_on_the_longest_position(kind, side, lengths, used, tokens):
    """The rows are padded to a width of the user's choice, longer than the model was trained on."""
    factors = {"longrope": {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}, "dynamic": {}}[kind]
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16, **factors}
    model = model_of(max_position_embeddings=16, rope_parameters=rope)
    call = batch(lengths, side)
    want = step(model, call)
    patched(model)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert bool(tokens) == used


def test_layers_that_are_compiled_by_themselves(tokens):
    model = model_of()
    call = batch()
    traced = []
    want = step(model, call)
    patched(model)

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=backend, dynamic=True)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == []
    torch._dynamo.reset()


def test_packed_rows_that_stock_lets_see_each_other_are_never_given_to_it(tokens):
    """For afmoe with SDPA, only attention by lengths keeps rows apart, and a hook would silently switch it off."""
    model, _ = build("afmoe")
    model.set_attn_implementation("sdpa")
    model.train()
    flat = dict(DataCollatorWithFlattening()(rows_of(batch(prompt=1))))
    alone = [model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits for row in rows_of(batch())]
    patched(model)
    inputs = {name: flat[name] for name in ("input_ids", "position_ids")}
    tokens.clear()
    got = model(**inputs, use_cache=False).logits  # a call without labels, like an evaluation with metrics
    torch.testing.assert_close(got, torch.cat(alone, 1), rtol=1e-3, atol=1e-4)
    assert tokens == [sum(LENGTHS)]
    model.model.layers[0].register_forward_hook(lambda module, args, outputs: None)
    with pytest.raises(ValueError, match="rows would see each other.*forward hook"):
        step(model, flat)
