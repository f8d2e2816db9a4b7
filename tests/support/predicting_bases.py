"""Tiny bases whose checkpoint has prediction layers, which transformers does not load."""

import json

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model, tiny_tokenizer

from liger_trainer.base_weights import shards

# Per model type: the key in config.json that counts its prediction layers, and the names of such weights
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
    """A tiny base whose checkpoint has prediction weights, with its tokenizer. Returns these weights."""
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
