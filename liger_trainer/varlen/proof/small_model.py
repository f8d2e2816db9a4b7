"""Builds a small copy of a model from its config: the same class and options, with small sizes and random weights.

A proof on it holds for the code of the model, whatever the model's weights and device are and however it is sharded.
"""

import copy
from collections.abc import Callable

import torch
from torch import nn
from transformers.modeling_utils import set_zero3_state

from liger_trainer.patching.core.binding import own_class

_WIDTH = 64
_HEADS = 4
_HEAD_DIM = 16
_SIZES = {  # field of a config -> its value in the small copy, if the config has the field
    "vocab_size": 48,
    "hidden_size": _WIDTH,
    "n_embd": _WIDTH,
    "d_model": _WIDTH,
    "word_embed_proj_dim": _WIDTH,
    "embedding_size": _WIDTH,
    "intermediate_size": 48,
    "n_inner": 48,
    "ffn_dim": 48,
    "num_attention_heads": _HEADS,
    "n_head": _HEADS,
    "n_heads": _HEADS,
    "num_heads": _HEADS,
    "num_key_value_heads": 2,
    "head_dim": _HEAD_DIM,
    "global_head_dim": _HEAD_DIM,
    "rotary_dim": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "sliding_window": 4,
    "attention_chunk_size": 4,
    "floor_scale": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "moe_intermediate_size": 24,
    "lru_width": _WIDTH,
    "linear_num_heads": _HEADS,
    "linear_head_dim": _HEAD_DIM,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "shared_expert_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "vocab_size_per_layer_input": 48,
    "hidden_size_per_layer_input": 8,
}
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "no_rope_layers")  # lists that tell kinds of layers apart
# All lists with an entry for each layer.
_PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "activation_sparsity_pattern")
# Heads of a state space layer, their width, and the field that says how much wider than the model they are together.
_STATE_HEADS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
    ("num_heads", "head_dim", "expand"),
)
_MOST_PARAMETERS = 4_000_000  # a decoder of two layers has 50 thousand; experts and layers of four kinds make it more
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # rows are drawn from the other tokens


def small_config(config, **sizes_of_caller: int):
    """Return a copy of a text decoder's config with small sizes, a layer of each kind, and no dropout or jitter.

    Layers that share weights, or keys and values, with other layers are kinds of their own. `sizes_of_caller` overrides
    `_SIZES`, for fields that the config has.
    """
    small = copy.deepcopy(config)
    known = small.to_dict()
    all_sizes = _SIZES | sizes_of_caller
    sizes = _small_sizes(known, all_sizes)
    depth = next((known[name] for name in _DEPTHS if isinstance(known.get(name), int)), 2)
    kept = _kept_layers(known, depth)
    _keep_layers(small, known, depth, kept)
    for name, size in sizes.items():
        setattr(small, name, size)
    if isinstance(known.get("intermediate_size"), list):  # one for each layer
        small.intermediate_size = [all_sizes["intermediate_size"]] * len(kept)
    for name, value in known.items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(small, name, 0.0)
        if name in _TOKENS and value is not None:
            setattr(small, name, _TOKENS[name])
    _plain_rope(small, known.get("head_dim") or _quotient(known.get("hidden_size"), known.get("num_attention_heads")))
    layers_with_sizes = {int(layer): values for layer, values in (known.get("per_layer_config") or {}).items()}
    if layers_with_sizes:
        fields = small.to_dict()
        small_layers = {}
        for i, layer in enumerate(kept):
            if layer in layers_with_sizes:
                small_layers[i] = {
                    name: max(1, size * fields[name] // known[name]) for name, size in layers_with_sizes[layer].items()
                }
        fields["per_layer_config"] = small_layers
        small = type(small)(**fields)  # only the constructor reads `per_layer_config`
    return small


def _small_sizes(known: dict, all_sizes: dict[str, int]) -> dict[str, int]:
    """Return the sizes for the fields that a config has. They fit together as the real ones do."""
    sizes = {name: size for name, size in all_sizes.items() if isinstance(known.get(name), int)}
    sizes = {name: size for name, size in sizes.items() if known[name] != 0}  # a size of 0: the model has no such part
    grouped = known.get("num_key_value_heads") != known.get("num_attention_heads")
    is_latent = isinstance(known.get("qk_rope_head_dim"), int)
    if "num_key_value_heads" in sizes and (is_latent or not grouped):
        sizes["num_key_value_heads"] = _HEADS
    if "qk_rope_head_dim" in sizes and "head_dim" in sizes:  # rotary embeddings turn a part of the head
        turned = known["qk_rope_head_dim"] or known["head_dim"]
        sizes["head_dim"] = sizes["qk_rope_head_dim"] * known["head_dim"] // turned
    return sizes | _state_heads(known) | _wide_heads(known)


def _first_reusing(known: dict, depth: int) -> int:
    """Return the first layer that reuses keys and values of other layers, or `depth`."""
    return depth - (known.get("num_kv_shared_layers") or 0)


def _kept_layers(known: dict, depth: int) -> list[int]:
    """Return the layers to keep: at least one of each kind, and at least two if there are two."""
    # The kind of a layer is a tuple of everything in which layers may differ.
    of_layers = [known[name] for name in _KINDS_OF_LAYERS if isinstance(known.get(name), list)]
    of_layers.append(_shared_blocks(known, depth))
    first_reusing = _first_reusing(known, depth)
    of_layers.append([layer >= first_reusing for layer in range(depth)])
    dense = known.get("mlp_only_layers")
    if isinstance(dense, list):  # the others have experts
        of_layers.append([layer in dense for layer in range(depth)])
    sparsity = known.get("activation_sparsity_pattern")
    if isinstance(sparsity, list):  # how much of its MLP a layer leaves out
        of_layers.append([share > 0 for share in sparsity])
    kinds = list(zip(*of_layers, strict=False))

    # The first of each kind, but the last of a kind that reuses keys and values. The last layer of Gemma 4 has to
    # attend to all tokens, and it reuses keys and values where layers do.
    reusing = {kind: layer for layer, kind in enumerate(kinds) if layer >= first_reusing}
    kept = [0, 1] if not kinds else sorted({reusing.get(kind, kinds.index(kind)) for kind in kinds} | {0})
    kept = kept if len(kept) > 1 else [0, 1]
    return [layer for layer in kept if layer < depth]


def _keep_layers(small, known: dict, depth: int, kept: list[int]) -> None:
    """Set the fields of `small` that speak of layers, for the layers in `kept`."""
    for name in _PER_LAYER:
        if isinstance(known.get(name), list) and len(known[name]) == depth:
            setattr(small, name, [known[name][layer] for layer in kept])
    dense = known.get("mlp_only_layers")
    if isinstance(dense, list):
        small.mlp_only_layers = [i for i, layer in enumerate(kept) if layer in dense]
    for name in _DEPTHS:
        if isinstance(known.get(name), int):
            setattr(small, name, len(kept))
    first_reusing = _first_reusing(known, depth)
    if first_reusing < depth:
        small.num_kv_shared_layers = sum(layer >= first_reusing for layer in kept)
    if isinstance(known.get("hybrid_layer_ids"), list):
        small.hybrid_layer_ids = [i for i, kind in enumerate(small.layers_block_type) if kind == "hybrid"]
    _keep_attention(small, known)


def _state_heads(known: dict) -> dict[str, int]:
    """Return sizes for the heads of a state space layer, which together are `expand` times as wide as the model."""
    if isinstance(known.get("mamba_d_ssm"), int):  # a width of their own
        return {}
    for heads, width, expand in _STATE_HEADS:
        if all(isinstance(known.get(name), int) for name in (heads, width, expand)):
            return {width: _HEAD_DIM, heads: known[expand] * _WIDTH // _HEAD_DIM}
    return {}


def _wide_heads(known: dict) -> dict[str, int]:
    """Return sizes for attention that is wider than the model by a factor. Zamba's attends to its embeddings too."""
    wide, width = known.get("attention_hidden_size"), known.get("hidden_size")
    if not isinstance(wide, int) or not isinstance(width, int):
        return {}
    small_wide = wide * _WIDTH // width
    heads = {"attention_head_dim": small_wide // _HEADS} if isinstance(known.get("attention_head_dim"), int) else {}
    return {"attention_hidden_size": small_wide} | heads


def _shared_blocks(known: dict, depth: int) -> list[int]:
    """Number the layers so that enough hybrid layers are kept for two of them to share their weights."""
    kinds, blocks = known.get("layers_block_type"), known.get("num_mem_blocks") or 1
    if not isinstance(kinds, list):
        return [0] * depth
    places = [kinds[:layer].count("hybrid") if kind == "hybrid" else 0 for layer, kind in enumerate(kinds)]
    return [min(place, blocks) for place in places]


def _keep_attention(small, known: dict) -> None:
    """Make the second layer one that attends, where fields other than a list of kinds say which layers do."""
    if known.get("attn_layer_indices"):
        small.attn_layer_indices = [1]
    if isinstance(known.get("attn_layer_period"), int):
        small.attn_layer_period, small.attn_layer_offset = 2, 1


def _quotient(a, b) -> int | None:
    return a // b if isinstance(a, int) and isinstance(b, int) else None


def _plain_rope(config, head_dim: int | None) -> None:
    """Replace rotary parameters with lists of factors by the default ones: the lists fit the real `head_dim` only."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = vars(config).get(name)  # not getattr, because newer configs have the old name as an alias that warns
        if isinstance(rope, dict):
            # Queries are scaled by a function of position // this number. With 4, positions in a proof reach it.
            scaled = {"original_max_position_embeddings": 4} if "llama_4_scaling_beta" in rope else {}
            setattr(config, name, _without_lists(rope) | _sections(rope, head_dim) | scaled)


def _sections(rope: dict, head_dim: int | None) -> dict[str, list[int]]:
    """Split the frequencies of a small head among the three positions of an image."""
    section = rope.get("mrope_section")
    if not section or not head_dim:
        return {}
    half = sum(section) * _HEAD_DIM // head_dim
    first, second = (half * part // sum(section) for part in section[:2])
    return {"mrope_section": [first, second, half - first - second]}


def _without_lists(rope: dict) -> dict:
    """Return rotary parameters without lists, also if there is a dict of them for each kind of layer."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {name: _without_lists(value) if isinstance(value, dict) else value for name, value in rope.items()}
    if not any(isinstance(value, list) for value in rope.values()):
        return rope
    kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    return {"rope_type": "default"} | kept


def small_copy(module, seed: int, attention: str = "sdpa"):
    """Return a small model of the class of `module`, which has a `config`, in fp32 and training mode on the CPU.

    Raises:
        ValueError: Its config has sizes that are not known here, so that the copy would not be small.
    """
    config = small_config(module.config)
    with set_zero3_state():  # under ZeRO-3, models built outside of this context are divided among the ranks
        return drawn(
            lambda: own_class(module)._from_config(config, attn_implementation=attention, dtype=torch.float32), seed
        )


def drawn(build: Callable[[], nn.Module], seed: int):
    """Return the model of `build` on the CPU, in training mode, with random weights. ValueError if it is not small."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build().parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(f"a small copy of it would have {size:,} parameters; its config has sizes that are not known")
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed the GPUs of the user as well
    with torch.device("cpu"):
        model = build()
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        # With transformers' initial weights, attention would be nearly the same everywhere, and hide an error.
        for name, parameter in model.named_parameters():
            random = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
            norm = "norm" in name and parameter.ndim == 1
            parameter.copy_(1 + 0.1 * random if norm else 2 * random / max(1, parameter.shape[-1]) ** 0.5)
    return model.train()
