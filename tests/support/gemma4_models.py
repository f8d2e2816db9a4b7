"""Tiny copies of Gemma 4's checkpoints: E2B and E4B, which reuse keys and values in their last layers, and the others.

They have the checkpoints' heads of 256 and 512, alone and inside the image model of the checkpoint.
"""

import torch
from image_models import END, IMAGE, START, VIDEO
from transformers import AutoConfig, AutoModelForCausalLM
from varlen_batches import batch

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


def text_model(name, **more):
    model_type, own = CHECKPOINTS[name]
    return drawn(AutoConfig.for_model(f"{model_type}_text", **own | SIZES | TINY[name] | more))


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


def gemma3n_model():
    """Gemma 3n: embeddings for each layer, shared keys and values, and layers that leave out most of their MLP."""
    types = ["sliding_attention", "full_attention"] * 2 + ["full_attention"]
    own = {
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0],
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 8,
    }
    sizes = {name: size for name, size in SIZES.items() if not name.startswith("global")}
    sizes |= {"head_dim": 16, "intermediate_size": [48] * 5, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        "gemma3n_text", **sizes, **own, num_hidden_layers=5, layer_types=types, num_kv_shared_layers=1
    )
    return drawn(config)
