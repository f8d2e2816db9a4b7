"""Exports heads to a directory that FasterDecoding, TGI and vLLM (up to 0.32) can all read.

medusa_lm_head.safetensors  {k}.{l}.linear.weight, {k}.{l}.linear.bias, untied heads {k}.{L}.weight; k, l from 0
lm_head.safetensors         tied heads only: lm_head.weight (V, H), which vLLM reads from the head directory. It is a
                            separate file, since TGI rejects a head file that has a name of the model too.
config.json                 the keys of all three; no `architectures`, which TGI reads as another kind of draft
"""

import os

import torch
from safetensors.torch import save_file
from torch import nn

from liger_trainer.head.module import innermost, output_head
from liger_trainer.medusa.files import CONFIG_FILE, HEADS_FOLDER, heads_folder, write_heads
from liger_trainer.medusa.heads import MedusaHeads

LM_HEAD_FILE = "lm_head.safetensors"
load_heads = MedusaHeads.from_pretrained


def export_heads(
    heads: MedusaHeads,
    output: str,
    base_model: str,
    lm_head: nn.Module | None = None,
    dtype: torch.dtype | None = None,
) -> str:
    """Write a head directory for servers, and return its path.

    Args:
        heads (`MedusaHeads`): Trained heads.
        output (`str`): The directory, which must be empty or not exist.
        base_model (`str`): Path or name of the served model. TGI loads it by this name.
        lm_head (`nn.Linear`, *optional*): The LM head of that model. Tied heads need it.
        dtype (`torch.dtype`, *optional*): The dtype of the tensors in the files. Unset: unchanged.

    Raises:
        ValueError: `output` is not empty, or servers would compute something else: tied heads on an LM head with a
            bias or an adapter.
    """
    config = heads.config
    if os.path.isdir(output) and os.listdir(output):
        raise ValueError(f"output is {output!r}, which is not empty; servers read every file there. Give a new one.")
    reason = _tied_head_reason(heads, lm_head) if config.tied else None
    if reason is not None:
        raise ValueError(reason)
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in heads.state_dict().items()}
    # No other key may have "num" and "heads", or "num" and "layers", in its name: vLLM reads any such key as the number
    # of heads or layers. By default (medusa_fc_bias: false) vLLM silently drops the biases.
    values = config.to_dict() | {
        "base_model_name_or_path": base_model,
        "model_type": "medusa",
        "medusa_fc_bias": True,
        "original_lm_head": config.tied,
        "truncated_vocab_size": config.vocab_size,
    }
    write_heads(output, values, tensors)
    if lm_head is not None and config.tied:
        weight = lm_head.weight.detach().to("cpu", dtype or heads[0][0].linear.weight.dtype).contiguous().clone()
        save_file({"lm_head.weight": weight}, os.path.join(output, LM_HEAD_FILE), metadata={"format": "pt"})
    return output


def _tied_head_reason(heads: MedusaHeads, lm_head: nn.Module | None) -> str | None:
    config = heads.config
    if lm_head is None:
        return "lm_head is None, but the heads are tied and vLLM reads the LM head from their directory. Pass lm_head."
    if hasattr(lm_head, "base_layer"):
        return "The LM head has an adapter. Merge it into the model (merge_and_unload), save that, and export with it."
    if lm_head.bias is not None:
        return "The LM head has a bias, which TGI and vLLM ignore. Train heads with medusa_tied: false."
    if tuple(lm_head.weight.shape) != (config.vocab_size, config.hidden_size):
        return (
            f"The LM head of the model is {tuple(lm_head.weight.shape)}, but the heads were trained on "
            f"{(config.vocab_size, config.hidden_size)}. Give the model that they were trained on."
        )
    return None


def lm_head_of(model: nn.Module) -> nn.Module:
    """Return the LM head of a transformers or PEFT model, for `export_heads`."""
    return innermost(output_head(model))


def served_model(checkpoint: str, heads: MedusaHeads) -> str:
    """Return the model to serve with the heads of `checkpoint`.

    After stage 2 it is the trained model in the checkpoint, after stage 1 the model that the heads were trained on.

    Raises:
        ValueError: The model is not known, or it is an adapter, which has to be merged first.
    """
    root = os.path.abspath(checkpoint)
    if os.path.basename(root) == HEADS_FOLDER:
        root = os.path.dirname(root)
    if os.path.isfile(os.path.join(root, "adapter_config.json")):
        raise ValueError(
            f"{checkpoint!r} holds an adapter that the heads were trained with. Merge it into the model "
            "(merge_and_unload), save that, and give its folder as model."
        )
    if os.path.isfile(os.path.join(root, CONFIG_FILE)) and root != os.path.abspath(heads_folder(checkpoint)):
        return root
    if heads.config.base_model_name_or_path is None:
        raise ValueError(f"The heads in {checkpoint!r} do not say what model they were trained on. Give it as model.")
    return heads.config.base_model_name_or_path
