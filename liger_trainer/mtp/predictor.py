"""Loads and runs the MTP head of a checkpoint with tensors `mtp.*`, such as Qwen3.5's, with the model's own classes.

With h_t the input of the LM head at token t and e(x) the model's embedding of token x:

    f_t = fc([pre_fc_norm_embedding(e(x_{t+1})), pre_fc_norm_hidden(h_t)])
    logits = LM head(norm(layers(f)_t))                     a guess at token t + 2

The layers are decoder layers with full attention, at the positions of t. Embedding and LM head are the model's. For
further tokens, servers call the head again with its own output.

The head is an instance of the model's backbone class with as many layers as the checkpoint has. So masks, packed rows,
rotary angles and norms work as in the model. It is the model's attribute `mtp`, and is saved with the model under the
names of the base. If only an adapter is saved, the head is saved next to it in `mtp.safetensors`, which
`liger-trainer merge` reads.
"""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from liger_trainer.base_weights.shards import StoredTensor, tensors_of
from liger_trainer.base_weights.unloaded import Base
from liger_trainer.head.flat_rows import FlatRows
from liger_trainer.varlen.rows import NotForRows, Rows, use_rows

ATTRIBUTE = "mtp"  # of the model, and the first part of the tensor names
FILE = "mtp.safetensors"  # in the folder of an adapter
_PREFIX = f"{ATTRIBUTE}."


def load_predictor(model: Any, base: Base) -> nn.Module:
    """Load the MTP head of `base`, and make it the trainable child `mtp` of `model`.

    Args:
        model (`PreTrainedModel`): The model. Its class does not load the head.
        base (`Base`): The checkpoint that the model was loaded from.

    Returns:
        `nn.Module`: The head. `predict` runs it.

    Raises:
        ValueError: The checkpoint has no tensors `mtp.*`, or they do not fit the model's classes.
    """
    tensors = {name: tensor for name, tensor in base.tensors.items() if name.startswith(_PREFIX)}
    if not tensors:
        reason = base.unread or f"{base.folder} has no tensors {_PREFIX}*"
        raise ValueError(
            f"train_mtp is true, but {reason}. Only MTP heads of that name are supported, such as Qwen3.5's. Remove "
            "train_mtp."
        )
    predictor = _empty(model)
    parameters = {_PREFIX + name: tensor for name, tensor in predictor.state_dict().items()}
    differing = sorted(parameters.keys() ^ tensors.keys())
    if differing:
        where = "the checkpoint lacks" if differing[0] in parameters else "the model's classes lack"
        raise ValueError(f"train_mtp is true, but {where} {differing[0]}, so this is another kind of head. Remove it.")
    for name, tensor in parameters.items():
        if tuple(tensor.shape) != tensors[name].shape:
            raise ValueError(f"{name} is {tensors[name].shape} in {base.folder}; expected {tuple(tensor.shape)}.")
    with torch.no_grad():
        for file in sorted({tensor.file for tensor in tensors.values()}):
            with safe_open(file, "pt") as stored:
                for name in stored.keys():
                    if name in parameters:
                        parameters[name].copy_(stored.get_tensor(name))
    setattr(model, ATTRIBUTE, predictor)
    return predictor


def save_with_adapter(predictor: nn.Module, folder: str) -> None:
    """Write the head into the folder of an adapter, under the names of the base."""
    tensors = {_PREFIX + name: t.detach().cpu().contiguous() for name, t in predictor.state_dict().items()}
    save_file(tensors, Path(folder, FILE), metadata={"format": "pt"})


def load_with_adapter(predictor: nn.Module, folder: str) -> None:
    """Load the head that `save_with_adapter` has saved. ValueError if the folder has none."""
    path = Path(folder, FILE)
    if not path.is_file():
        raise ValueError(f"train_mtp is true, but {folder} was trained without it and has no {FILE}. Remove train_mtp.")
    predictor.load_state_dict({name.removeprefix(_PREFIX): t for name, t in load_file(path).items()})


def saved_with_adapter(adapter: str) -> dict[str, StoredTensor]:
    """Return the tensors of the head that was saved with the adapter in the folder `adapter`; empty without one."""
    path = Path(adapter, FILE)
    return tensors_of(path) if path.is_file() else {}


def _empty(model: Any) -> nn.Module:
    """Return a head with random weights, with the device and dtype of the model."""
    backbone = model.get_decoder()
    config = copy.deepcopy(model.config.get_text_config(decoder=True))
    depth = getattr(config, "mtp_num_hidden_layers", None) or 1
    size, eps = config.hidden_size, config.rms_norm_eps
    weight = model.get_input_embeddings().weight
    config.num_hidden_layers = depth
    config.layer_types = ["full_attention"] * depth
    config.vocab_size = 1  # its embeddings are the model's
    config.pad_token_id = None
    predictor: Any = type(backbone)(config)
    predictor.embed_tokens = None
    predictor.fc = nn.Linear(2 * size, size, bias=False)
    predictor.pre_fc_norm_embedding = type(backbone.norm)(size, eps=eps)
    predictor.pre_fc_norm_hidden = type(backbone.norm)(size, eps=eps)
    return predictor.to(weight.device, weight.dtype)


def predict(
    predictor: Any, hidden: torch.Tensor, embedding: torch.Tensor, rows: FlatRows, by_rows: bool = False
) -> torch.Tensor:
    """Return (T, H), the input of the LM head from which token t + 2 is guessed at token t.

    Args:
        predictor (`nn.Module`): What `load_predictor` returned.
        hidden (`torch.Tensor`): (T, H), the input of the LM head.
        embedding (`torch.Tensor`): (V, H), the weight of the model's embeddings.
        rows (`FlatRows`): The tokens and their documents. The last token of a document gets meaningless numbers.
        by_rows (`bool`, *optional*, defaults to `False`): Attend within each document, as the model does with
            `varlen_attention`. Otherwise, and in layers that cannot, a mask (T, T) keeps documents apart.
    """
    embeds = predictor.pre_fc_norm_embedding(F.embedding(rows.ids.roll(-1), embedding))
    x = predictor.fc(torch.cat([embeds, predictor.pre_fc_norm_hidden(hidden)], -1))
    call = {"inputs_embeds": x.unsqueeze(0), "position_ids": rows.positions.unsqueeze(0), "use_cache": False}
    out = _attend_by_rows(predictor, call, rows) if by_rows else None
    return predictor(**call).last_hidden_state[0] if out is None else out


def _attend_by_rows(predictor: Any, call: dict[str, Any], rows: FlatRows) -> torch.Tensor | None:
    """The result of `predict`, or None if a layer did not attend by rows, as the report of the model says."""
    embeds = call["inputs_embeds"]
    # A mask of ones, since without one transformers looks for rows in the values of position_ids, and waits.
    mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
    known = Rows(rows.lengths, embeds.device)
    try:
        with use_rows(known):
            outputs = predictor(**call, attention_mask=mask)
    except NotForRows:
        return None
    # With an attention function of the user's, nothing has asked for the rows, and documents have seen each other.
    return outputs.last_hidden_state[0] if known.attention_kinds else None
