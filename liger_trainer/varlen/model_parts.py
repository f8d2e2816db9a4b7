"""Find the backbone and the head of a model, and check that code around them treats each token by itself."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING

from liger_trainer.patching.core.binding import own_class
from liger_trainer.patching.core.contracts import PackedExperts
from liger_trainer.patching.core.hooks import comes_from

_TORCH = ("torch.nn.", "torch.utils._contextlib")  # the last has `no_grad`
_THEIRS = ("transformers.", *_TORCH)  # what a proof may run
# Modules that the proof need not have run: each token goes through them by itself, or they only hold others.
_KINDS = (
    nn.Linear,
    nn.Embedding,
    nn.Dropout,
    nn.Identity,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
)
_PER_TOKEN = {cls: cls.forward for cls in _KINDS}
_TUNERS = (
    "_buffer_dict",
    "adalora",
    "boft",
    "fourierft",
    "hra",
    "ia3",
    "ln_tuning",
    "loha",
    "lokr",
    "lora",
    "lycoris_utils",
    "miss",
    "oft",
    "randlora",
    "trainable_tokens",
    "tuners_utils",
    "vblora",
    "vera",
)
_PER_TOKEN_ROOMS = (
    *(f"peft.tuners.{name}" for name in _TUNERS),
    "peft.utils.",
    "transformers.integrations.",
    "liger_trainer.",
    "bitsandbytes.",
    "hqq.core.quantize",
    "gptqmodel.nn_modules.qlinear.",
)


def base_of(model):
    """Return the part of a transformers model before its head, with towers if it has any, or None."""
    name = getattr(model, "base_model_prefix", "")
    # Llama 4's decoder has the same prefix as its model of images.
    return model._modules.get(name, model._modules.get("model")) if name else None


def backbone_of(model):
    """Return the part of a transformers model before its head, or None.

    In a model of images and text it is the decoder of text inside that part, which sees images as embeddings.
    """
    base = base_of(model)
    config = getattr(base, "config", None)
    if config is None or config.is_encoder_decoder:
        return base
    text = config.get_text_config()
    if text is config:
        return base
    for part in base._modules.values():
        if type(getattr(part, "config", None)) is type(text):
            return part
    return base


def own_loss_of(model) -> Callable:
    """Return the function that a model of transformers calls for its loss, while no other one is set."""
    return LOSS_MAPPING.get(str(getattr(model, "loss_type", None)), LOSS_MAPPING["ForCausalLM"])


def code_of(modules: Iterable[nn.Module]) -> dict[Any, Callable]:
    """Return the classes of modules, with their forwards. 4-bit experts run the code of their 16-bit class."""
    classes: Iterable[Any] = map(own_class, modules)
    found = {}
    for cls in classes:
        own = cls.unpacked_class if issubclass(cls, PackedExperts) else cls
        found[own] = own.forward
    return found


def why_class_is_foreign(modules: Iterable[nn.Module]) -> str | None:
    """Name a class in `modules` that is not transformers' own, or return None."""
    for cls, forward in code_of(modules).items():
        if not _is_of(cls, forward, _THEIRS):
            return f"{cls.__name__} is not a class of transformers with its own forward"
    return None


def why_not_transformers_own(model) -> str | None:
    """Return a class or a function that would take part in a proof and is not transformers' own, or None."""
    reason = why_class_is_foreign(model.modules())
    if reason is not None:
        return reason
    loss = own_loss_of(model)
    return None if comes_from(loss, "transformers.loss.") else f"the loss function {loss!r} is not transformers' own"


def why_forward_is_unknown(model, forwards: dict[type, Callable]) -> str | None:
    """Return a forward in `model` that may not take each token by itself, or None.

    `forwards` are those that are proven.
    """
    for cls, forward in code_of(without_head(model)).items():
        proven = forward in (forwards.get(cls), _PER_TOKEN.get(cls))
        if not (proven or _is_of(cls, forward, _PER_TOKEN_ROOMS)):
            return f"the forward of {cls.__name__} is not proven to work without padding"
    return None


def _is_of(cls: type, forward: Callable, rooms: tuple[str, ...]) -> bool:
    return cls.__module__.startswith(rooms) and comes_from(forward, (*rooms, *_TORCH))


def without_head(model, backbone: nn.Module | None = None) -> list[nn.Module]:
    """Return `model` and its modules but for the LM head, shared ones twice: `modules()` takes five times as long.

    A caller that knows its `backbone` hands it over.
    """
    head = model.get_output_embeddings()
    found = [model]
    backbone = backbone_of(model) if backbone is None else backbone
    base = base_of(model)
    if backbone is not None and base is not backbone:  # its towers see no rows of tokens
        return [model, base, *without_head(backbone)]
    for module in found:  # which grows: a list comprehension for each module would be a call for each
        for child in module._modules.values():
            if child is not None and child is not head:
                found.append(child)
    return found
