"""Exports a drafter for servers: the files of `files.py`, with the target's layers and name in the config."""

import os
from dataclasses import replace

import torch

from liger_trainer.eagle.files import read_drafter, write_drafter


def export_drafter(checkpoint: str, output: str, base_model: str | None, dtype: torch.dtype | None = None) -> str:
    """Write the drafter of `checkpoint` into the folder `output`, and return the name of its model.

    Args:
        checkpoint (`str`): The output_dir of a training, a checkpoint in it, or a folder with a drafter.
        output (`str`): The directory, which must be empty or not exist.
        base_model (`str`, *optional*): Path or name of the served model. Unset: the one in the config.
        dtype (`torch.dtype`, *optional*): The dtype of the weights in the file. Unset: the target's for weights in
            fp32, as a training under autocast has them, since SGLang would run such a file in fp16. Other weights are
            unchanged, bit for bit.

    Raises:
        ValueError: `output` is not empty, the drafter is missing, or its config does not name its model.
    """
    if os.path.isdir(output) and os.listdir(output):
        raise ValueError(f"output is {output!r}, which is not empty; servers read every file there. Give a new one.")
    config, tensors = read_drafter(checkpoint)
    base_model = base_model or config.base_model_name_or_path
    if base_model is None:
        raise ValueError(f"The drafter in {checkpoint!r} does not say what model it was trained on. Give it as model.")
    if dtype is None and config.target_dtype is not None and tensors["fc.weight"].dtype == torch.float32:
        dtype = getattr(torch, config.target_dtype)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.to(dtype)
    write_drafter(output, replace(config, base_model_name_or_path=base_model), tensors)
    return base_model
