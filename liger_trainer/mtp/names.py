"""The names of an MTP head in files, and in the module that trains it.

Two forms are supported. Both may store experts one by one, while transformers' classes hold them in one tensor.

    module                              mtp.*, as in Qwen3.5                  model.layers.N.*, as in DeepSeek and GLM
    pre_fc_norm_embedding.weight        mtp.pre_fc_norm_embedding.weight      model.layers.N.enorm.weight
    pre_fc_norm_hidden.weight           mtp.pre_fc_norm_hidden.weight         model.layers.N.hnorm.weight
    fc.weight (H, 2 H)                  mtp.fc.weight                         model.layers.N.eh_proj.weight
    norm.weight                         mtp.norm.weight                       model.layers.N.shared_head.norm.weight
    layers.0.*                          mtp.layers.0.*                        model.layers.N.*
    layers.0.mlp.experts.gate_up_proj   ...experts.E.gate_proj.weight, ...experts.E.up_proj.weight, for each expert E
    layers.0.mlp.experts.down_proj      ...experts.E.down_proj.weight

N is the depth of the model. Layer N also has copies of the embeddings and the LM head, `embed_tokens.weight` and
`shared_head.head.weight`. The module uses the model's own, and copies of them are saved.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_trainer.base_weights.unloaded import SIXTEEN_BITS_OR_MORE, Base

ATTRIBUTE = "mtp"  # of the model
_PREFIX = f"{ATTRIBUTE}."
_OF_A_LAYER = {
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "fc.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
_LAYER = re.compile(r"^(?P<prefix>.*\blayers\.)(?P<number>\d+)\.eh_proj\.weight$")
_OWN_LAYER = re.compile(rf"^{re.escape(_PREFIX)}layers\.\d+\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_ONE_LAYER = (
    "but only heads of one layer are supported: each further layer guesses a token further ahead. "
    "Without training, all of them are saved unchanged."
)


class HeadNames(NamedTuple):
    """How a checkpoint names the tensors of its head.

    Attributes:
        prefix (`str`): Starts every name: `mtp.`, or `model.layers.N.`.
        is_layer (`bool`): Whether the head is stored as layer N, after the model's own layers.
        splits_experts (`bool`): Whether experts are stored one by one.
        copies (`tuple`): The names of the copies of embeddings and LM head, without the prefix.
    """

    prefix: str
    is_layer: bool = False
    splits_experts: bool = False
    copies: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        """Return whether the module has the same names, as a child `mtp` of the model."""
        return not self.is_layer and not self.splits_experts

    def to_file(self, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of the module by their full names in a file, without the copies."""
        found = {}
        for name, tensor in own.items():
            behind = name
            if self.is_layer:
                behind = _OF_A_LAYER.get(name, name.removeprefix("layers.0."))
            for part, x in self._parts(behind, tensor):
                found[self.prefix + part] = x
        return found

    def _parts(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return `name` and `tensor`, or the names and tensors of each expert."""
        before, _, last = name.rpartition(".")
        if not self.splits_experts or not before.endswith(".experts"):
            return [(name, tensor)]
        parts = []
        for e, expert in enumerate(tensor):
            if last == "gate_up_proj":
                gate, up = expert.chunk(2)
                named = {"gate_proj": gate, "up_proj": up}
            else:
                named = {last: expert}
            for projection, x in named.items():
                # A file must not have views of one tensor.
                parts.append((f"{before}.{e}.{projection}.weight", x.clone(memory_format=torch.contiguous_format)))
        return parts

    def fill(self, own: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
        """Copy the tensors of a file, given by their full names, into the tensors of the module."""
        for name, tensor in own.items():
            places = self.to_file({name: torch.empty_like(tensor, device="meta")})
            parts = [stored[place] for place in places]
            if len(parts) == 1 and parts[0].shape == tensor.shape:
                tensor.copy_(parts[0])
                continue
            each = len(parts) // len(tensor)
            for e in range(len(tensor)):
                tensor[e].copy_(torch.cat(parts[e * each : (e + 1) * each]))


def find_names(base: Base) -> HeadNames:
    """Return how `base` names its head. ValueError if it has several layers, no head of a known form, or a quantized
    one."""
    predicts = base.predicts
    own = [name for name in base.tensors if name.startswith(_PREFIX)]
    if own:
        matches = [_OWN_LAYER.match(name) for name in own]
        _check_one_layer(base, sorted({match[0] for match in matches if match is not None}))
        _check_not_quantized(base, own)
        return HeadNames(_PREFIX, splits_experts=any(_EXPERT.search(name) for name in own))
    layers = [name.removesuffix("eh_proj.weight") for name in predicts if _LAYER.match(name)]
    _check_one_layer(base, layers)
    if not layers:
        reason = base.unread or f"{base.folder} has no tensors mtp.* and no layer beyond the depth with an eh_proj"
        raise ValueError(f"{reason}: only these two forms of MTP heads are supported.")
    of_layer = [name for name in predicts if name.startswith(layers[0])]
    _check_not_quantized(base, of_layer)
    behind = [name.removeprefix(layers[0]) for name in of_layer]
    splits = any(_EXPERT.search(f".{name}") for name in behind)
    return HeadNames(layers[0], True, splits, tuple(name for name in _COPIES if name in behind))


def _check_one_layer(base: Base, layers: list[str]) -> None:
    """ValueError if the config or the tensors of `base` have several layers. `layers` are the prefixes of its layers.

    Servers run layer k for guess k only. A head that runs all layers for each guess would be another function, and a
    chain of layers needs a loss for each of them.
    """
    counts = base.prediction_counts
    named = ", ".join(f"{layer}*" for layer in layers)
    for name, count in counts.items():
        if count > 1:
            its_layers = f", with the layers {named}" if layers else ""
            raise ValueError(f"{name} is {count} in {base.folder / 'config.json'}{its_layers}, {_ONE_LAYER}")
    if len(layers) > 1:
        fields = ", ".join(f"{name}: {count}" for name, count in counts.items()) or "no count of them"
        raise ValueError(
            f"{base.folder} has {len(layers)} prediction layers, {named}, and {fields} in its config.json, {_ONE_LAYER}"
        )


def _check_not_quantized(base: Base, names: list[str]) -> None:
    """ValueError if a matrix of the head is stored in fewer than 16 bits, as in DeepSeek-V3's own files."""
    for name in names:
        tensor = base.tensors[name]
        if len(tensor.shape) > 1 and tensor.dtype not in SIXTEEN_BITS_OR_MORE:
            raise ValueError(
                f"{name} is quantized ({tensor.dtype}) in {base.folder}, but only heads in 16 bits or more are "
                "trained. Dequantize the checkpoint first."
            )


def name_as_in_files(model: nn.Module, names: HeadNames) -> None:
    """Make `model.state_dict()` and `load_state_dict` use the names of the base's files for the head."""
    if names.is_own:
        return
    model.register_state_dict_post_hook(_Renamed(names))
    model.register_load_state_dict_pre_hook(_NamedBack(names))


@dataclass
class _Renamed:
    """A hook of `state_dict`. It is a class, so that a model with it can be pickled; torch sets an attribute of it."""

    names: HeadNames

    def __call__(self, model: Any, state: dict[str, torch.Tensor], prefix: str, _: Any) -> None:
        before = prefix + _PREFIX
        own = {name.removeprefix(before): state.pop(name) for name in list(state) if name.startswith(before)}
        if not own:  # the head is detached
            return
        for name, tensor in self.names.to_file(own).items():
            state[prefix + name] = tensor
        for name, tensor in copies_of(model, self.names).items():
            state[prefix + name] = tensor


@dataclass
class _NamedBack:
    """A hook of `load_state_dict`."""

    names: HeadNames

    def __call__(self, model: Any, state: dict[str, torch.Tensor], prefix: str, *_: Any) -> None:
        stored = {}
        for name in list(state):
            if name.startswith(prefix + self.names.prefix):
                stored[name.removeprefix(prefix)] = state.pop(name)
        if not stored:
            return
        own = {name: torch.empty_like(t, device="cpu") for name, t in getattr(model, ATTRIBUTE).state_dict().items()}
        self.names.fill(own, stored)
        for name, tensor in own.items():
            state[prefix + _PREFIX + name] = tensor


def copies_of(model: Any, names: HeadNames) -> dict[str, torch.Tensor]:
    """Return the copies of embeddings and LM head that layer N stores, by their full names."""
    found = {}
    for name in names.copies:
        source = model.get_input_embeddings() if name == _COPIES[0] else model.get_output_embeddings()
        found[names.prefix + name] = source.weight.detach().clone()
    return found
