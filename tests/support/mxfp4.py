"""A tiny gpt-oss on disk as the real one is: experts in MXFP4, blocks of 32 numbers with an exponent each."""

import json

import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model, tiny_tokenizer

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]  # of the 16 codes
KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def packed(weight):
    """(blocks (E, N, K / 32, 16), scales (E, N, K / 32)) in uint8 of `weight` (E, K, N), each number to the nearest."""
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
    """Save such a model with its tokenizer, the rest in bf16. Returns the experts' numbers by their names."""
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
