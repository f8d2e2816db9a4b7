"""The embeddings that a captured backbone starts from: one for each token and, in Gemma 3n and 4, one for each layer.

The ids stay outside: the modules that read them run before each replay, with their hooks and their gradients. Gemma 4
reads ids a second time, in a table with a vector for each layer, and its forward takes the result as an argument.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_trainer.patching.core.hooks import comes_from
from liger_trainer.varlen.graphs.refusals import NotCapturable

PER_LAYER = "per_layer_inputs"  # transformers' name, for the argument of a backbone and for the method that makes it
_METHOD = "get_per_layer_inputs"


class Embedded(NamedTuple):
    """The inputs that a captured backbone gets in place of ids.

    Attributes:
        embeds (`torch.Tensor`): (B, S, H), the embeddings of the tokens.
        per_layer (`torch.Tensor` or None): (B, S, layers, P), the embeddings of the tokens for each layer.
    """

    embeds: torch.Tensor
    per_layer: torch.Tensor | None = None

    def in_place_of_ids(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments `call` of a backbone with these embeddings instead of ids."""
        changed = {name: value for name, value in call.items() if name != "input_ids"}
        changed["inputs_embeds"] = self.embeds
        if self.per_layer is not None:
            changed[PER_LAYER] = self.per_layer
        return changed


class InputEmbeddings:
    """The modules of a backbone that read ids. They run before each replay, outside of the capture.

    Args:
        backbone (`nn.Module`): The backbone.
        per_layer (`tuple[str, ...]`, *optional*): The names of the modules that make the embeddings for each layer, as
            `modules_per_layer` finds them. Empty for a model without them.
    """

    def __init__(self, backbone: nn.Module, per_layer: tuple[str, ...] = ()):
        self._backbone = backbone
        self._names = per_layer

    @property
    def of_tokens(self) -> nn.Module:
        """Return the input embeddings of the backbone."""
        return self._backbone.get_input_embeddings()  # type: ignore[operator]

    @property
    def modules(self) -> list[nn.Module]:
        """Return the modules that run before a replay, and the modules inside them."""
        outside = [self.of_tokens, *map(self._backbone.get_submodule, self._names)]
        return [module for one in outside for module in one.modules()]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of `modules`."""
        return [parameter for module in self.modules for parameter in module.parameters(recurse=False)]

    def of(self, call: dict[str, Any]) -> Embedded:
        """Return the embeddings for a call of the backbone: those that it gets, or the embeddings of its ids.

        Raises:
            NotCapturable: The backbone's own code has to run, because the call has both ids and embeddings, because the
                backbone would look up ids for given embeddings, or because the code that makes the embeddings for each
                layer is not transformers'.
        """
        ids = call.get("input_ids")
        embeds = call.get("inputs_embeds")
        per_layer = call.get(PER_LAYER)
        if ids is not None and not (embeds is None and per_layer is None):
            raise NotCapturable("it gets ids and embeddings")  # for which most models raise an error
        makes_per_layer = per_layer is None and bool(self._names)
        if makes_per_layer:
            if ids is None:
                raise NotCapturable(
                    "it looks for the id of each embedding, since it gets no ids and no per_layer_inputs"
                )
            if not comes_from(getattr(self._backbone, _METHOD), "transformers."):
                raise NotCapturable(f"its {_METHOD} is not transformers' own")
        if embeds is None:
            embeds = self.of_tokens(ids)
        if makes_per_layer:
            per_layer = _embed_per_layer(self._backbone, ids, embeds)
        return Embedded(embeds, per_layer)


def _embed_per_layer(backbone: nn.Module, ids: torch.Tensor | None, embeds: torch.Tensor) -> torch.Tensor:
    """Return the embeddings for each layer as the backbone's forward makes them. Gemma 3n's method takes ids alone."""
    make = getattr(backbone, _METHOD)
    takes_embeds = "inputs_embeds" in inspect.signature(make).parameters
    return make(ids, embeds) if takes_embeds else make(ids)


def modules_per_layer(backbone: nn.Module, ids: torch.Tensor) -> tuple[str, ...]:
    """Return the names of the modules that make the embeddings for each layer from `ids`, or () if there are none.

    The method runs once, and hooks note the modules that it calls.
    """
    if not hasattr(backbone, _METHOD) or not getattr(backbone.config, "hidden_size_per_layer_input", None):
        return ()
    embeds = backbone.get_input_embeddings()(ids)  # type: ignore[operator]
    ran: list[str] = []
    hooks = [
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
        for name, module in backbone.named_modules()
    ]
    try:
        with torch.no_grad():
            _embed_per_layer(backbone, ids, embeds)
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(dict.fromkeys(ran))
