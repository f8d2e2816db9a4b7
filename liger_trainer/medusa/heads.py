"""The heads themselves, how they hang on a model, and the directory they are saved in.

With h the input of the LM head (the last hidden state, after the final norm), head k = 1..K computes

    x = r_L(... r_1(h))         r(x) = x + SiLU(W x + b), W (H, H), b (H,), both zero at the start
    logits = x @ U.T            U (V, H): the LM head's own weight (tied), or a copy of it that is trained (untied)

and guesses the token k + 1 places ahead, where the LM head guesses the next. With W = b = 0, a fresh head computes
exactly what the LM head does. Modules are named so that the state dict of a model with heads has the names of the
FasterDecoding checkpoints: `medusa_head.{k}.{l}.linear.weight`, `.bias`, and for untied heads
`medusa_head.{k}.{L}.weight`, with k and l from 0.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from liger_trainer.head.find import base_model_of, head_reason, output_head
from liger_trainer.head.module import HeadCall, bind_head, innermost

HEADS_NAME = "medusa_head"  # the attribute of the model
HEADS_FOLDER = "medusa_heads"  # in the output directory and in every checkpoint of the trainer
WEIGHTS_FILE = "medusa_lm_head.safetensors"
CONFIG_FILE = "config.json"
Device: TypeAlias = torch.device | str | None


@dataclass(frozen=True)
class MedusaHeadsConfig:
    """The shape of the heads, as in the `config.json` next to their weights.

    Args:
        num_heads (`int`): K, the number of heads, 1 or more. Key in the file: `medusa_num_heads`.
        num_layers (`int`): L, the residual blocks of each head, 0 or more (tied: 1 or more). Key: `medusa_num_layers`.
        tied (`bool`): Whether the heads project with the LM head of the model. Key: `medusa_tied`.
        hidden_size (`int`): H, the input width of the LM head.
        vocab_size (`int`): V, the rows of the LM head.
        base_model_name_or_path (`str`, *optional*): The model that the heads were trained on.

    Raises:
        ValueError: A number is out of its range.
    """

    num_heads: int
    num_layers: int
    tied: bool
    hidden_size: int
    vocab_size: int
    base_model_name_or_path: str | None = None

    def __post_init__(self) -> None:
        check_shape(self.num_heads, self.num_layers, self.tied)

    def to_dict(self) -> dict[str, Any]:
        """The values under the keys of the file."""
        return {_KEYS.get(name, name): value for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "MedusaHeadsConfig":
        """The reverse of `to_dict`. Other keys are ignored, and a missing key is a KeyError."""
        named = {name: values[_KEYS.get(name, name)] for name in (f.name for f in dataclasses.fields(cls)[:-1])}
        return cls(**named, base_model_name_or_path=values.get("base_model_name_or_path"))


_KEYS = {"num_heads": "medusa_num_heads", "num_layers": "medusa_num_layers", "tied": "medusa_tied"}


def check_shape(num_heads: int, num_layers: int, tied: bool) -> None:
    """ValueError if a number is out of its range, or if such heads would have nothing to train."""
    if num_heads < 1:
        raise ValueError(f"medusa_num_heads is {num_heads}; expected 1 or more.")
    if num_layers < 0:
        raise ValueError(f"medusa_num_layers is {num_layers}; expected 0 or more.")
    if tied and num_layers == 0:
        raise ValueError(
            "medusa_num_layers is 0 and medusa_tied is true: such heads are the LM head itself, with nothing to train. "
            "Set medusa_num_layers to 1 or more, or medusa_tied to false."
        )


class ResBlock(nn.Module):
    """x + SiLU(W x + b) for x (..., H). W and b are zero at first, so that the block begins as the identity."""

    def __init__(self, hidden_size: int, dtype: torch.dtype | None = None, device: Device = None) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, dtype=dtype, device=device)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Sequential):  # a ModuleList is no unit for FSDP2 before torch 2.13, even with a forward
    """One head: L blocks, its children `0` to `L - 1`, and if it is untied a projection of its own, its child `L`.

    Args:
        hidden_size (`int`): H.
        vocab_size (`int` or `None`): V, or None for a tied head, which has no projection.
        num_layers (`int`): L.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int | None,
        num_layers: int,
        dtype: torch.dtype | None = None,
        device: Device = None,
    ) -> None:
        super().__init__(*(ResBlock(hidden_size, dtype, device) for _ in range(num_layers)))
        self.num_layers = num_layers
        if vocab_size is not None:
            self.append(nn.Linear(hidden_size, vocab_size, bias=False, dtype=dtype, device=device))

    @property
    def lm_head(self) -> nn.Linear | None:
        """The head's own projection, or None if it is tied."""
        return self[self.num_layers] if len(self) > self.num_layers else None

    def forward(self, hidden: torch.Tensor, then: Callable[..., Any] | None = None) -> Any:
        """The output x (..., H) of the last block or, if `then` is given, the result of `then(x, U)`.

        U is None for a tied head. `then` runs inside the calls of the head and of its projection, where FSDP2 and
        ZeRO-3 have gathered the weights.
        """
        for layer in range(self.num_layers):
            hidden = self[layer](hidden)
        if then is None:
            return hidden
        projection = self.lm_head
        if projection is None:
            return then(hidden, None)
        bind_head(projection)
        return projection(hidden, HeadCall(lambda x: then(x, projection.weight)))


class MedusaHeads(nn.ModuleList):
    """The K heads of a model. `MedusaHeads.for_model` makes them, and `attach_heads` puts them on the model.

    Args:
        config (`MedusaHeadsConfig`): Their shape.
        dtype, device: Of the parameters; they should be the LM head's.
    """

    def __init__(self, config: MedusaHeadsConfig, dtype: torch.dtype | None = None, device: Device = None) -> None:
        vocab = None if config.tied else config.vocab_size
        super().__init__(
            MedusaHead(config.hidden_size, vocab, config.num_layers, dtype, device) for _ in range(config.num_heads)
        )
        self.config = config

    @classmethod
    def for_model(cls, model: nn.Module, num_heads: int, num_layers: int = 1, tied: bool = True) -> "MedusaHeads":
        """Fresh heads for `model` (of transformers or PEFT), with the dtype and device of its LM head, not attached.

        Raises:
            ValueError: The model has no LM head that can be fused, or its LM head has a bias or an adapter.
        """
        head = _lm_head(model)
        base = base_model_of(model)
        config = MedusaHeadsConfig(
            num_heads,
            num_layers,
            tied,
            head.in_features,
            head.out_features,
            getattr(base, "name_or_path", None) or None,
        )
        with _gathered(head.weight):
            heads = cls(config, head.weight.dtype, head.weight.device)
            with torch.no_grad():
                for own in heads if not tied else ():
                    own.lm_head.weight.copy_(head.weight)
        return heads

    def forward(self, hidden: torch.Tensor, then: Callable[..., Any] | None = None) -> Any:
        """The outputs of the K heads' blocks, a list of tensors of the shape of `hidden` (..., H).

        If `then` is given, it is the result of `then(blocks, weights)` instead, which runs inside the calls of all
        heads. The weights are the projections (V, H), or None for tied heads.
        """
        if then is None:
            return [head(hidden) for head in self]

        def enter(blocks: list[torch.Tensor], weights: list[torch.Tensor | None]) -> Any:
            if len(blocks) == len(self):
                return then(blocks, weights)
            return self[len(blocks)](hidden, lambda block, weight: enter([*blocks, block], [*weights, weight]))

        return enter([], [])

    def one_by_one(self, hidden: torch.Tensor, then: Callable[..., Any]) -> list:
        """`then(k, x, U)` for each head k = 0 .. K - 1, run inside the call of that head alone, as in `MedusaHead`."""
        return [head(hidden, lambda x, weight, k=k: then(k, x, weight)) for k, head in enumerate(self)]

    def logits(self, hidden: torch.Tensor, lm_head: nn.Module) -> torch.Tensor:
        """The logits (K, ..., V) of all heads, for evaluation: nothing is fused.

        They have neither the scale nor the softcap that some models apply, which do not move an argmax. `lm_head` is
        the model's, which tied heads use.
        """
        return torch.stack([(head.lm_head or lm_head)(x) for head, x in zip(self, self(hidden), strict=True)])

    def save_pretrained(self, folder: str, state_dict: dict | None = None) -> None:
        """Write `config.json` and `medusa_lm_head.safetensors`, with names such as `{k}.{l}.linear.weight`.

        Args:
            folder (`str`): The directory, which is made if it is missing.
            state_dict (`dict`, *optional*): Full tensors by those names, in case the module's own are sharded.
        """
        os.makedirs(folder, exist_ok=True)
        tensors = self.state_dict() if state_dict is None else state_dict
        if missing := self.state_dict().keys() ^ tensors.keys():
            raise ValueError(f"state_dict of the Medusa heads and the heads differ in {sorted(missing)}.")
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(tensors, os.path.join(folder, WEIGHTS_FILE), metadata={"format": "pt"})
        with open(os.path.join(folder, CONFIG_FILE), "w", encoding="utf-8") as file:
            json.dump(self.config.to_dict(), file, indent=2)

    @classmethod
    def from_pretrained(cls, folder: str, dtype: torch.dtype | None = None, device: Device = None) -> "MedusaHeads":
        """The heads that `save_pretrained` wrote.

        Args:
            folder (`str`): The head directory, or an output directory of the trainer that has one.
            dtype, device (*optional*): Those of the heads. Unset: the dtype in the file, on the CPU.

        Raises:
            ValueError: A file is missing, or the weights are not those that `config.json` describes.
        """
        folder = heads_folder(folder)
        with open(os.path.join(folder, CONFIG_FILE), encoding="utf-8") as file:
            values = json.load(file)
        try:
            config = MedusaHeadsConfig.from_dict(values)
        except KeyError as key:
            raise ValueError(f"{os.path.join(folder, CONFIG_FILE)} has no {key}; is it the config of heads?") from None
        tensors = load_file(os.path.join(folder, WEIGHTS_FILE))
        heads = cls(config, dtype or next(iter(tensors.values())).dtype, "meta")
        expected = {name: tuple(t.shape) for name, t in heads.state_dict().items()}
        found = {name: tuple(t.shape) for name, t in tensors.items()}
        if expected != found:
            name = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))[0]
            raise ValueError(
                f"{folder}: {CONFIG_FILE} describes {config.num_heads} heads of {config.num_layers} layers, "
                f"{'tied' if config.tied else 'untied'}, hidden_size {config.hidden_size}, vocab_size "
                f"{config.vocab_size}. That does not fit {WEIGHTS_FILE}: {name} is {found.get(name, 'missing')} there "
                f"and {expected.get(name, 'absent')} by the config."
            )
        heads = heads.to_empty(device=device or "cpu")
        heads.load_state_dict(tensors)
        return heads


def heads_folder(folder: str) -> str:
    """`folder` if it is a head directory, or else the head directory in it. ValueError if there is none."""
    for candidate in (os.fspath(folder), os.path.join(folder, HEADS_FOLDER)):
        if os.path.isfile(os.path.join(candidate, WEIGHTS_FILE)):
            return candidate
    raise ValueError(
        f"{os.fspath(folder)!r} has no {WEIGHTS_FILE}, and no {HEADS_FOLDER}/{WEIGHTS_FILE}. Give the output_dir of a "
        "Medusa training, or the folder of its heads."
    )


def heads_of(model: nn.Module) -> MedusaHeads | None:
    """The heads attached to a transformers or PEFT model, or None."""
    return getattr(base_model_of(model), HEADS_NAME, None)


def attach_heads(model: nn.Module, heads: MedusaHeads) -> MedusaHeads:
    """Make `heads` the child `medusa_head` of `model`, or of the base model inside a PEFT wrapper, and trainable.

    Call this before the model is wrapped or sharded, so that DDP, FSDP2 and ZeRO-3 see the parameters of the heads.
    Each head is a unit of accelerate's transformer-based wrap policy, unless its config names the layers to wrap.

    Raises:
        ValueError: The heads were made for another width or vocabulary, or the model has other heads already.
    """
    base, head, config = base_model_of(model), _lm_head(model), heads.config
    for name, have, want in (
        ("hidden_size", config.hidden_size, head.in_features),
        ("vocab_size", config.vocab_size, head.out_features),
    ):
        if have != want:
            raise ValueError(
                f"The Medusa heads have {name} {have}, the LM head of {type(base).__name__} has {want}. Use the model "
                f"that they were trained on ({config.base_model_name_or_path}), with the same tokenizer and embeddings."
            )
    if heads_of(model) not in (None, heads):
        raise ValueError(
            f"{type(base).__name__} has Medusa heads already. Pass a model without heads (del model.{HEADS_NAME})."
        )
    setattr(base, HEADS_NAME, heads.to(head.weight.device, head.weight.dtype).requires_grad_(True))
    base._no_split_modules = {*(base._no_split_modules or ()), MedusaHead.__name__}
    return heads


@contextmanager
def heads_detached(model: nn.Module) -> Iterator[MedusaHeads]:
    """Within the block the model has no heads, so that it is saved and loaded as the plain model that it was."""
    base = base_model_of(model)
    heads = base._modules.pop(HEADS_NAME)
    try:
        yield heads
    finally:
        base._modules[HEADS_NAME] = heads


def _lm_head(model: nn.Module) -> nn.Linear:
    """The linear layer that makes the logits. ValueError if fresh heads would not compute the same as it does."""
    if (reason := head_reason(model)) is not None:
        raise ValueError(f"Medusa heads need the input and the weight of the LM head, but {reason}.")
    head, name = innermost(output_head(model)), type(base_model_of(model)).__name__
    if hasattr(head, "base_layer"):
        raise ValueError(
            f"The LM head of {name} has an adapter, which Medusa heads would leave out. Take lm_head out of the target "
            "modules of the adapter (lora_target_modules), or train all of it (lora_modules_to_save: [lm_head])."
        )
    if head.bias is not None:
        raise ValueError(f"The LM head of {name} has a bias, and Medusa heads have none. Use a model without one.")
    return head


def _gathered(weight: torch.Tensor) -> AbstractContextManager:
    """Within the block `weight` is whole, even if ZeRO-3 has partitioned it."""
    if not hasattr(weight, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([weight])
