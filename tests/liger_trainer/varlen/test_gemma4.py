"""Gemma 4 on real tokens equals stock: E2B and E4B, which reuse keys and values in their last layers, and the others.

Each is tiny with the checkpoints' heads of 256 and 512, alone and inside the image model of the checkpoint.
"""

import types

import pytest
import torch
import torch.nn.functional as F
from architectures import SMALL
from image_models import END, IMAGE, START, VIDEO, image_step
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening
from varlen_batches import ON, assert_same_step, batch, rows_of

from liger_trainer import apply_liger, remove_liger
from liger_trainer.trainers.packed_images import pack_images
from liger_trainer.varlen.proof import image_masks
from liger_trainer.varlen.proof.small_model import small_copy

pytestmark = pytest.mark.skipif("gemma4" not in CONFIG_MAPPING, reason="this transformers has no Gemma 4")
SIZES = {
    "vocab_size": 131,
    "vocab_size_per_layer_input": 131,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "max_position_embeddings": 128,
    "final_logit_softcapping": 30.0,
}


def kinds(layers, period):
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]


# What distinguishes the checkpoints, and the sizes that the proof has to reduce.
CHECKPOINTS = {
    "e2b": (
        "gemma4",
        {
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_hidden_layers": 35,
            "layer_types": kinds(35, 5),
            "num_kv_shared_layers": 20,
            "hidden_size_per_layer_input": 256,
            "use_double_wide_mlp": True,
        },
    ),
    "e4b": (
        "gemma4",
        {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_hidden_layers": 42,
            "layer_types": kinds(42, 6),
            "num_kv_shared_layers": 18,
            "hidden_size_per_layer_input": 256,
        },
    ),
    "12b": (
        "gemma4_unified",
        {
            "hidden_size": 3840,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 1,
            "num_hidden_layers": 48,
            "layer_types": kinds(48, 6),
            "attention_k_eq_v": True,
        },
    ),
    "26b_a4b": (
        "gemma4",
        {
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "num_hidden_layers": 30,
            "layer_types": kinds(30, 6),
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
            "use_bidirectional_attention": "vision",
        },
    ),
}
TINY = {
    "e2b": {
        "num_hidden_layers": 5,
        "layer_types": kinds(4, 2) + ["full_attention"],
        "num_kv_shared_layers": 3,
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 8,
    },
    "e4b": {
        "num_hidden_layers": 6,
        "layer_types": kinds(6, 3),
        "num_kv_shared_layers": 3,
        "num_key_value_heads": 2,
        "hidden_size_per_layer_input": 8,
    },
    "12b": {
        "num_hidden_layers": 3,
        "layer_types": kinds(3, 3),
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
    },
    "26b_a4b": {
        "num_hidden_layers": 3,
        "layer_types": kinds(3, 3),
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}
VISION = {  # for a tower of one layer, and for images without a tower
    "gemma4": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 2,
        "position_embedding_size": 16,
    },
    "gemma4_unified": {"patch_size": 2, "mm_embed_dim": 64, "mm_posemb_size": 16, "output_proj_dims": 64},
}
SIDE = 6  # patches of an image; 3 x 3 of them become a token in a tower


def text_model(name):
    model_type, own = CHECKPOINTS[name]
    return drawn(AutoConfig.for_model(f"{model_type}_text", **own | SIZES | TINY[name]))


def drawn(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0, p.shape[-1] ** -0.5, generator=generator)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):  # scores of heads this large, which are not scaled
                p.fill_(0.3)
    return model.train()


def whole_model(name, **text):
    """The image model that a checkpoint holds, as `AutoModelForCausalLM` loads it."""
    model_type, own = CHECKPOINTS[name]
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "boi_token_id": START, "eoi_token_id": END}
    tokens |= {"audio_token_id": 104, "boa_token_id": 105}
    text = {"model_type": f"{model_type}_text"} | own | SIZES | TINY[name] | text
    vision = {"model_type": f"{model_type}_vision"} | VISION[model_type]
    return drawn(AutoConfig.for_model(model_type, text_config=text, vision_config=vision, audio_config=None, **tokens))


def packed(call):
    return dict(DataCollatorWithFlattening()(rows_of(call)))


def images_of(model, side="right"):
    """Three rows with two images, no image and one image, all with text."""
    count, per_image = 3, 4 if model.config.model_type == "gemma4" else SIDE**2
    generator = torch.Generator().manual_seed(2)
    call = batch((2 * per_image + 12, 9, per_image + 5), side, 2 * per_image + 12)
    ids, mask = call["input_ids"] % 97 + 3, call["attention_mask"]
    for row, number in ((0, 2), (2, 1)):
        start = int(mask[row].argmax())
        for at in range(number):
            first = start + 3 + at * (per_image + 3)
            ids[row, first : first + per_image] = IMAGE
    labels = ids.masked_fill((call["labels"] == -100) | (ids == IMAGE), -100)
    width = 3 * (2 if model.config.model_type == "gemma4" else 6) ** 2
    places = torch.stack(torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="xy"), -1).flatten(0, 1)
    pixels = torch.rand(count, SIDE**2, width, generator=generator)
    kinds_of_tokens = (ids == IMAGE).long()
    return call | {
        "input_ids": ids,
        "labels": labels,
        "pixel_values": pixels,
        "image_position_ids": places.expand(count, -1, 2),
        "mm_token_type_ids": kinds_of_tokens,
    }


def no_images(call):
    return call | {"mm_token_type_ids": torch.zeros_like(call["input_ids"])}


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
