"""Exports an MTP head that was trained on the frozen model: the base's files, with this head in place of its own."""

import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from liger_trainer.base_weights.shards import files_of, tensors_of
from liger_trainer.base_weights.unloaded import find_checkpoint
from liger_trainer.mtp.predictor import BASE_MODEL, FILE, saved_head

_COPIED = {".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"}  # config, tokenizer and code


def has_head(checkpoint: str) -> bool:
    """Return whether the folder `checkpoint` has an MTP head in a file of its own."""
    return Path(checkpoint, FILE).is_file()


def is_head_alone(folder: str) -> bool:
    """Return whether `folder` has an MTP head and neither a model nor an adapter, as `LigerMTPTrainer` saves it."""
    return has_head(folder) and not any(Path(folder, name).is_file() for name in ("config.json", "adapter_config.json"))


def base_of(checkpoint: str) -> str | None:
    """Return the name or path of the model that the head in the folder `checkpoint` was trained on."""
    with safe_open(Path(checkpoint, FILE), "pt") as stored:
        metadata = stored.metadata() or {}
    return metadata.get(BASE_MODEL) or None


def export_head(checkpoint: str, output: str, base_model: str) -> int:
    """Write `base_model` with the head of `checkpoint` into the folder `output`, and return the number of its tensors.

    All other tensors stay bit for bit, in the same files. The head gets the dtypes of the base's head.

    Args:
        checkpoint (`str`): The output_dir of a training with `LigerMTPTrainer`, or a checkpoint in it.
        output (`str`): The directory, which must be empty or not exist.
        base_model (`str`): A folder, or a name in the Hub's cache.

    Raises:
        ValueError: `output` is not empty, `base_model` cannot be read, or its head has other names or shapes.
    """
    if os.path.isdir(output) and os.listdir(output):
        raise ValueError(f"output is {output!r}, which is not empty; servers read every file there. Give a new one.")
    base = find_checkpoint(base_model)
    if base.unread is not None:
        raise ValueError(f"The model {base_model!r} cannot be read: {base.unread}. Give its folder as model.")
    head = saved_head(checkpoint)
    for name, tensor in head.items():
        shape = base.tensors[name].shape if name in base.tensors else "missing"
        if shape != tensor.shape:
            raise ValueError(
                f"{name} is {tensor.shape} in {checkpoint} and {shape} in {base_model}, so the head is for another "
                "model. Give that as model."
            )
    trained = load_file(Path(checkpoint, FILE))
    os.makedirs(output, exist_ok=True)
    for path in sorted(base.folder.iterdir()):
        if path.is_file() and path.suffix in _COPIED:
            shutil.copyfile(path, Path(output, path.name))
    for path in files_of(base.folder):
        _write_shard(path, Path(output, path.name), trained)
    return len(head)


def _write_shard(source: Path, target: Path, trained: dict[str, torch.Tensor]) -> None:
    """Copy a file of weights, with the tensors of `trained` in the place of the ones with their names."""
    replaced = trained.keys() & tensors_of(source).keys()
    if not replaced:
        shutil.copyfile(source, target)
        return
    tensors = load_file(source)
    for name in replaced:
        tensors[name] = trained[name].to(tensors[name].dtype).contiguous()
    save_file(tensors, target, {"format": "pt"})
