"""Exported Medusa heads as servers read them.

The readers follow the servers' code: FasterDecoding/Medusa e2a5d20, text-generation-inference db931fc, and vLLM 0.32,
whose class gave the same logits when it was tried. No server runs here.
"""

import json

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


def read(folder):
    """config.json, the tensors in the file that FasterDecoding and TGI open, and those in all safetensors files."""
    config = json.loads((folder / "config.json").read_text())
    everything = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        assert not everything.keys() & tensors.keys()
        everything |= tensors
    return config, load_file(folder / "medusa_lm_head.safetensors"), everything


def block(x, weight, bias):
    return x + F.silu(F.linear(x, weight, bias))


def tgi(folder, x, lm_head, num_speculate):
    """Heads with their own projection; if those are incomplete, one block per head on the model's LM head."""
    config, tensors, _ = read(folder)
    assert "architectures" not in config, "with it TGI takes the directory for a draft of another kind"
    assert not {"lm_head.weight", "model.embed_tokens.weight"} & tensors.keys(), "TGI: found in multiple files"
    layers = config["medusa_num_layers"]
    if all(f"{k}.{layers}.weight" in tensors for k in range(num_speculate)):
        project = [tensors[f"{k}.{layers}.weight"] for k in range(num_speculate)]
    else:
        assert layers == 1
        project = [lm_head] * num_speculate
    logits = []
    for k in range(num_speculate):
        y = x
        for layer in range(layers):
            y = block(y, tensors[f"{k}.{layer}.linear.weight"], tensors[f"{k}.{layer}.linear.bias"])
        logits.append(y @ project[k].T)
    return torch.stack(logits)


def vllm(folder, x):
    """Parameters as the config sizes them. Unknown tensors are dropped; a parameter without tensor keeps its memory."""
    config, _, tensors = read(folder)
    assert config["model_type"] == "medusa"
    shape = {}
    for key, value in config.items():
        if "num" in key and ("heads" in key or "layers" in key):
            name = "heads" if "heads" in key else "layers"
            assert name not in shape, f"{key} is a second key that vLLM takes for the number of {name}"
            shape[name] = value
    tensors = {renamed(name, shape["layers"]): tensor for name, tensor in tensors.items()}
    logits = []
    for k in range(shape["heads"]):
        y = x
        for layer in range(shape["layers"]):
            name = f"blocks.{k}.layers.{layer}"
            bias = tensors[f"{name}.bias"] if config.get("medusa_fc_bias", False) else None
            y = block(y, tensors[f"{name}.weight"], bias)
        shared = config.get("original_lm_head", False)
        project = tensors["lm_head.weight"] if shared else tensors[f"lm_heads.{k}.weight"]
        assert project.shape == (config["truncated_vocab_size"], config["hidden_size"])
        logits.append(y @ project.T)
    assert config["truncated_vocab_size"] == config["vocab_size"], "else vLLM wants a token_map"
    return torch.stack(logits)


def renamed(name, layers):
    k, _, rest = name.partition(".")
    if not k.isdigit():
        return name
    layer, _, rest = rest.partition(".")
    return f"lm_heads.{k}.weight" if int(layer) == layers else f"blocks.{k}.layers.{layer}.{rest.split('.')[-1]}"
