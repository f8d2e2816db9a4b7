"""Gemma 4 on real tokens equals stock: E2B and E4B, which reuse keys and values in their last layers, and the others.

Each is tiny (`gemma4_models.py`), alone and inside the image model of the checkpoint.
"""

import types

import pytest
import torch
import torch.nn.functional as F
from architectures import SMALL
from gemma4_models import CHECKPOINTS, gemma3n_model, images_of, no_images, text_model, whole_model
from image_models import image_step
from tiny_models import assert_same_step
from transformers import CONFIG_MAPPING, AutoConfig, DataCollatorWithFlattening
from varlen_batches import ON, batch, rows_of

from liger_trainer import apply_liger, remove_liger
from liger_trainer.trainers.packed_images import pack_images
from liger_trainer.varlen.proof import image_masks
from liger_trainer.varlen.proof.small_model import small_copy

pytestmark = pytest.mark.skipif("gemma4" not in CONFIG_MAPPING, reason="this transformers has no Gemma 4")


def packed(call):
    return dict(DataCollatorWithFlattening()(rows_of(call)))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_of_the_sizes_of_a_checkpoint_there_is_a_small_copy(name):
    """Its proof runs on one with two layers of each kind: one makes keys and values, one reuses another's."""
    model_type, own = CHECKPOINTS[name]
    with torch.device("meta"):
        module = text_model(name).base_model
    module.config = AutoConfig.for_model(f"{model_type}_text", **own)
    copy = small_copy(module, 0, "sdpa")
    shares = "num_kv_shared_layers" in own
    assert copy.config.layer_types == ["sliding_attention", "full_attention"] * (2 if shares else 1)
    if hasattr(copy.config, "kv_sharing_modes"):  # transformers after 5.17
        assert copy.config.kv_sharing_modes == (["store", "store", "reuse", "reuse"] if shares else ["store", "store"])
    states = copy(input_ids=torch.arange(3, 10)[None], use_cache=False)[0]
    assert states.shape == (1, 7, SMALL["hidden_size"]) and states.isfinite().all()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_text_on_real_tokens(name, tokens):
    model = text_model(name)
    right, left = batch(), batch(side="left")
    want, wanted_of_left, wanted_of_packed = (image_step(model, call) for call in (right, left, packed(right)))
    report = apply_liger(model, ON)["varlen_attention"]
    assert not report.unsuited and not report.skipped, report
    tokens.clear()
    for call, wanted in ((right, want), (left, wanted_of_left), (packed(right), wanted_of_packed)):
        assert_same_step(image_step(model, call), wanted)
    assert tokens == [41] * 3


def test_rows_of_large_heads_take_no_groups(monkeypatch):
    """PyTorch has no fast kernel for groups and heads of 512: the scores of all tokens would be stored."""
    seen, own = set(), F.scaled_dot_product_attention

    def noted(query, key, value, *args, **kwargs):
        seen.add((query.shape[-1], query.shape[1] == key.shape[1], kwargs.get("enable_gqa", False)))
        return own(query, key, value, *args, **kwargs)

    model = text_model("e4b")
    apply_liger(model, ON)
    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    for call in (batch(), packed(batch()), batch((20, 20))):
        image_step(model, call)
    assert seen == {(256, False, True), (512, True, False)}


@pytest.mark.diagonal
@pytest.mark.parametrize("kept", [1, 5])
@pytest.mark.parametrize("name", ["e2b", "e4b"])
def test_layers_that_would_compute_only_the_last_tokens(name, kept, tokens):
    """With `logits_to_keep`, layers that reuse keys and values cut states and masks by columns of the batch."""
    model = text_model(name).eval()
    whole = {"input_ids": batch((20, 20))["input_ids"]}
    padded = {name: x for name, x in batch(side="left").items() if name != "labels"}
    in_one_row = {name: x for name, x in packed(batch()).items() if name != "labels"}
    calls = [call | {"logits_to_keep": kept, "use_cache": False} for call in (whole, padded, in_one_row)]
    with torch.no_grad():
        want = [model(**call).logits for call in calls]
        report = apply_liger(model, ON)["varlen_attention"]
        tokens.clear()  # what the proof has run
        for call, wanted in zip(calls, want, strict=True):
            got = model(**call).logits
            assert got.shape[1] == kept
            torch.testing.assert_close(got + 0, wanted, rtol=1e-4, atol=1e-5)
    assert len(tokens) >= 2, report


def test_a_decoder_that_is_not_known_may_cut_the_states(tokens):
    """The head of such a model may rely on it, so the model's own code runs."""
    model = text_model("e4b").eval()
    model.model.__class__ = type("OwnModel", (type(model.model),), {"__module__": __name__})
    call = {"input_ids": batch((20, 20))["input_ids"], "use_cache": False}
    with torch.no_grad():
        wanted = model(**call, logits_to_keep=3).logits
        report = apply_liger(model, ON)["varlen_attention"]
        tokens.clear()  # what the proof has run
        model(**call)
        assert len(tokens) == 1, report
        got = model(**call, logits_to_keep=3).logits
    assert len(tokens) == 1
    torch.testing.assert_close(got + 0, wanted, rtol=1e-4, atol=1e-5)
    assert "logits_to_keep is an argument of its decoder" in str(report.skipped)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_layers_that_reuse_keys_and_values(reentrant, tokens):
    model, call = text_model("e2b"), batch()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    want = image_step(model, call)
    apply_liger(model, ON)
    tokens.clear()
    assert_same_step(image_step(model, call), want)
    assert tokens == [41]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_model_of_images_on_text(name, tokens):
    """`AutoModelForCausalLM` makes this model from a checkpoint. Its masks are made outside the decoder."""
    model = whole_model(name)
    right, left = batch(), batch(side="left")
    calls = (right, left, packed(right), no_images(right), no_images(left))
    want = [image_step(model, call) for call in calls]
    report = apply_liger(model, ON)["varlen_attention"]
    assert not report.unsuited and not report.skipped, report
    tokens.clear()
    for call, wanted in zip(calls, want, strict=True):
        assert_same_step(image_step(model, call), wanted)
    assert tokens == [41] * len(calls) and not report.skipped, report


@pytest.mark.diagonal
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_images(name, side, tokens):
    """In E2B and E4B, a token of an image sees what precedes it. In the others an image sees itself, and is padded."""
    model = whole_model(name)
    call, text = images_of(model, side), batch()
    want, wanted_of_text = image_step(model, call), image_step(model, text)
    tower = "model.vision_tower.encoder.layers.0.mlp.down_proj.linear.weight"
    assert want[1].get(tower, want[1].get("model.embed_vision.patch_dense.weight")).abs().max() > 1e-6
    report = apply_liger(model, ON)["varlen_attention"]
    tokens.clear()
    assert_same_step(image_step(model, call), want, 3e-5)
    causal = name in ("e2b", "e4b")
    assert tokens == ([int(call["attention_mask"].sum())] if causal else [])
    assert ("tokens of an image see each other" in str(report.swapped)) is not causal and not report.skipped
    tokens.clear()
    assert_same_step(image_step(model, text), wanted_of_text)
    assert tokens == [41]
    model.eval()
    assert model.generate(text["input_ids"][:1, :7], max_new_tokens=2, do_sample=False).shape == (1, 9)


def test_images_that_see_themselves_would_show(monkeypatch):
    """If the masks of images are left to the decoder as those of text are, the proof notices."""
    monkeypatch.setattr(image_masks, "_holds_images", lambda call: False)
    report = apply_liger(whole_model("12b"), ON)["varlen_attention"]
    assert "with images, what is computed for real tokens differs" in str(report.unsuited)


def test_it_is_taken_away(tokens):
    model, call = whole_model("e4b"), images_of(whole_model("e4b"))
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    want = image_step(model, call)
    apply_liger(model, ON)
    remove_liger(model)
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before
    tokens.clear()
    assert_same_step(image_step(model, call), want)
    assert not tokens


def test_packing_rows_with_images_that_see_themselves_is_an_error():
    model = whole_model("12b")
    args = types.SimpleNamespace(max_length=32, packing_strategy="bfd", dataloader_num_workers=0)
    report = apply_liger(model, ON)
    trainer = types.SimpleNamespace(args=args, train_dataset=[], model=model, liger_report=report, data_collator=None)
    with pytest.raises(ValueError, match="computes padding: tokens of an image see each other. Set packing to False"):
        pack_images(trainer)


def test_gemma_3n(tokens):
    """Its MLPs have a size for each layer, and some leave out most of it: the small copy has layers of both kinds."""
    model = gemma3n_model()
    calls = (batch(), batch(side="left"), packed(batch()))
    want = [image_step(model, call) for call in calls]
    report = apply_liger(model, ON)["varlen_attention"]
    assert not report.unsuited and not report.skipped, report
    tokens.clear()
    for call, wanted in zip(calls, want, strict=True):
        assert_same_step(image_step(model, call), wanted)
    assert tokens == [41] * 3


def test_of_the_sizes_of_gemma_3n_there_is_a_small_copy():
    module = gemma3n_model().base_model
    module.config = AutoConfig.for_model("gemma3n_text")
    small = small_copy(module, 0, "sdpa").config
    kinds = list(zip(small.layer_types, (share > 0 for share in small.activation_sparsity_pattern), strict=True))
    assert set(kinds) == {
        (kind, sparse) for kind in ("sliding_attention", "full_attention") for sparse in (True, False)
    }
    assert small.num_kv_shared_layers == 2 and set(small.intermediate_size) == {48}
