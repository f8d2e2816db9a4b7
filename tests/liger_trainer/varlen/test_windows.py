"""Models with attention that is not plain causal equal their own code: sliding windows, chunks, sinks, soft caps."""

import copy

import pytest
import torch
from tiny_models import VOCAB, assert_same_step, step, tiny_model
from torch import nn
from transformers import DataCollatorWithFlattening
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel
from transformers.models.gpt_oss import modeling_gpt_oss
from varlen_batches import LENGTHS, ON, batch, checkpointed_as_in_torch_2_11, model_of, patched, rows_of

from liger_trainer import apply_liger, remove_liger
from liger_trainer.varlen import attention
from liger_trainer.varlen.proof.packed_rows import why_rows_mix

KINDS = {
    "gemma3_text": {"causal", "sliding window"},
    "mistral": {"sliding window"},
    "qwen2": {"causal", "sliding window"},
    "cohere2": {"sliding window"},
    "olmo3": {"causal", "sliding window"},
    "llama4_text": {"causal", "chunks"},
    "gpt_oss": {"sinks"},
    "granite_swa": {"sinks"},
    "gemma2": {"soft cap"},
}
SDPA_WITHOUT_CAP = Gemma2PreTrainedModel._supports_sdpa
NO_CAP = "transformers 5.17 gives Gemma 2 SDPA, which leaves out its soft cap without a word"
GEMMA2 = pytest.param("gemma2", marks=pytest.mark.skipif(SDPA_WITHOUT_CAP, reason=NO_CAP))


def of(name, **config):
    """A model with its own attention: SDPA if its class has it, else eager."""
    model = tiny_model(name, **({"attn_temperature_tuning": False} if name == "llama4_text" else {}) | config)
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    return model.train()


def full(rows=3, width=20, mask=True):
    ids = torch.randint(3, VOCAB, (rows, width), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids} | ({"attention_mask": torch.ones_like(ids)} if mask else {})


@pytest.fixture
def masks(monkeypatch):
    """The masks that layers attend by, call by call: a `RowMask` or transformers' own."""
    seen, by_rows = [], attention._by_rows

    def noted(query, key, value, mask, *args, **kwargs):
        seen.append(mask)
        return by_rows(query, key, value, mask, *args, **kwargs)

    monkeypatch.setattr(attention, "_by_rows", noted)
    return seen


@pytest.mark.diagonal
@pytest.mark.parametrize("name", [*list(KINDS)[:-1], GEMMA2])
@pytest.mark.parametrize("rows", ["padded right", "padded left", "full", "full without a mask", "packed"])
def test_a_step_equals_stock(name, rows, masks):
    call = batch(side=rows.split()[-1]) if "padded" in rows else full(mask="without" not in rows)
    call = batch(prompt=1) if rows == "packed" else call
    model = of(name)
    want = step(model, call)
    patched(model)
    masks.clear()
    given = dict(DataCollatorWithFlattening()(rows_of(call))) if rows == "packed" else call
    assert_same_step(step(model, given), want)
    assert len(masks) == model.config.num_hidden_layers
    assert {kind for mask in masks for kind in mask.rows.attention_kinds} == KINDS[name]


@pytest.mark.skipif(not SDPA_WITHOUT_CAP, reason="transformers gives Gemma 2 eager attention, which has the cap")
def test_a_cap_that_sdpa_leaves_out_stays_out(masks):
    """Rows without padding would have it, and the proof notices."""
    model, call = of("gemma2"), batch()
    want = step(model, call)
    report = apply_liger(model, ON)["varlen_attention"]
    masks.clear()
    assert_same_step(step(model, call), want)
    assert not masks and "differs from the padded batch" in report.unsuited["model"]


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "cohere2"])
@pytest.mark.parametrize("before", [True, False], ids=["before patching", "after it"])
def test_layers_that_are_told_to_see_later_tokens(before, name, masks):
    """SDPA gets no mask for rows without padding that are no longer than the window."""
    model, call = of(name), full(width=9)
    if before:
        _not_causal(model)
    report = apply_liger(model, ON)["varlen_attention"]
    masks.clear()  # left from the proof
    _not_causal(model)
    stock = of(name)
    _not_causal(stock)
    assert_same_step(step(model, call), step(stock, call))
    assert not masks and "is_causal is False" in str(report.skipped)


def _not_causal(model):
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False


@pytest.mark.parametrize("lengths", [LENGTHS, (13,)], ids=["four rows", "one row"])
def test_a_scale_of_columns_keeps_padding(lengths, masks):
    """Llama 4 scales queries by their columns, which count padding on the left."""
    model = of("llama4_text", attn_temperature_tuning=True)
    call = batch(lengths, side="left")
    want = step(model, call)
    patched(model)
    masks.clear()
    assert_same_step(step(model, call), want)
    assert not masks


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["mistral", "gpt_oss", GEMMA2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(name, reentrant, masks):
    model, call = of(name), full()
    want = step(model, call)
    patched(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    masks.clear()
    assert_same_step(step(model, call), want)
    assert len(masks) == 2 * model.config.num_hidden_layers


def test_a_window_as_long_as_the_rows_is_plain_causal(masks, monkeypatch):
    """SDPA runs without a mask, which is fastest. transformers gives it one of 16 x 16 here."""
    given, own = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: given.append(k) or own(*a, **k)
    )
    model, call = of("mistral"), full(width=16)
    want = step(model, call)
    assert all(x["attn_mask"] is not None for x in given)
    patched(model)
    given.clear()
    assert_same_step(step(model, call), want)
    assert given and all(x.get("attn_mask") is None and x["is_causal"] for x in given)


def test_full_rows_of_plain_causal_models_stay_as_they_are(masks):
    model, call = model_of("llama"), full()
    want = step(model, call)
    patched(model)
    masks.clear()
    assert_same_step(step(model, call), want)
    assert masks == []


def test_temperatures_by_the_place_in_the_batch_keep_padding(masks):
    """Llama 4 scales queries by their place in the batch, which changes without padding. Full rows keep theirs."""
    layers = {"num_hidden_layers": 5, "moe_layers": [], "no_rope_layers": [1, 1, 1, 1, 0]}
    layers |= {"layer_types": ["chunked_attention"] * 4 + ["full_attention"], "attn_temperature_tuning": True}
    model = of("llama4_text", **layers)
    padded = batch(side="left")
    whole = full()
    want_padded, want = step(model, padded), step(model, whole)
    report = apply_liger(model, ON)["varlen_attention"]
    assert "computes padding" in report.swapped["model"] and "differs" in report.swapped["model"]
    masks.clear()
    assert_same_step(step(model, padded), want_padded)
    assert masks == []
    assert_same_step(step(model, whole), want)
    assert len(masks) == 5
    flat = dict(DataCollatorWithFlattening()(rows_of(batch(prompt=1))))
    want_flat = step(of("llama4_text", **layers), flat)
    masks.clear()
    assert_same_step(step(model, flat), want_flat)
    assert masks == []


@pytest.mark.parametrize("name", ["gpt_oss", GEMMA2])
def test_weights_of_attention_come_from_the_model_s_own(name, masks):
    model = patched(of(name)).eval()
    masks.clear()
    with torch.no_grad():
        outputs = model(**full(), use_cache=False, output_attentions=True)
    assert len(outputs.attentions) == 2 and outputs.attentions[0].shape[-2:] == (20, 20) and masks == []


def test_evaluation_with_logits_and_generation(masks):
    model, call = of("gpt_oss").eval(), full()
    prompt = {name: x[:, :9] for name, x in call.items() if name != "labels"}
    with torch.no_grad():
        want = model(**call, use_cache=False).logits
        tokens = model.generate(**prompt, max_new_tokens=5, do_sample=False)
        patched(model)
        masks.clear()
        torch.testing.assert_close(model(**call, use_cache=False).logits, want, rtol=1e-4, atol=1e-5)
        assert len(masks) == 2
        assert torch.equal(model.generate(**prompt, max_new_tokens=5, do_sample=False), tokens)
        assert len(masks) == 2


def test_eager_that_was_asked_for_stays(masks):
    report = apply_liger(tiny_model("mistral"), ON)["varlen_attention"]
    assert "which stays as it is" in report.unsuited["model"]


def test_dropout_of_attention_is_the_model_s_own(masks, caplog):
    model, call = of("gpt_oss", attention_dropout=0.5), full()
    patched(model)
    assert step(model, call)[0].isfinite()
    assert model.model._liger_varlen.fallback_active


def test_a_checkpointed_layer_that_cannot_run_rows(masks):
    """Its second layer has sinks and dropout. The first one has run on rows when the model's own code starts."""
    model = checkpointed_as_in_torch_2_11(of("gpt_oss"))
    patched(model)
    model.model.layers[1].self_attn.attention_dropout = 0.5
    loss, gradients = step(model, full())
    assert model.model._liger_varlen.fallback_active
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_a_hook_within_runs_the_model_s_own(masks):
    model, call = of("gpt_oss"), full()
    want = step(model, call)
    report = apply_liger(model, ON)["varlen_attention"]
    handle = model.model.layers[0].register_forward_hook(lambda *given: None)
    masks.clear()
    assert_same_step(step(model, call), want)
    assert masks == [] and "hook" in report.skipped["model"]
    handle.remove()
    assert_same_step(step(model, call), want)
    assert len(masks) == 2


def test_masks_are_ours_in_patched_models_alone(masks):
    model = patched(of("gpt_oss"))
    twin = copy.deepcopy(model)
    remove_liger(model)
    masks.clear()
    step(twin, full())
    assert len(masks) == 2
    step(model, full())
    assert len(masks) == 2
    remove_liger(twin)
    assert_same_step(step(twin, full()), step(of("gpt_oss"), full()))
    assert len(masks) == 2


def test_a_function_that_the_user_registers_runs(masks, monkeypatch):
    called, model = [], patched(of("gpt_oss"))

    def theirs(module, query, key, value, mask, **kwargs):
        called.append(mask)
        return value.repeat_interleave(2, 1).transpose(1, 2).contiguous(), None

    monkeypatch.setitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, "eager", theirs)
    masks.clear()
    step(model, full())
    assert len(called) == 2 and masks == []


def test_a_function_in_place_of_the_model_s_own_runs(masks, monkeypatch):
    called, own = [], modeling_gpt_oss.eager_attention_forward

    def theirs(module, query, key, value, mask, **kwargs):
        called.append(mask)
        return own(module, query, key, value, mask, **kwargs)

    model, call = of("gpt_oss"), full()
    want = step(model, call)
    report = apply_liger(model, ON)["varlen_attention"]
    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", theirs)
    masks.clear()
    assert_same_step(step(model, call), want)
    assert len(called) == 2 and masks == [] and "not transformers' own" in report.skipped["model"]


def test_frozen_sinks_and_a_second_backward():
    model, call = of("gpt_oss"), full()
    for layer in model.model.layers:
        layer.self_attn.sinks.requires_grad_(False)
    want = step(model, call)
    patched(model)
    assert_same_step(step(model, call), want)
    model.zero_grad()
    loss = model(**call, use_cache=False).loss
    loss.backward(retain_graph=True)
    first = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.model.layers[0].self_attn.q_proj.weight.grad, 2 * first)


def test_rows_stay_apart():
    model = of("gpt_oss")
    assert "see each other" in why_rows_mix(model)
    assert why_rows_mix(patched(model)) is None


def test_a_layer_that_is_called_with_a_mask_of_its_own(masks):
    """An attention that is called outside its model has no rows."""
    model = patched(of("gpt_oss"))
    layer = model.model.layers[0].self_attn
    hidden = torch.randn(1, 5, 32)
    angles = model.model.rotary_emb(torch.randn(1), torch.arange(5)[None])
    out, weights = layer(hidden, angles, torch.zeros(1, 1, 5, 5))
    assert out.shape == (1, 5, 32) and weights is not None and isinstance(layer, nn.Module)
    assert LENGTHS
