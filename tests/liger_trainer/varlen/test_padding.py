"""The backbone on real tokens equals stock on the padded batch; packed rows equal rows one by one."""

import copy
import pickle

import pytest
import torch
from attentions import with_own_attention
from tiny_models import assert_same_step, step
from transformers import DataCollatorWithFlattening
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeDecoderLayer, GraniteMoePreTrainedModel
from varlen_batches import LENGTHS, ON, batch, drawn_model, model_of, patched, rows_of

from liger_trainer import apply_liger, remove_liger
from liger_trainer.varlen import unpad_plan
from liger_trainer.varlen.plan_batch import plan_batch
from liger_trainer.varlen.rows import Rows
from liger_trainer.varlen.unpad_plan import UnpadPlan

FAMILIES = (
    "llama",
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "gemma4_text",
    "granite",
    "cohere2",
    "glm4",
    "phi",
    "deepseek_v3",
)
BATCHES = {  # lengths, side, and so on: of the padding
    "right": (LENGTHS, "right"),
    "left": (LENGTHS, "left"),
    "one full row": ((20, 5), "right"),
    "rows of one token": ((1, 6, 1), "right"),
    "an empty row": ((4, 0, 9), "right"),
    "one row": ((11,), "right"),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_loss_and_gradients_equal_the_padded_batch(name, side, tokens):
    model, call = model_of(name), batch(side=side)
    want = step(model, call)
    patched(model)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == [sum(LENGTHS)]


def test_routers_whose_logits_are_not_recorded(tokens, monkeypatch):
    """As in Granite's mixtures in transformers 5.17, where stock raises if a call asks for them."""
    monkeypatch.setattr(GraniteMoePreTrainedModel, "_can_record_outputs", {"hidden_states": GraniteMoeDecoderLayer})
    model, call = drawn_model("granitemoe"), batch()
    want = step(model, call)
    patched(model)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == [sum(LENGTHS)]


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("prompt", [0, 2])
def test_batches(kind, prompt, tokens):
    lengths, side = BATCHES[kind]
    model, call = model_of(), batch(lengths, side, prompt=prompt)
    want = step(model, call)
    patched(model)
    tokens.clear()
    got = step(model, call)
    # In a row padded on the left, padding predicts the first token, with states that stock computes.
    from_padding = ((call["labels"][:, 1:] != -100) & (call["attention_mask"][:, :-1] == 0)).any()
    assert bool(tokens) != bool(from_padding)
    if not want[0].isnan():
        assert_same_step(got, want)


def test_a_count_of_labels_from_the_trainer(tokens):
    """`Trainer` passes it as a tensor, and the model's forward passes it to the backbone."""
    model, call = model_of(), batch() | {"num_items_in_batch": torch.tensor(40)}
    want = step(model, call)
    patched(model)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == [sum(LENGTHS)]


def test_full_rows_go_through_as_they_are(tokens):
    model, call = model_of(), batch((20, 20))
    patched(model)
    tokens.clear()
    step(model, call)
    step(model, {name: x for name, x in call.items() if name != "attention_mask"})
    assert tokens == []


def test_padding_between_tokens_and_an_empty_mask_are_left_to_the_model(tokens):
    model, call = model_of(), batch((20, 20))
    call["attention_mask"][0, 5:8] = 0
    call["labels"][0, 5:9] = -100
    want = step(model, call)
    patched(model)
    tokens.clear()
    assert_same_step(step(model, call), want)
    call["attention_mask"][:] = 0
    model(**call, use_cache=False)
    assert tokens == []


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant, tokens):
    model, call = model_of("gemma3_text"), batch()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    want = step(model, call)
    patched(model)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert tokens == [sum(LENGTHS)], "and once only: what is computed again is inside"


def test_positions_and_embeddings_of_the_caller(tokens):
    model, call = model_of("qwen3"), batch(side="left")
    call["position_ids"] = (call["attention_mask"].cumsum(1) - 1).clamp(min=0) * 2  # positions that nothing else makes
    embedded = {k: v for k, v in call.items() if k != "input_ids"}
    embeddings = model.get_input_embeddings()(call["input_ids"]).detach().requires_grad_()
    want = step(model, call)
    want_embedded = step(model, embedded | {"inputs_embeds": embeddings})
    want_grad, embeddings.grad = embeddings.grad, None
    patched(model)
    tokens.clear()
    assert_same_step(step(model, call), want)
    assert_same_step(step(model, embedded | {"inputs_embeds": embeddings}), want_embedded)
    torch.testing.assert_close(embeddings.grad, want_grad, rtol=1e-5, atol=1e-7)
    assert tokens == [sum(LENGTHS)] * 2


def test_the_loss_that_balances_experts(tokens):
    """The config asks for it. The model's own output has the routers' logits, including those at padding."""
    model = model_of("qwen3_moe", router_aux_loss_coef=0.1, output_router_logits=True)
    call = batch(side="left")
    want, stock = step(model, call), model(**call, use_cache=False)
    patched(model)
    tokens.clear()
    scored = model(**call, fused_lm_head=True)
    assert tokens == [sum(LENGTHS)]
    torch.testing.assert_close((scored.loss, scored.aux_loss), (stock.loss, stock.aux_loss), rtol=1e-5, atol=0)
    assert_same_step(step(model, call), want)
    torch.testing.assert_close(model(**call, use_cache=False).router_logits, stock.router_logits)
    assert tokens == [sum(LENGTHS)]


def test_hooks_inside_see_the_batch(tokens):
    model = model_of()
    call = batch()
    shapes = []
    want = step(model, call)
    patched(model)
    tokens.clear()
    handle = model.model.layers[0].register_forward_hook(lambda module, args, out: shapes.append(args[0].shape[:2]))
    assert_same_step(step(model, call), want)
    assert shapes == [(len(LENGTHS), 20)] and tokens == []
    handle.remove()
    assert_same_step(step(model, call), want)
    assert shapes == [(len(LENGTHS), 20)] and tokens == [sum(LENGTHS)]


def test_a_cache_and_generation_are_stock_s(tokens):
    model, call = model_of(), batch(side="left")
    prompt = {name: call[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**prompt, **options)
    report = apply_liger(model, ON)["varlen_attention"]
    tokens.clear()
    assert torch.equal(model.generate(**prompt, **options), want)
    assert report.swapped, "training leaves padding out as before"
    assert model(**prompt, use_cache=True).past_key_values is not None
    assert tokens == []


def test_it_comes_and_goes(tokens):
    model, call = model_of(), batch()
    before = dict(model.model.__dict__)
    assert apply_liger(model)["varlen_attention"].swapped, "on by default"
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.data.mul_(0.5)
    unpickled = pickle.loads(pickle.dumps(model))
    want, half = step(model, call), step(twin, call)
    assert not torch.allclose(want[0], half[0]), "the copy has weights of its own"
    assert_same_step(step(unpickled, call), want)
    tokens.clear()
    remove_liger(model)
    assert model.config._attn_implementation == "sdpa" and dict(model.model.__dict__) == before
    assert_same_step(step(model, call), want)
    assert tokens == []
    model.set_attn_implementation("eager")
    assert "eager" in apply_liger(model, ON)["varlen_attention"].unsuited["model"]


def test_another_attention_set_later_is_used(tokens):
    model, call = patched(model_of()), batch()
    want = step(model, call)
    tokens.clear()
    model.set_attn_implementation("eager")
    assert_same_step(step(model, call), want)
    assert tokens == []


def test_an_error_in_the_middle_leaves_nothing_behind():
    model, call = patched(model_of()), batch()
    want = step(model, call)
    broken = model.model.layers[1].mlp.down_proj
    weight, broken.weight = broken.weight, None
    with pytest.raises((TypeError, AttributeError)):
        step(model, call)
    broken.weight = weight
    assert unpad_plan._plan.get() is None
    assert_same_step(step(model, call), want)


def test_a_state_model_that_cannot_take_offsets_keeps_its_own_code():
    model, _ = with_own_attention("recurrent_gemma")
    report = apply_liger(model, ON)
    assert not report["varlen_attention"].swapped and report["varlen_attention"].unsuited


def test_autocast_in_bf16(tokens):
    model, call = model_of(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        want = step(model, call)
        patched(model)
        tokens.clear()
        got = step(model, call)
    assert tokens
    assert_same_step(got, want, rtol=0.05)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_autocast_leaves_float64_as_it_is(name, tokens):
    model, call = with_own_attention(name)[0].double().train(), batch()
    model.set_experts_implementation("eager")  # grouped products of torch do not take float64
    with torch.autocast("cpu", torch.bfloat16):
        want = step(model, call)
        patched(model)
        tokens.clear()
        got = step(model, call)
    assert tokens
    assert_same_step(got, want)


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("told", ["position_ids", "cu_seq_lens"])
def test_packed_rows_are_rows_one_by_one(name, told, tokens):
    model, call = model_of(name), batch(prompt=1)
    want = step(model, call)
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=told == "cu_seq_lens")(rows_of(call))
    patched(model)
    tokens.clear()
    assert_same_step(step(model, dict(flat)), want)
    assert tokens == [sum(LENGTHS)]


def test_compiled_models_compute_padding(tokens):
    model, call = model_of(), batch()
    want = step(model, call)
    patched(model)
    tokens.clear()
    compiled = torch.compile(model, backend="eager")
    outputs = compiled(**call, use_cache=False)
    torch.testing.assert_close(outputs.loss.detach(), want[0], rtol=1e-5, atol=0)
    assert tokens == []


def test_a_last_layer_on_another_device():
    """accelerate may spread the layers over GPUs, and leaves the batch on the first."""
    plan = plan_batch(model_of("llama").config, batch(LENGTHS) | {"use_cache": False})
    assert plan.leaves_out
    out = plan.repad(torch.zeros(1, plan.rows.tokens, 8, device="meta"))
    assert out.device.type == "meta" and out.shape == (*batch(LENGTHS)["input_ids"].shape, 8)


@pytest.mark.parametrize("lengths, batch, fits", [((3, 4), 1, False), ((7,), 1, True), ((7, 7), 2, True)])
def test_positions_that_the_model_makes_itself(lengths, batch, fits):
    """They do not show where packed rows start. Batches without padding have no packed rows."""
    ids = torch.zeros(batch, 7, dtype=torch.long)
    positions = torch.arange(7).expand(batch, 7)
    given = {"input_ids": ids, "position_ids": positions}
    plan = UnpadPlan(given, Rows(list(lengths), ids.device, batch))
    assert plan.fits(given)
    assert plan.fits(given | {"position_ids": positions.expand(3, batch, 7)}) == fits


@pytest.mark.diagonal
@pytest.mark.parametrize("call", ["one padded row", "one full row", "a packed row"])
@pytest.mark.parametrize("name", ["afmoe", "jetmoe", "llama"])
def test_one_row_a_batch(name, call):
    """Some models view the result of attention. With one row it has to be contiguous, as in stock."""
    model, _ = with_own_attention(name)
    stock = copy.deepcopy(model)
    stock_s = batch((13,)) if call == "one padded row" else batch((20,))
    given = stock_s
    if call == "a packed row":  # stock's afmoe lets packed rows see each other
        stock_s = batch((10, 10), width=10, prompt=1)
        given = dict(DataCollatorWithFlattening()(rows_of(stock_s)))
    want = step(stock, stock_s)
    assert_same_step(step(patched(model), given), want)
