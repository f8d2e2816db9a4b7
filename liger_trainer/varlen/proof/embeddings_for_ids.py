"""Proves that a backbone computes the same from embeddings as from ids.

A captured backbone gets embeddings: one for each token and, in some models, one for each layer. A backbone that reads
ids anywhere else would compute something else.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from liger_trainer.varlen.graphs.input_embeddings import PER_LAYER, InputEmbeddings, modules_per_layer
from liger_trainer.varlen.proof.compare import run, what_differs


def start_at_embeddings(ours: Any, backbone: nn.Module, batch: dict[str, Any]) -> tuple[tuple[str, ...], str | None]:
    """Run `backbone` on embeddings instead of the ids of `batch`, and compare.

    Returns (the names of the modules that make embeddings for each layer, what differs or None).

    Args:
        ours ([`~transformers.PreTrainedModel`]): A small copy of a model.
        backbone (`nn.Module`): Its backbone, or `ours` itself.
        batch (`dict`): A batch of the model.

    Raises:
        Exception: The backbone does not run on embeddings.
    """
    per_layer = modules_per_layer(backbone, batch["input_ids"])
    embeddings = InputEmbeddings(backbone, per_layer)

    def embed(call: dict[str, Any]) -> dict[str, Any]:
        return embeddings.of(call).in_place_of_ids(call)

    def embed_zeros(call: dict[str, Any]) -> dict[str, Any]:
        embedded = embed(call)
        zeros = {}
        for name in ("inputs_embeds", PER_LAYER):
            if embedded.get(name) is not None:
                zeros[name] = torch.zeros_like(embedded[name])
        return embedded | zeros

    wanted = run(ours, batch)
    with _changed_call(backbone, embed):
        differs = what_differs(run(ours, batch), wanted)
    if differs is not None:
        return per_layer, differs
    # A capture fills a size up with zeros, which are the embedding of no id. This run raises if the backbone looks up
    # the id of each embedding, as Gemma 4 does without embeddings for each layer.
    with _changed_call(backbone, embed_zeros):
        run(ours, batch)
    return per_layer, None


@contextlib.contextmanager
def _changed_call(backbone: nn.Module, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Context manager: `backbone` is called with the arguments that `change` makes of those it is given."""
    names = list(inspect.signature(type(backbone).forward).parameters)[1:]

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return (), change(dict(zip(names, args, strict=False)) | kwargs)

    handle = backbone.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
