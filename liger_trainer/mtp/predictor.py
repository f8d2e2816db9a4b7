"""The MTP head of a checkpoint, on the model's own classes.

With h_t the input of the LM head at token t and e(x) the model's embedding of token x:

    f_t = fc([pre_fc_norm_embedding(e(x_{t+1})), pre_fc_norm_hidden(h_t)])
    logits = LM head(norm(layer(f)_t))                      a guess at token t + 2

The layer is a decoder layer with full attention, at the positions of t. Embedding and LM head are the model's. For
further tokens, servers call the head again with its own output (`rollout.py`).

The head is an instance of the model's own backbone class with one layer, so masks, packed rows, rotary angles and norms
work as in the model. It is the model's child `mtp`, and is saved with it under the names of the base (`names.py`). If
the model is not saved, the head goes to `mtp.safetensors`: next to an adapter, for `liger-trainer merge`, or alone,
trained on the frozen model, for `liger-trainer export`.
"""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from liger_trainer.base_weights.shards import StoredTensor, tensors_of
from liger_trainer.base_weights.unloaded import Base, find_checkpoint
from liger_trainer.head.flat_rows import FlatRows
from liger_trainer.head.module import innermost
from liger_trainer.mtp.names import ATTRIBUTE, copies_of, find_names, name_as_in_files
from liger_trainer.varlen.rows import NotForRows, Rows, use_rows

FILE = "mtp.safetensors"  # in an output_dir without the whole model
BASE_MODEL = "base_model_name_or_path"  # key in the metadata of FILE
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}  # by safetensors' names


def load_predictor(model: Any, base: Base) -> nn.Module:
    """Load the MTP head of `base`, and make it the trainable child `mtp` of `model`.

    `model.state_dict()` has it under the names of the checkpoint.

    Args:
        model (`PreTrainedModel`): The model. Its class does not load the head.
        base (`Base`): The checkpoint that the model was loaded from.

    Returns:
        `nn.Module`: The head. `predict` runs it.

    Raises:
        ValueError: The checkpoint has no head of a known form or several layers of it, or the model's classes have no
            such parts.
    """
    names = find_names(base)
    stored = {name: tensor for name, tensor in base.tensors.items() if name.startswith(names.prefix)}
    for name in names.copies:
        del stored[names.prefix + name]
    predictor = _empty(model, names.is_layer)
    own = predictor.state_dict()
    wanted = names.to_file({name: tensor.to("meta") for name, tensor in own.items()})
    differing = sorted(wanted.keys() ^ stored.keys())
    if differing:
        where = "the checkpoint lacks" if differing[0] in wanted else f"{type(predictor).__name__} lacks"
        raise ValueError(
            f"{where} {differing[0]}, so this form of MTP head is not supported ({len(differing)} names differ)."
        )
    for name, tensor in wanted.items():
        if tuple(tensor.shape) != stored[name].shape:
            raise ValueError(f"{name} is {stored[name].shape} in {base.folder}; expected {tuple(tensor.shape)}.")
    with torch.no_grad():
        names.fill(own, _read(stored))
    setattr(model, ATTRIBUTE, predictor)
    predictor.names_in_files = names
    name_as_in_files(model, names)
    return predictor


def head_of(model: Any) -> nn.Module | None:
    """Return the head that `load_predictor` has made a child of `model`, or None."""
    predictor = getattr(model, ATTRIBUTE, None)
    return predictor if hasattr(predictor, "names_in_files") else None


def _read(stored: dict[str, StoredTensor]) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted({tensor.file for tensor in stored.values()}):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                if name in stored:
                    found[name] = tensors.get_tensor(name)
    return found


def load_head(predictor: Any, checkpoint: str) -> None:
    """Read the head from the checkpoint of a whole model. ValueError if it has another head, or none."""
    names = predictor.names_in_files
    base = find_checkpoint(checkpoint)
    stored = {name: tensor for name, tensor in base.tensors.items() if name.startswith(names.prefix)}
    own = predictor.state_dict()
    missing = sorted(names.to_file({name: tensor.to("meta") for name, tensor in own.items()}).keys() - stored.keys())
    if missing:
        raise ValueError(f"{checkpoint} lacks {missing[0]}, so no MTP head was trained in that run.")
    with torch.no_grad():
        names.fill(own, _read(stored))


@contextlib.contextmanager
def detached(model: Any) -> Iterator[None]:
    """Within it, `model` is as without its head."""
    predictor = getattr(model, ATTRIBUTE)
    delattr(model, ATTRIBUTE)
    try:
        yield
    finally:
        setattr(model, ATTRIBUTE, predictor)


def save_head(model: Any, folder: str) -> None:
    """Write only the head of `model` into `folder`, under the names of the base."""
    predictor = getattr(model, ATTRIBUTE)
    names = predictor.names_in_files
    tensors = names.to_file(predictor.state_dict()) | copies_of(model, names)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, Path(folder, FILE), metadata={"format": "pt", BASE_MODEL: model.name_or_path})


def load_saved_head(predictor: Any, folder: str) -> None:
    """Read what `save_head` has written. ValueError if the folder has no head, or the head of another kind of model."""
    path = Path(folder, FILE)
    if not path.is_file():
        raise ValueError(f"{folder} has no {FILE}, so no MTP head was trained in that run.")
    names = predictor.names_in_files
    own = predictor.state_dict()
    stored = load_file(path)
    for name, tensor in names.to_file({name: tensor.to("meta") for name, tensor in own.items()}).items():
        shape = tuple(stored[name].shape) if name in stored else "missing"
        if shape != tuple(tensor.shape):
            raise ValueError(f"{path}: {name} is {shape}; expected {tuple(tensor.shape)}, so it is for another model.")
    with torch.no_grad():
        names.fill(own, stored)


def saved_head(folder: str) -> dict[str, StoredTensor]:
    """Return the tensors of the head that `save_head` has written into `folder`; empty without one."""
    path = Path(folder, FILE)
    return tensors_of(path) if path.is_file() else {}


def saved_head_as_in(base: dict[str, StoredTensor], folder: str, to: str) -> dict[str, StoredTensor]:
    """Return the tensors of `saved_head(folder)` in the dtypes of `base`, written into the folder `to` if those differ.

    A head is trained in fp32 under autocast, and the tensors of its base may be in 16 bits.
    """
    saved = saved_head(folder)
    casts = {name: _DTYPES[base[name].dtype] for name in saved if name in base and base[name].dtype in _DTYPES}
    if all(name not in casts or tensor.dtype == base[name].dtype for name, tensor in saved.items()):
        return saved
    path = Path(to, FILE)
    tensors = load_file(Path(folder, FILE))
    save_file({name: tensor.to(casts.get(name, tensor.dtype)) for name, tensor in tensors.items()}, path)
    return tensors_of(path)


def _empty(model: Any, is_layer: bool) -> Any:
    """The head with random weights, on the device of the model and in its dtypes.

    With `is_layer` it is a layer beyond the depth, which has experts if the last layer of the model has.
    """
    backbone = model.get_decoder()
    config = copy.deepcopy(model.config.get_text_config(decoder=True))
    size, eps = config.hidden_size, config.rms_norm_eps
    weight = model.get_input_embeddings().weight
    config.num_hidden_layers = 1
    config.layer_types = ["full_attention"]
    if is_layer and hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    if is_layer and getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = config.mlp_layer_types[-1:]
    config.vocab_size = 1  # its embeddings are the model's
    config.pad_token_id = None
    predictor: Any = type(backbone)(config)
    predictor.embed_tokens = None
    predictor.fc = nn.Linear(2 * size, size, bias=False)
    norm_class: Any = type(innermost(backbone.norm))
    predictor.pre_fc_norm_embedding = norm_class(size, eps=eps)
    predictor.pre_fc_norm_hidden = norm_class(size, eps=eps)
    _cast_parameters(predictor, weight.dtype)
    return predictor.to(weight.device)


def _cast_parameters(predictor: Any, dtype: torch.dtype) -> None:
    """Cast parameters to `dtype`, but for the ones that a model loaded in `dtype` has in fp32, such as routers.

    Buffers stay as they are made: rotary frequencies and the bias of a router are too coarse in 16 bit.
    """
    in_fp32: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        in_fp32.update(getattr(predictor, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        in_fp32.update(getattr(predictor, "_keep_in_fp32_modules", None) or ())
    for name, parameter in predictor.named_parameters():
        if not any(f".{part}." in f".{name}." for part in in_fp32):
            parameter.data = parameter.data.to(dtype)


def predict(
    predictor: Any, hidden: torch.Tensor, embedding: torch.Tensor, rows: FlatRows, by_rows: bool = False
) -> torch.Tensor:
    """Return (T, H), the input of the LM head that guesses token t + 2 at token t.

    Args:
        predictor (`nn.Module`): What `load_predictor` returned.
        hidden (`torch.Tensor`): (T, H), the input of the LM head.
        embedding (`torch.Tensor`): (V, H), the weight of the model's embeddings.
        rows (`FlatRows`): The tokens and their documents. The last token of a document gets meaningless numbers.
        by_rows (`bool`, *optional*, defaults to `False`): Attend within each document, as the model does with
            `varlen_attention`. Otherwise, and in layers that cannot, a mask (T, T) keeps documents apart.
    """
    x = joined(predictor, hidden, F.embedding(rows.ids.roll(-1), embedding))
    call = {"inputs_embeds": x.unsqueeze(0), "position_ids": rows.positions.unsqueeze(0), "use_cache": False}
    out = _attend_by_rows(predictor, call, rows) if by_rows else None
    return predictor(**call).last_hidden_state[0] if out is None else out


def joined(predictor: Any, hidden: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
    """Return the input of the head's layer, (T, H), for hidden states and embeddings of the tokens after them."""
    parts = [predictor.pre_fc_norm_embedding(embeds), predictor.pre_fc_norm_hidden(hidden)]
    return predictor.fc(torch.cat(parts, -1))


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
