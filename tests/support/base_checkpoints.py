"""Tiny bases on disk in the form of real ones.

They have prediction layers that transformers does not load, or MXFP4 experts, or are a GGUF file.
"""

import json
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model, tiny_tokenizer

from liger_trainer.base_weights import shards

# Per model type: the key in config.json that counts its prediction layers, and the names of their weights
KINDS = {
    "qwen3_next": ("mtp_num_hidden_layers", "mtp.layers.0.self_attn.q_proj.weight", "mtp.fc.weight"),
    "qwen3_5_text": ("mtp_num_hidden_layers", "mtp.layers.0.self_attn.q_proj.weight", "mtp.fc.weight"),
    "deepseek_v3": ("num_nextn_predict_layers", "model.layers.2.eh_proj.weight", "model.layers.2.embed_tokens.weight"),
    "glm4_moe": ("num_nextn_predict_layers", "model.layers.2.eh_proj.weight", "model.layers.2.mlp.gate.weight"),
}


def names_of(folder):
    return {name for file in shards.files_of(folder) for name in shards.tensors_of(file)}


def tensor_of(folder, name):
    for file in shards.files_of(folder):
        with safe_open(file, "pt") as tensors:
            if name in tensors.keys():
                return tensors.get_tensor(name)
    raise KeyError(name)


def write_base(folder, kind, dtype=torch.bfloat16, shard_size="50GB"):
    """Write a tiny base whose checkpoint has prediction weights, with its tokenizer. Return these weights."""
    count, *names = KINDS[kind]
    model = tiny_model(kind, **{count: 1})
    model.save_pretrained(folder, max_shard_size=shard_size)
    tiny_tokenizer().save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    extra = {name: torch.randn(6, 32, generator=generator).to(dtype) for name in names}
    if (folder / "model.safetensors").is_file():
        weights = load_file(folder / "model.safetensors")
        save_file(weights | extra, folder / "model.safetensors", {"format": "pt"})
    else:
        save_file(extra, folder / "model-mtp.safetensors", {"format": "pt"})
        index_path = folder / "model.safetensors.index.json"
        index = json.loads(index_path.read_text())
        index["weight_map"] |= dict.fromkeys(extra, "model-mtp.safetensors")
        index_path.write_text(json.dumps(index))
    return extra


def assert_kept(folder, extra):
    for name, tensor in extra.items():
        got = tensor_of(folder, name)
        assert got.dtype == tensor.dtype, name
        assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8)), name


VALUES = [
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
]
KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def packed(weight):
    """Quantise `weight` (E, K, N) to uint8 blocks (E, N, K / 32, 16) and scales (E, N, K / 32), rounding to nearest."""
    w = weight.detach().float().mT.unflatten(-1, (-1, 32))
    exponents = w.abs().amax(-1).div(6).log2().ceil()
    codes = (w / exponents.exp2()[..., None]).unsqueeze(-1).sub(torch.tensor(VALUES)).abs().argmin(-1)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8), (exponents + 127).to(torch.uint8)


def unpacked(blocks, scales):
    """The numbers (E, K, N) in float64."""
    numbers = torch.tensor(VALUES, dtype=torch.float64)
    pairs = torch.stack([numbers[(blocks & 15).long()], numbers[(blocks >> 4).long()]], -1).flatten(-2)
    return (pairs * (scales.double() - 127).exp2()[..., None]).flatten(-2).mT


def write_gpt_oss(folder, **config):
    """Save a gpt-oss with its tokenizer, everything but the experts in bf16. Return the experts' values by name."""
    model = tiny_model("gpt_oss", dtype=torch.bfloat16, hidden_size=64, intermediate_size=32, **config)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    tensors, numbers = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = packed(tensors.pop(name))
        numbers[name] = unpacked(blocks, scales)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(
        json.dumps(
            json.loads(path.read_text())
            | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}}
        )
    )
    return numbers


GGUF_VOCAB = 261


def write_gguf(gguf: Any, path: Any) -> None:
    """A one-layer Llama with a byte-level BPE vocabulary and two merges."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    path.parent.mkdir()
    hidden, heads, inner = 32, 4, 64
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(GGUF_VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "w1", "w2"])
    writer.add_token_types([3, 3, 3] + [1] * 258)
    writer.add_token_merges(["w 1", "w 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (GGUF_VOCAB, hidden), "output": (GGUF_VOCAB, hidden), "output_norm": (hidden,)}
    shapes |= {f"blk.0.attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (inner, hidden), "blk.0.ffn_up": (inner, hidden), "blk.0.ffn_down": (hidden, inner)}
    shapes |= {"blk.0.attn_norm": (hidden,), "blk.0.ffn_norm": (hidden,)}
    torch.manual_seed(0)
    for name, shape in shapes.items():
        writer.add_tensor(
            f"{name}.weight", (torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.1).numpy()
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
