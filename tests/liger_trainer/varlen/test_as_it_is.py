"""Calls and models that need the results at padding, or rows in their places, get what stock computes."""

import peft
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tiny_models import assert_same_step, step
from transformers import DataCollatorWithFlattening
from varlen_batches import LENGTHS, ON, batch, model_of, patched, rows_of

from liger_trainer import apply_liger
from liger_trainer.head.request import HeadRequest, run_request


def backward(model, loss):
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


def from_logits(model, call):
    """A hand-written loss on the logits of a call without labels."""
    call = dict(call)
    labels = call.pop("labels")
    logits = model(**call, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def regularised(model, call):
    """The model's loss plus a term of its logits at every position."""
    options = {"skip_logits": False} if "_liger_head" in model.__dict__ else {}
    outputs = model(**call, use_cache=False, **options)
    return outputs.loss + 0.01 * outputs.logits.logsumexp(-1).square().mean()


def pooled(model, call):
    outputs = model(**call, use_cache=False, output_hidden_states=True)
    return outputs.loss + outputs.hidden_states[-1].mean(1).square().sum()


@pytest.mark.diagonal
@pytest.mark.parametrize("loss", [from_logits, regularised, pooled])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("lengths", [LENGTHS, (13,)], ids=["four rows", "one row"])
def test_logits_and_hidden_states_equal_stock_on_padding_too(loss, side, lengths, tokens):
    model, call = model_of(), batch(lengths, side=side, prompt=0)
    want = backward(model, loss(model, call))
    report = apply_liger(model, ON)["varlen_attention"]
    tokens.clear()
    assert_same_step(backward(model, loss(model, call)), want)
    assert tokens == [] and report.skipped, "the report says why"


@pytest.mark.parametrize("shift", [True, False])
def test_a_loss_function_of_the_user_s(shift, tokens):
    def own(logits, labels, vocab_size, **_):
        if shift:
            logits, labels = logits[:, :-1], F.pad(labels, (0, 1), value=-100)[:, 1:-1]
        term = 0.01 * logits.logsumexp(-1).square().mean()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + term

    model, call = model_of(), batch()
    call["labels"][0, LENGTHS[0]] = 5  # the label that the last real token predicts, or one on padding
    model.loss_function = own
    want = step(model, call)
    patched(model)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == []


def test_a_cache_that_the_config_asks_for(tokens):
    model, call = model_of(), batch()
    want = model(**call, use_cache=None).past_key_values.layers[0].keys
    patched(model)
    tokens.clear()
    torch.testing.assert_close(model(**call, use_cache=None).past_key_values.layers[0].keys, want)
    assert tokens == []


@pytest.mark.parametrize("positions", [True, False])
def test_cu_seq_lens_tell_sdpa_nothing(positions):
    """With SDPA, transformers finds rows in `position_ids` alone, whatever `cu_seq_lens_q` says."""
    model = model_of()
    call = dict(DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows_of(batch(prompt=1))))
    call["cu_seq_lens_q"] = call["cu_seq_lens_k"] = torch.tensor([0, 25, sum(LENGTHS)], dtype=torch.int32)
    if not positions:
        del call["position_ids"]
    want = step(model, call)
    patched(model)
    assert_same_step(step(model, call), want)


def test_with_a_mask_of_ones_stock_looks_for_no_rows(tokens):
    model = model_of()
    call = dict(DataCollatorWithFlattening()(rows_of(batch(prompt=1))))
    call["attention_mask"] = torch.ones_like(call["input_ids"])
    want = step(model, call)
    patched(model)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == []


def test_a_call_inside_of_a_call_has_a_plan_of_its_own(tokens):
    model, call = model_of(), batch()
    inner = {name: call[name] for name in ("input_ids", "attention_mask")}
    want = model(**inner, use_cache=True)
    patched(model)
    tokens.clear()

    def score(run):
        run()
        return model(**inner, use_cache=True)  # the same mask, but the call asks for logits and a cache

    got = run_request(model, HeadRequest(logits_consumer=score), **inner, use_cache=False)
    assert tokens == [sum(LENGTHS)]
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.past_key_values.layers[1].keys, want.past_key_values.layers[1].keys)


def test_an_adapter_that_begins_at_a_token_of_each_row(tokens):
    """An activated LoRA is told the token of each row from which it is active."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[7])
    model = get_peft_model(model_of(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    call = batch() | {"alora_offsets": [3, 1, 5, 6]}
    want = step(model, call)
    patched(model)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == []
    assert_same_step(step(model, batch()), step(model, batch()))


class MeanOverTheRow(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden) + hidden.mean(1, keepdim=True)


@pytest.mark.parametrize("before", [True, False])
def test_a_user_s_module_computes_padding(before, tokens):
    model, call = model_of(), batch()
    layer = model.model.layers[0]
    if not before:
        patched(model)
    layer.mlp = MeanOverTheRow(layer.mlp)
    report = apply_liger(model, ON) if before else None
    tokens.clear()
    got = step(model, call)
    assert tokens == []
    assert report is None or "MeanOverTheRow" in report["varlen_attention"].unsuited["model"]
    apply_liger(model, {})
    assert_same_step(got, step(model, call))


QKV = {"target_modules": ["q_proj", "v_proj"]}
ADAPTERS = (
    peft.LoraConfig(r=4, use_dora=True, **QKV),
    peft.AdaLoraConfig(total_step=9, init_r=4, **QKV),
    peft.FourierFTConfig(n_frequency=9, **QKV),
    peft.HRAConfig(r=4, **QKV),
    peft.IA3Config(feedforward_modules=["down_proj"], target_modules=["k_proj", "down_proj"]),
    peft.LNTuningConfig(target_modules=["input_layernorm"]),
    peft.LoHaConfig(r=4, **QKV),
    peft.LoKrConfig(r=4, **QKV),
    peft.MissConfig(r=4, **QKV),
    peft.OFTConfig(oft_block_size=4, r=0, **QKV),
    peft.RandLoraConfig(r=4, **QKV),
    peft.TrainableTokensConfig(token_indices=[3, 4], target_modules=["embed_tokens"]),
    peft.VeraConfig(r=4, **QKV),
    peft.VBLoRAConfig(num_vectors=9, vector_length=8, topk=2, **QKV),
)


@pytest.mark.parametrize("config", ADAPTERS, ids=lambda config: config.peft_type.value)
def test_adapters_that_take_each_token_by_itself_run_on_real_tokens(config, tokens):
    torch.manual_seed(0)
    model, call = get_peft_model(model_of(), config), batch()
    want = step(model, call)
    patched(model)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == [sum(LENGTHS)]


def test_an_adapter_that_is_not_known_computes_padding(tokens):
    model = get_peft_model(model_of(), peft.C3AConfig(block_size=8, **QKV))
    call = batch()
    want = step(model, call)
    assert "C3ALinear" in apply_liger(model, ON)["varlen_attention"].unsuited["model"]
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == []
