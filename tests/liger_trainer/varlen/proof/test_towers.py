"""Towers with one attention call for all images and windows equal stock, with pixels."""

import copy
import pickle

import pytest
import torch
from image_models import image_batch, image_model, image_step
from tiny_models import assert_same_gradients
from torch import nn
from torch.testing import assert_close
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from varlen_batches import waits_for_gpu

from liger_trainer import apply_liger, remove_liger
from liger_trainer.varlen import registry, segments
from liger_trainer.varlen.host_copies import HostBatch, remember
from liger_trainer.varlen.proof import towers

TOWER = "model.visual.blocks"


@pytest.fixture
def calls(monkeypatch):
    """How often SDPA was called with segments, and how often without."""
    found = {"within": 0, "apart": 0}

    def counted(name, function):
        def count(*args, **kwargs):
            found[name] += 1
            return function(*args, **kwargs)

        return count

    monkeypatch.setattr(segments, "_length_by_length", counted("within", segments._length_by_length))
    monkeypatch.setattr(
        "liger_trainer.varlen.registry.sdpa_attention_forward", counted("apart", sdpa_attention_forward)
    )
    return found


def features(model, batch):
    """The tower's output for the pixels, and the gradients of its weights."""
    visual = model.model.visual
    visual.zero_grad()
    found = visual(batch["pixel_values"], grid_thw=batch["image_grid_thw"]).pooler_output
    found.pow(2).mean().backward()
    return found.detach(), {n: p.grad.clone() for n, p in visual.named_parameters() if p.grad is not None}


def assert_same(got, want):
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    assert_same_gradients(got[1], want[1])


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "video_llama_3"])
def test_a_step(model_type):
    model = image_model(model_type)
    batch = image_batch(model) if model_type != "video_llama_3" else None
    if batch is None:  # it needs other inputs; its attentions are proven anyway
        assert [v for v in apply_liger(model)["varlen_attention"].swapped.values() if "one attention" in v]
        return
    want = image_step(model, batch)
    report = apply_liger(model)["varlen_attention"]
    assert not report.skipped and not report.unsuited
    assert_same(image_step(model, batch), want)


def test_windows_are_one_call(calls):
    model = image_model("qwen2_5_vl")
    batch = image_batch(model)
    apply_liger(model)
    calls.update(within=0, apart=0)
    want = features(model, batch)
    assert calls == {"within": 2, "apart": 0}
    remove_liger(model)
    assert_same(features(model, batch), want)
    assert calls["within"] == 2
    assert all("forward" not in m.__dict__ and "_liger_tower" not in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant, calls):
    model = image_model("qwen2_5_vl")
    batch = image_batch(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    want = image_step(model, batch)
    apply_liger(model)
    calls.update(within=0, apart=0)
    assert_same(image_step(model, batch), want)
    assert calls == {"within": 4, "apart": 0}


def test_copies_and_pickles(calls):
    model = image_model("qwen2_5_vl")
    batch = image_batch(model)
    want = features(model, batch)
    apply_liger(model)
    twin, plain = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    del model
    calls.update(within=0, apart=0)
    assert_same(features(twin, batch), want)
    assert calls["within"] == 2
    assert_same(features(plain, batch), want)
    assert calls["within"] == 2
    apply_liger(twin)  # a second time
    calls.update(within=0, apart=0)
    assert_same(features(twin, batch), want)
    assert calls["within"] == 2


def test_no_grad_and_hooks_inside():
    model, seen = image_model("qwen2_5_vl"), []
    batch = image_batch(model)
    apply_liger(model)
    for block in model.model.visual.blocks:
        block.attn.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
        block.attn.proj.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    with torch.no_grad():
        model.model.visual(batch["pixel_values"], grid_thw=batch["image_grid_thw"])
    patches = len(batch["pixel_values"])
    assert [x for x in seen if isinstance(x, torch.Size)] == [(patches, 64)] * 2
    assert all(int(x["cu_seqlens"][-1]) == patches and len(x["cu_seqlens"]) > 2 for x in seen[::2])


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_inference_mode(model_type):
    model = image_model(model_type)
    batch = image_batch(model)
    del batch["labels"]
    with torch.no_grad():
        want = model(**batch).logits
    apply_liger(model)
    with torch.inference_mode():
        got = model(**batch).logits
        assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert_close(model(**{name: x.clone() for name, x in batch.items()}).logits, got)


def test_other_attention_stays():
    report = apply_liger(image_model("qwen2_5_vl", "eager"))["varlen_attention"]
    assert "attn_implementation is 'eager', which stays as it is" in report.unsuited.values()
    model = image_model("qwen2_5_vl")
    batch = image_batch(model)
    for config in ({"varlen_attention": False}, {"fused_linear_cross_entropy": False}):
        assert not apply_liger(model, config)["varlen_attention"].swapped
    apply_liger(model)
    model.model.visual.config._attn_implementation = "eager"  # since then
    assert features(model, batch)[0].isfinite().all()


def test_a_registered_function_of_the_user_s_stays(monkeypatch):
    own = lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs)  # noqa: E731 - the user's
    model = image_model("qwen2_5_vl")
    batch = image_batch(model)
    want = features(model, batch)
    apply_liger(model)
    monkeypatch.setitem(registry.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", own)
    report = apply_liger(model)["varlen_attention"]
    assert not report.swapped and "a function of your own" in str(report.unsuited)
    assert_same(features(model, batch), want)


def test_a_function_that_is_registered_later_runs(monkeypatch):
    model, seen = image_model("qwen2_5_vl"), []
    batch = image_batch(model)
    want = features(model, batch)
    report = apply_liger(model)["varlen_attention"]
    assert report.swapped
    monkeypatch.setitem(
        registry.ALL_ATTENTION_FUNCTIONS._global_mapping,
        "sdpa",
        lambda *args, **kwargs: seen.append(args[1].shape[2]) or sdpa_attention_forward(*args, **kwargs),
    )
    assert_same(features(model, batch), want)
    assert len(seen) > 10 and report.swapped


class OfTheUser(nn.Module):
    """A user's module that looks like a tower's attention, and counts its calls."""

    def __init__(self, own):
        super().__init__()
        self.qkv = own.qkv
        self.proj = own.proj
        self.config = own.config
        self.head_dim = own.head_dim

    def forward(self, hidden_states, cu_seqlens, **kwargs):
        attend = registry.ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
        assert attend is not None
        return hidden_states


def test_a_class_of_the_user_s_stays():
    model = image_model("qwen2_5_vl")
    OfTheUser.forward.__globals__["ALL_ATTENTION_FUNCTIONS"] = registry.ALL_ATTENTION_FUNCTIONS
    model.model.visual.blocks[0].attn = OfTheUser(model.model.visual.blocks[0].attn)
    report = apply_liger(model)["varlen_attention"]
    assert f"{TOWER}.0.attn" not in report.swapped
    assert f"{TOWER}.1.attn" in report.swapped


def test_a_wrong_attention_is_not_proven(monkeypatch):
    own = segments._length_by_length
    monkeypatch.setattr(segments, "_length_by_length", lambda q, *given: own(q * 1.02, *given))
    report = apply_liger(image_model("qwen2_5_vl"))["varlen_attention"]
    assert "values or gradients differ" in report.unsuited[f"{TOWER}.0.attn"]


def test_the_tower_of_llama_4():
    """Its model cannot be trained with pixels in transformers 5.24."""
    tower = image_model("llama4").vision_model
    pixels = torch.randn(3, 3, 28, 28, generator=torch.Generator().manual_seed(0))

    def run():
        tower.zero_grad()
        out = tower(pixels).last_hidden_state
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
        return out.detach(), {name: p.grad.clone() for name, p in tower.named_parameters() if p.grad is not None}

    want, want_grads = run()
    assert apply_liger(tower)["layer_norm"].swapped
    got, grads = run()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    keep = [name for name in want_grads if not name.endswith("k_proj.bias")]
    assert_same_gradients({n: grads[n] for n in keep}, {n: want_grads[n] for n in keep})


def test_every_tower_that_takes_offsets_is_nominated():
    assert towers.is_candidate(image_model("glm4v").model.visual.blocks[0].attn)
    assert not towers.is_candidate(image_model("glm4v").model.visual.blocks[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])  # others read sizes in layers too
def test_positions_are_computed_without_a_wait(model_type):
    """They equal the ones that the model computes from read-back values. Its tower waits for nothing else."""
    model = image_model(model_type).cuda().bfloat16()
    batch = {name: x for name, x in image_batch(model).items() if name != "labels"}
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
    stock = {name: x.cuda() for name, x in batch.items()}
    want = model.model.get_rope_index(**{name: stock[name] for name in names})
    visual = model.model.visual
    pooled = visual(stock["pixel_values"].bfloat16(), grid_thw=stock["image_grid_thw"]).pooler_output
    apply_liger(model)
    for warm in (True, False):  # the first call compiles
        call = HostBatch({name: x.pin_memory() for name, x in batch.items()}).to("cuda", non_blocking=True)
        pixels = call["pixel_values"].bfloat16()
        torch.cuda.set_sync_debug_mode("default" if warm else "error")
        try:
            got = model.model.get_rope_index(**{name: call[name] for name in names})
            ours = visual(pixels, grid_thw=call["image_grid_thw"]).pooler_output
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x, y) and x.device == y.device for x, y in zip(got, want, strict=True))
    assert (ours.double() - pooled.double()).norm() <= 0.02 * pooled.double().norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_a_step_waits_for_labels_alone(model_type):
    """The head asks twice for the labels. Nothing else asks the GPU, in forward and backward."""
    model = image_model(model_type).cuda().bfloat16()
    batch = image_batch(model)
    apply_liger(model)
    for _ in range(3):  # the first calls compile
        call = HostBatch({name: x.pin_memory() for name, x in batch.items()}).to("cuda", non_blocking=True)
        waits = waits_for_gpu(lambda call=call: model(**call, use_cache=False).loss.backward())
    assert len(waits) <= 2, waits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_a_step_in_bf16_is_as_near_to_fp32_as_stock_s(model_type):
    model = image_model(model_type).cuda()
    batch = {name: x.cuda() for name, x in image_batch(model).items()}
    want = image_step(model, batch)
    model.bfloat16()
    stock = image_step(model, batch)
    assert apply_liger(model)["varlen_attention"].swapped
    ours = image_step(model, batch)
    assert abs(ours[0] - want[0]) <= 1.5 * abs(stock[0] - want[0]) + 1e-2
    for name, best in want[1].items():
        off = (ours[1][name].float() - best).norm()
        theirs = (stock[1][name].float() - best).norm()
        assert off <= 1.5 * theirs + 1e-2 * best.norm(), name


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU. Reading its values fails."""

    is_cuda = True

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor._version.__get__, torch.Tensor.device.__get__, torch.Tensor.is_inference):
            return super().__torch_function__(function, types, args, kwargs)
        raise AssertionError(f"{function} would wait for the GPU")


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])  # others read sizes in layers too
def test_positions_are_computed_from_the_values_on_the_host(model_type):
    model = image_model(model_type)
    batch = image_batch(model)
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
    want = model.model.get_rope_index(**{name: batch[name] for name in names})
    pooled = model.model.visual(batch["pixel_values"], grid_thw=batch["image_grid_thw"]).pooler_output
    apply_liger(model)
    there = {name: batch[name].as_subclass(OnGpu) for name in names}
    for name in names:
        remember(there[name], batch[name])
    got = model.model.get_rope_index(**there)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    ours = model.model.visual(batch["pixel_values"], grid_thw=there["image_grid_thw"]).pooler_output
    torch.testing.assert_close(ours, pooled, rtol=1e-5, atol=1e-6)
    remove_liger(model)
    assert "get_rope_index" not in model.model.__dict__ and "forward" not in model.model.visual.__dict__
