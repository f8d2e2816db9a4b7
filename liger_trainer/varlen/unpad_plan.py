"""The plan of one call of a backbone: turns the batch into one row of real tokens, and the outputs back into a batch.

A padded batch (B, S) becomes one row of its N real tokens, which keep their positions. The outputs are copied back to
the places of the tokens, with zeros for padding.
"""

import contextlib
import contextvars
import copy
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from transformers.utils import ModelOutput

from liger_trainer.varlen.graphs.backbone_graphs import BackboneGraphs
from liger_trainer.varlen.host_copies import values_of
from liger_trainer.varlen.mirrored_tensor import MirroredTensor, is_stale
from liger_trainer.varlen.rows import Rows

_PER_TOKEN = ("input_ids", "inputs_embeds", "visual_pos_masks", "per_layer_inputs")
_PER_IMAGE_TOKEN = "deepstack_visual_embeds"  # one for each image token, in order, so padding does not change it
_KNOWN_TENSORS = (
    "attention_mask",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "seq_idx",
    _PER_IMAGE_TOKEN,
    *_PER_TOKEN,
)
_OF_THE_HEAD = ("labels",)  # Gemma 4's image model passes them to its decoder, which does not read them


class UnpadPlan:
    """Runs one call of the backbone on real tokens.

    Args:
        given (`dict`): The arguments of the call that the plan is made from.
        rows (`Rows`): The rows of real tokens.
        index (`torch.Tensor`, *optional*): int64 (N,), the index of each real token in the flattened batch. None if the
            batch has no padding.
        reaches_end (`bool`, *optional*, defaults to `True`): Whether the last column has a real token.

    Attributes:
        used (`bool`): Whether a backbone has run with this plan.
        graphs (`BackboneGraphs` or `None`): The captured graphs that may replay the backbone.
        only_replayed (`bool`): Whether the plan is only for a replay. Without one, the call runs as it is: its rows
            have no padding, and the model's own attention is right for them.
        saved (`int`): Tokens that are not computed because rows share them.
        unshared (`UnpadPlan` or `None`): For a plan that shares prompts, the plan without sharing.
    """

    graphs: BackboneGraphs | None = None
    only_replayed: bool = False
    saved: int = 0
    unshared: "UnpadPlan | None" = None

    def __init__(self, given: dict[str, Any], rows: Rows, index: torch.Tensor | None = None, reaches_end: bool = True):
        self.given = given
        self.rows = rows
        self.index = index
        self.reaches_end = reaches_end
        self.used = False

    @property
    def leaves_out(self) -> bool:
        """Return whether the batch has padding, which is not computed."""
        return self.index is not None

    def fits(self, call: dict[str, Any]) -> bool:
        """Return whether the backbone is called with the arguments that the plan was made from.

        A model of images and text computes its decoder's position ids itself, (..., B or 1, S).
        """
        shape = tokens_of(self.given).shape[:2]
        positions = call.get("position_ids")
        # By identity: comparing values would wait for the GPU, and a model that makes its own mask wants another one.
        if call.get("attention_mask") is not self.given.get("attention_mask") or tokens_of(call).shape[:2] != shape:
            return False
        if positions is not self.given.get("position_ids"):
            # The rows of a packed row are known only from its position ids, so other ids mean other rows.
            known = self.leaves_out or self.rows.is_whole_batch
            of_tokens = positions is not None and positions.shape[-2:] in (shape, (1, shape[1]))
            if not (known and of_tokens):
                return False
        others = []
        for name, x in call.items():
            of_the_head = name in _OF_THE_HEAD and x is self.given.get(name)
            if name not in _KNOWN_TENSORS and not of_the_head:
                others.append(x)
        for x in tree_leaves(others):
            # An unknown tensor may have an element for each token of the padded batch. A scalar is a count.
            if isinstance(x, torch.Tensor) and x.ndim > 0:
                return False
        return True

    def unpad(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the backbone, with one row of real tokens instead of the batch.

        Without position ids, tokens have the positions of their columns, as in every model that a proof accepts.
        """
        tokens = tokens_of(call)
        call = dict(call)
        for name in _OF_THE_HEAD:
            call.pop(name, None)
        # Some layers of Gemma 4 compute only the last columns of a batch with it. Its head can cut the states instead.
        if "logits_to_keep" in call:
            call["logits_to_keep"] = 0
        # Without a mask, transformers would look for rows in the values of position_ids, and wait for the GPU.
        shape = (self.rows.batch, self.rows.tokens // self.rows.batch)
        mask = torch.ones(shape, dtype=torch.long, device=tokens.device)
        if self.index is None:
            return call | {"attention_mask": mask}
        batch, length = tokens.shape[:2]
        packed = {}
        for name in _PER_TOKEN:
            x = call.get(name)
            if x is not None:
                packed[name] = self._taken(x)[None]  # keeps a `MirroredTensor` one
        positions = call.get("position_ids")
        if positions is None:
            positions = (self.index % length).unsqueeze(0)
        else:
            positions = positions.expand(*positions.shape[:-2], batch, length).flatten(-2)[..., None, self.index]
        return call | packed | {"attention_mask": mask, "position_ids": positions}

    def _taken(self, x: torch.Tensor) -> torch.Tensor:
        """Take the real tokens of x (B, S, ...): (N, ...)."""
        assert self.index is not None  # `unpad` has looked
        taken = x.flatten(0, 1)[self.index]
        if not isinstance(x, MirroredTensor) or is_stale(x):
            return taken
        (index,) = values_of(self.index)
        if index.is_cuda:
            return taken
        return MirroredTensor.around(taken, x.values.flatten(0, 1).index_select(0, index))

    def repad(self, outputs):
        """Put every tensor of real tokens that the backbone has returned back into the shape of the batch."""
        if self.index is None:
            return outputs
        if isinstance(outputs, ModelOutput):
            padded = copy.copy(outputs)  # transformers may have added states of layers that its class does not know
            for name, x in outputs.items():
                padded[name] = self.repad(x)
            return padded
        if isinstance(outputs, tuple):
            return tuple(map(self.repad, outputs))
        if not isinstance(outputs, torch.Tensor):
            return outputs
        batch, length = self.given["attention_mask"].shape
        if outputs.shape[:2] == (1, self.rows.tokens):
            return self._spread(outputs[0], batch * length).unflatten(0, (batch, length))
        if outputs.ndim == 2 and outputs.shape[0] == self.rows.tokens:  # logits of a router
            return self._spread(outputs, batch * length)
        return outputs

    def _spread(self, x: torch.Tensor, size: int) -> torch.Tensor:
        assert self.index is not None  # `repad` has looked
        index = self.index.to(x.device)  # with accelerate's device_map, the last layer may be on another GPU
        return x.new_zeros(size, *x.shape[1:]).index_copy(0, index, x)


_plan: contextvars.ContextVar[UnpadPlan | None] = contextvars.ContextVar("plan of the running call", default=None)


@contextlib.contextmanager
def use_plan(plan: UnpadPlan | None):
    """Context manager: a bound backbone runs with `plan`."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


def current_plan() -> UnpadPlan | None:
    """Return the plan of the running call of a model, until its backbone starts."""
    return None if torch.compiler.is_compiling() else _plan.get()


def tokens_of(call: dict[str, Any]) -> Any:
    """Return the ids (B, S) or embeddings (B, S, H) in a call, or None."""
    return call.get("inputs_embeds") if call.get("input_ids") is None else call["input_ids"]


def cache_of(call: dict[str, Any]) -> Any:
    """Return the cache in a call, or None. transformers 5.24 renamed this argument."""
    return call.get("past_key_values") if call.get("cache") is None else call["cache"]
