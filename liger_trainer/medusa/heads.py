"""The heads, and how they are attached to a model.

With h the input of the LM head (the last hidden state, after the final norm), head k = 1..K computes

    x = r_L(... r_1(h))         r(x) = x + SiLU(W x + b), W (H, H), b (H,), both zero at the start
    logits = x @ U.T            U (V, H): the LM head's own weight (tied), or a copy of it that is trained (untied)

and guesses the token k + 1 places ahead; the LM head guesses the next one. With W = b = 0, a fresh head computes
exactly what the LM head does. The state dict of a model with heads has the names of FasterDecoding's checkpoints:
`medusa_head.{k}.{l}.linear.weight`, `.bias`, and for untied heads `medusa_head.{k}.{L}.weight`, with k and l from 0.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from peft.utils.integrations import gather_params_ctx
from torch import nn

from liger_trainer.head.module import HeadCall, base_model_of, bind_head, head_reason, innermost, output_head
from liger_trainer.medusa.files import MedusaHeadsConfig, read_heads, write_heads

HEADS_NAME = "medusa_head"  # the attribute of the model
Device: TypeAlias = torch.device | str | None


class ResBlock(nn.Module):
    """x + SiLU(W x + b) for x (..., H). W and b start at zero, so the block starts as the identity."""

    def __init__(self, hidden_size: int, dtype: torch.dtype | None = None, device: Device = None) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, dtype=dtype, device=device)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Sequential):  # FSDP2 before torch 2.13 cannot shard a ModuleList as a unit, even with a forward
    """One head: L blocks (its children `0` to `L - 1`), and for an untied head its projection (child `L`).

    `vocab_size` is None for a tied head, which has no projection.
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

    def forward(self, hidden: torch.Tensor, compute: Callable[..., Any] | None = None) -> Any:
        """Return the output x (..., H) of the last block, or `compute(x, U)` if `compute` is given.

        U is None for a tied head. `compute` runs inside the calls of the head and of its projection, while FSDP2 and
        ZeRO-3 have gathered the weights.
        """
        for layer in range(self.num_layers):
            hidden = self[layer](hidden)
        if compute is None:
            return hidden
        projection = self.lm_head
        if projection is None:
            return compute(hidden, None)
        bind_head(projection)
        return projection(hidden, HeadCall(lambda x: compute(x, projection.weight)))


class MedusaHeads(nn.ModuleList):
    """The K heads of a model. `MedusaHeads.for_model` makes them, and `attach_heads` puts them on the model."""

    def __init__(self, config: MedusaHeadsConfig, dtype: torch.dtype | None = None, device: Device = None) -> None:
        vocab = None if config.tied else config.vocab_size
        super().__init__(
            MedusaHead(config.hidden_size, vocab, config.num_layers, dtype, device) for _ in range(config.num_heads)
        )
        self.config = config

    @classmethod
    def for_model(cls, model: nn.Module, num_heads: int, num_layers: int = 1, tied: bool = True) -> "MedusaHeads":
        """Return fresh heads for a transformers or PEFT model, with dtype and device of its LM head. Not attached.

        Raises:
            ValueError: The model has no LM head that can be fused, or its LM head has a bias or an adapter.
        """
        head = _lm_head(model)
        name = getattr(base_model_of(model), "name_or_path", None) or None
        config = MedusaHeadsConfig(num_heads, num_layers, tied, head.in_features, head.out_features, name)
        with gather_params_ctx(head.weight, None):  # it may be partitioned by ZeRO-3
            heads = cls(config, head.weight.dtype, head.weight.device)
            with torch.no_grad():
                for medusa_head in heads if not tied else ():
                    medusa_head.lm_head.weight.copy_(head.weight)
        return heads

    def forward(self, hidden: torch.Tensor, compute: Callable[..., Any] | None = None) -> Any:
        """Return the outputs of the K heads' blocks, a list of tensors shaped like `hidden` (..., H).

        With `compute`, return `compute(blocks, weights)` instead, run inside the calls of all heads. The weights are
        the projections (V, H), or None for tied heads.
        """
        if compute is None:
            return [head(hidden) for head in self]

        def enter(blocks: list[torch.Tensor], weights: list[torch.Tensor | None]) -> Any:
            if len(blocks) == len(self):
                return compute(blocks, weights)
            return self[len(blocks)](hidden, lambda block, weight: enter([*blocks, block], [*weights, weight]))

        return enter([], [])

    def logits(self, hidden: torch.Tensor, lm_head: nn.Module) -> torch.Tensor:
        """Return the unfused logits (K, ..., V) of all heads, for evaluation.

        The model's scale and softcap are not applied: they do not change the argmax. Tied heads use `lm_head`, the
        model's.
        """
        return torch.stack([(head.lm_head or lm_head)(x) for head, x in zip(self, self(hidden), strict=True)])

    def save_pretrained(self, folder: str, state_dict: dict | None = None) -> None:
        """Write `config.json` and `medusa_lm_head.safetensors`, with names such as `{k}.{l}.linear.weight`.

        `state_dict` has full tensors under those names, in case the module's own are sharded.
        """
        tensors = self.state_dict() if state_dict is None else state_dict
        missing = self.state_dict().keys() ^ tensors.keys()
        if missing:
            raise ValueError(f"state_dict and the Medusa heads differ in {sorted(missing)}.")
        write_heads(folder, self.config.to_dict(), {n: t.detach().cpu().contiguous() for n, t in tensors.items()})

    @classmethod
    def from_pretrained(cls, folder: str, dtype: torch.dtype | None = None, device: Device = None) -> "MedusaHeads":
        """Load heads from an output_dir, an export, or a checkpoint of FasterDecoding or vLLM.

        `dtype` defaults to the saved one, and `device` to the CPU.

        Raises:
            ValueError: A file is missing, a tensor is not a head's, the heads have different shapes, or the config
                contradicts the tensors.
        """
        config, tensors = read_heads(folder)
        heads = cls(config, dtype or next(iter(tensors.values())).dtype, "meta").to_empty(device=device or "cpu")
        try:
            heads.load_state_dict(tensors)  # a copy, because safetensors maps its file into memory
        except RuntimeError as error:
            raise ValueError(f"{folder}: the heads have different shapes. {error}") from error
        return heads


def heads_of(model: nn.Module) -> MedusaHeads | None:
    """Return the heads attached to a transformers or PEFT model, or None."""
    return getattr(base_model_of(model), HEADS_NAME, None)


def attach_heads(model: nn.Module, heads: MedusaHeads) -> MedusaHeads:
    """Make `heads` the trainable child `medusa_head` of `model`, or of the base model inside a PEFT wrapper.

    Call this before the model is wrapped or sharded, so that DDP, FSDP2 and ZeRO-3 see the parameters of the heads.
    accelerate's transformer-based wrap policy makes each head a unit, unless its config names the layers to wrap.

    Raises:
        ValueError: The heads were made for another width or vocabulary, or the model already has other heads.
    """
    base = base_model_of(model)
    head = _lm_head(model)
    config = heads.config
    for name, have, want in (
        ("hidden_size", config.hidden_size, head.in_features),
        ("vocab_size", config.vocab_size, head.out_features),
    ):
        if have != want:
            raise ValueError(
                f"The Medusa heads have {name} {have}, but the LM head of {type(base).__name__} has {want}. Use the "
                f"model that they were trained on ({config.base_model_name_or_path}), with its tokenizer."
            )
    if heads_of(model) not in (None, heads):
        raise ValueError(
            f"{type(base).__name__} already has Medusa heads. Pass a model without heads (del model.{HEADS_NAME})."
        )
    setattr(base, HEADS_NAME, heads.to(head.weight.device, head.weight.dtype).requires_grad_(True))
    base._no_split_modules = {*(base._no_split_modules or ()), MedusaHead.__name__}
    return heads


@contextmanager
def heads_detached(model: nn.Module) -> Iterator[MedusaHeads]:
    """Context manager: the model has no heads, so it is saved and loaded as a plain model."""
    base = base_model_of(model)
    heads = base._modules.pop(HEADS_NAME)
    try:
        yield heads
    finally:
        base._modules[HEADS_NAME] = heads


def _lm_head(model: nn.Module) -> nn.Linear:
    """Return the LM head. ValueError if fresh heads would not compute the same logits."""
    reason = head_reason(model)
    if reason is not None:
        raise ValueError(f"Medusa heads need the input and the weight of the LM head, but {reason}.")
    head, name = innermost(output_head(model)), type(base_model_of(model)).__name__
    if hasattr(head, "base_layer"):
        raise ValueError(
            f"The LM head of {name} has an adapter, which Medusa heads would ignore. Remove lm_head from the adapter's "
            "target modules (lora_target_modules), or train all of it (lora_modules_to_save: [lm_head])."
        )
    if head.bias is not None:
        raise ValueError(f"The LM head of {name} has a bias, but Medusa heads have none. Use a model without one.")
    return head
