"""Reads and writes the directory of heads: `config.json` with their shape, and `medusa_lm_head.safetensors`.

Tensors have the names of FasterDecoding's checkpoints: `{k}.{l}.linear.weight`, `{k}.{l}.linear.bias`, and for untied
heads `{k}.{L}.weight`, with k and l from 0. vLLM's names can be read too.
"""

import json
import os
import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HEADS_FOLDER = "medusa_heads"  # in the output directory and in every checkpoint of the trainer
WEIGHTS_FILE = "medusa_lm_head.safetensors"
CONFIG_FILE = "config.json"
_LAYER = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
_PROJECTION = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.weight")
_VLLM_LAYER = re.compile(r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_VLLM_PROJECTION = re.compile(r"(?:medusa_heads\.)?lm_heads\.(\d+)\.weight")
_KEYS = {"num_heads": "medusa_num_heads", "num_layers": "medusa_num_layers", "tied": "medusa_tied"}


@dataclass(frozen=True)
class MedusaHeadsConfig:
    """The shape of the heads, as in the `config.json` next to their weights. ValueError for a number out of range."""

    num_heads: int  # K; key in the file: medusa_num_heads
    num_layers: int  # L, the residual blocks of each head; key: medusa_num_layers
    tied: bool  # whether the heads project with the LM head of the model; key: medusa_tied
    hidden_size: int  # H, the input width of the LM head
    vocab_size: int  # V, the rows of the LM head
    base_model_name_or_path: str | None = None  # the model that the heads were trained on

    def __post_init__(self) -> None:
        check_shape(self.num_heads, self.num_layers, self.tied)

    def to_dict(self) -> dict[str, Any]:
        """Return the values under the keys of the file."""
        return {_KEYS.get(name, name): value for name, value in asdict(self).items()}


def check_shape(num_heads: int, num_layers: int, tied: bool) -> None:
    """ValueError if a number is out of range, or if the heads would have nothing to train."""
    if num_heads < 1:
        raise ValueError(f"medusa_num_heads is {num_heads}; expected 1 or more.")
    if num_layers < 0:
        raise ValueError(f"medusa_num_layers is {num_layers}; expected 0 or more.")
    if tied and num_layers == 0:
        raise ValueError(
            "medusa_num_layers is 0 and medusa_tied is true, so there is nothing to train. Set medusa_num_layers to 1 "
            "or more, or medusa_tied to false."
        )


def _candidates(folder: str) -> list[str]:
    """Return the head directories among `folder` itself and the subfolder that training writes."""
    both = (os.fspath(folder), os.path.join(folder, HEADS_FOLDER))
    return [candidate for candidate in both if os.path.isfile(os.path.join(candidate, WEIGHTS_FILE))]


def has_heads(folder: str) -> bool:
    """Return whether `heads_folder` finds Medusa heads."""
    return bool(_candidates(folder))


def heads_folder(folder: str) -> str:
    """Return `folder` if it is a head directory, or else the head directory in it. ValueError without one."""
    for candidate in _candidates(folder):
        return candidate
    raise ValueError(
        f"{os.fspath(folder)!r} has neither {WEIGHTS_FILE} nor {HEADS_FOLDER}/{WEIGHTS_FILE}. Give the output_dir of a "
        "Medusa training, or the folder of its heads."
    )


def write_heads(folder: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write the two files, and create the folder if needed."""
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, os.path.join(folder, WEIGHTS_FILE), metadata={"format": "pt"})
    with open(os.path.join(folder, CONFIG_FILE), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)


def read_heads(folder: str) -> tuple[MedusaHeadsConfig, dict[str, torch.Tensor]]:
    """Return the shape of the heads, read from their tensors, and the tensors named as in `MedusaHeads.state_dict()`.

    Raises:
        ValueError: The weights are missing, a tensor is not a head's, or the config contradicts the tensors.
    """
    folder = heads_folder(folder)
    blocks: dict[str, torch.Tensor] = {}
    projections: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(os.path.join(folder, WEIGHTS_FILE)).items():
        layer = _LAYER.fullmatch(name) or _VLLM_LAYER.fullmatch(name)
        if layer:
            blocks[f"{layer[1]}.{layer[2]}.linear.{layer[3]}"] = tensor
            continue
        projection = _PROJECTION.fullmatch(name) or _VLLM_PROJECTION.fullmatch(name)
        if not projection:
            raise ValueError(f"{os.path.join(folder, WEIGHTS_FILE)}: {name} does not name a part of a Medusa head.")
        projections[projection[1]] = tensor
    num_layers = len({name.split(".")[1] for name in blocks})
    tensors = blocks | {f"{k}.{num_layers}.weight": tensor for k, tensor in projections.items()}

    path = os.path.join(folder, CONFIG_FILE)
    with open(path, encoding="utf-8") as file:
        values = json.load(file)
    vocab_size = next(iter(projections.values())).shape[0] if projections else values.get("vocab_size")
    if vocab_size is None:
        raise ValueError(f"{path} has no vocab_size, and the tensors of tied heads do not show it. Add the model's.")
    config = MedusaHeadsConfig(
        num_heads=len({name.split(".")[0] for name in tensors}),
        num_layers=num_layers,
        tied=not projections,
        hidden_size=next(iter(tensors.values())).shape[-1],
        vocab_size=vocab_size,
        base_model_name_or_path=values.get("base_model_name_or_path"),
    )
    for key, value in config.to_dict().items():
        if values.get(key, value) != value:
            raise ValueError(
                f"{path} says {key}: {values[key]}, but the tensors in {WEIGHTS_FILE} say {value}. Servers go by the "
                "config, so correct it."
            )
    return config, tensors
